"""Writes the README's tables from benches/results/{step,load}-h200.json: python benches/readme_table.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS, LOADS = (
    json.loads((ROOT / "benches" / "results" / f"{name}-h200.json").read_text()) for name in ("step", "load")
)
CASES = {
    "dtensor-bf16-remainder": "DTensor bf16 + int16 remainder",
    "dtensor-bf16-master": "DTensor bf16 + fp32 master",
    "dtensor-fp32": "DTensor fp32",
    "plain-fp32": "plain fp32",
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


SOURCES = {
    "gpu": "load from GPU tensors",
    "pageable": "load from pageable memory",
    "pinned": "load from page-locked memory",
    "mapped": "load from a mapped file",
    "save": "save to host memory",
}


def loads() -> str:
    """Seconds and extra memory of loading and saving."""
    lines = [
        "| | states | seconds: stock | patched | patched GB/s of source "
        "| extra memory: stock, bytes a parameter | patched |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in LOADS:
        columns = [
            SOURCES[row["source"]],
            row["case"].replace("bf16-", "bf16 + ", 1).replace("-", " "),
            f"{row['stock_s']:.3f}",
            f"{row['patched_s']:.4f}",
            f"{row['source_gbs']:.0f}",
            f"{row['stock_extra_bytes_per_param']:.1f}",
            f"{row['patched_extra_bytes'] / 2**20:.0f} MiB",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    first = LOADS[0]
    rates = f"copy {first['copy_gbs']:.0f} GB/s, from page-locked memory {first['pinned_gbs']:.1f} GB/s"
    return "\n".join([*lines, "", f"{first['gpu']}, {rates}, {first['date']}."])


if __name__ == "__main__":
    readme = ROOT / "README.md"
    text = readme.read_text()
    for name, content in (("figures", table()), ("loads", loads())):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        text = re.sub(f"{begin}.*{end}", lambda _, c=content, b=begin, e=end: f"{b}\n{c}\n{e}", text, flags=re.S)
    readme.write_text(text)
