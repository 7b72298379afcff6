"""Writes the README's table from benches/results/step-h200.json: python benches/readme_table.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = json.loads((ROOT / "benches" / "results" / "step-h200.json").read_text())
CASES = {
    "dtensor-bf16-remainder": "DTensor bf16 + int16 remainder",
    "dtensor-bf16-master": "DTensor bf16 + fp32 master",
    "dtensor-fp32": "DTensor fp32",
    "plain-bf16-remainder": "plain bf16 + remainder",
    "plain-bf16-remainder-bf16-moments": "plain bf16 + remainder, bf16 moments",
    "plain-bf16-fp16-moments": "plain bf16 + master, fp16 moments (two passes)",
    "plain-bf16-fp8-fp16-moments": "plain bf16 + master, fp8 exp_avg, fp16 exp_avg_sq (two passes)",
    "plain-bf16-capturable": "plain bf16 + master, capturable",
    "plain-bf16-capturable-graph": "the same, replayed as a CUDA graph",
    "dtensor-small": "DTensor bf16 + remainder, 4,096 elements each",
}


def table() -> str:
    """Step, host and kernel times of stock and native."""
    found = {(row["case"], row["tier"]): row for row in ROWS}
    lines = [
        "| parameters, states | step ms: stock | Python plan | patched | host ms: stock | patched "
        "| kernels ms: stock | patched (of the floor) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, label in CASES.items():
        stock, native = found[case, "stock"], found[case, "native"]
        plan = found.get((case, "python-plan"))
        columns = [
            f"{stock['step_ms']:.1f}",
            f"{plan['step_ms']:.1f}" if plan else "",
            f"{native['step_ms']:.2f}",
            f"{stock['host_ms']:.1f}",
            f"{native['host_ms']:.2f}",
            f"{stock['kernel_ms']:.2f}",
            f"{native['kernel_ms']:.2f} ({native['kernel_ms'] / native['floor_ms']:.2f})",
        ]
        lines.append(f"| {label} | {' | '.join(columns)} |")
    first = ROWS[0]
    lines.append("")
    lines.append(f"{first['gpu']}, copy {first['copy_gbs']:.0f} GB/s, {first['date']}.")
    return "\n".join(lines)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    begin, end = "<!-- figures:begin -->", "<!-- figures:end -->"
    text = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{table()}\n{end}", readme.read_text(), flags=re.S)
    readme.write_text(text)
