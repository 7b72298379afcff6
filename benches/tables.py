"""Writes the tables in README.md and docs/performance.md from benches/results: python benches/tables.py"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def results(name: str) -> list[dict[str, Any]]:
    """The rows of benches/results/NAME-h200.json."""
    rows: list[dict[str, Any]] = json.loads((ROOT / "benches" / "results" / f"{name}-h200.json").read_text())
    return rows


def about(row: dict[str, Any]) -> str:
    """Where and how rows were measured."""
    return f"{row['gpu']}, Transformer Engine {row['te']}, {row['date']}, commit {row['commit']}: `{row['command']}`"


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *lines])


CASES = {
    "dtensor-bf16-remainder": "DTensor bf16 + int16 remainder",
    "dtensor-bf16-master": "DTensor bf16 + fp32 master",
    "dtensor-fp32": "DTensor fp32",
    "plain-fp32": "plain fp32",
    "plain-bf16-remainder": "plain bf16 + remainder",
    "plain-bf16-remainder-bf16-moments": "plain bf16 + remainder, bf16 moments",
    "plain-bf16-bf16-moments": "plain bf16, bf16 moments, no master",
    "plain-bf16-fp16-moments": "plain bf16 + master, fp16 moments (two passes)",
    "plain-bf16-fp8-fp16-moments": "plain bf16 + master, fp8 exp_avg, fp16 exp_avg_sq (two passes)",
    "fp8-parameters": "fp8 parameters (delayed scaling) + fp32 master",
    "plain-bf16-capturable": "plain bf16 + master, capturable",
    "plain-bf16-capturable-graph": "the same, replayed as a CUDA graph",
    "dtensor-small": "DTensor bf16 + remainder, 4,096 elements each",
}


def table() -> str:
    """Step, host and kernel times of stock and native."""
    rows = results("step")
    found = {(row["case"], row["tier"]): row for row in rows}
    lines = [
        "| parameters, states | step ms: stock | patched | host ms: stock | patched "
        "| kernels ms: stock | patched (of the floor) |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, label in CASES.items():
        if (case, "native") not in found:
            continue
        stock, native = found[case, "stock"], found[case, "native"]
        columns = [
            f"{stock['step_ms']:.1f}",
            f"{native['step_ms']:.2f}",
            f"{stock['host_ms']:.1f}",
            f"{native['host_ms']:.2f}",
            f"{stock['kernel_ms']:.2f}",
            f"{native['kernel_ms']:.2f} ({native['kernel_ms'] / native['floor_ms']:.2f})",
        ]
        lines.append(f"| {label} | {' | '.join(columns)} |")
    first = rows[0]
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
    rows = results("load")
    for row in rows:
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
    first = rows[0]
    rates = f"copy {first['copy_gbs']:.0f} GB/s, from page-locked memory {first['pinned_gbs']:.1f} GB/s"
    return "\n".join([*lines, "", f"{first['gpu']}, {rates}, {first['date']}."])


RIVALS = {
    "stock": "Transformer Engine",
    "nemo-0.7.0": "the same with NeMo Automodel 0.7.0's patches",
    "python-plan": "a plan in Python over its kernels",
    "native": "te_patches",
    "torch-fused": "torch `AdamW(fused=True)`",
    "torch-foreach": "torch `AdamW(foreach=True)`",
    "deepspeed": "DeepSpeed `FusedAdam`",
    "bitsandbytes": "bitsandbytes `AdamW`",
    "bitsandbytes-8bit": "bitsandbytes `AdamW8bit`",
    "torchao-8bit": "torchao `AdamW8bit`",
    "flashoptim": "flashoptim `FlashAdamW`",
}


def rivals() -> str:
    """What somebody may use instead; some take no DTensors."""
    rows = results("rivals")
    found = {(row["case"], row["tier"]): row for row in rows}
    labels = {
        "dtensor-bf16-remainder": "DTensor bf16",
        "plain-fp32": "plain fp32",
        "plain-bf16-remainder": "plain bf16",
    }
    cases = {case: label for case, label in labels.items() if (case, "native") in found}

    def cells(case: str, tier: str) -> list[str]:
        row = found.get((case, tier))
        return [f"{row[name]:.2f}" for name in ("step_ms", "host_ms", "kernel_ms")] if row else ["", "", ""]

    measured = {tier for _, tier in found}
    lines = [
        [label, *(cell for case in cases for cell in cells(case, tier))]
        for tier, label in RIVALS.items()
        if tier in measured
    ]
    heads = ["", *(head for name in cases.values() for head in (f"{name}: step ms", "host ms", "kernels ms"))]
    return f"{markdown(heads, lines)}\n\n{about(rows[0])}"


def host() -> str:
    """Where the host's time goes."""
    rows = results("host")
    phases = ("alone", "step", "before", "read", "plan", "launch", "after")
    lines = [[CASES[row["case"]], *(f"{row[phase]:.0f}" for phase in phases)] for row in rows]
    return f"{markdown(['us', *phases], lines)}\n\n{about(rows[0])}"


def scaling() -> str:
    """Growth, and shapes of a real model."""
    rows = results("scaling")
    found = {(row["case"], row["sharded"], row["tensors"], row["elements"], row["tier"]): row for row in rows}
    lines = []
    for (case, sharded, tensors, elements, tier), row in found.items():
        if tier != "native":
            continue
        stock = found.get((case, sharded, tensors, elements, "stock"))
        words = [case + (", DTensors" if sharded else ""), f"{tensors:,}", f"{elements:,}"]
        words += [f"{stock['host_ms']:.2f}", f"{stock['step_ms']:.2f}"] if stock else ["", ""]
        words += [f"{row['host_ms']:.2f}", f"{row['step_ms']:.2f}", f"{row['kernel_ms']:.3f}"]
        # Below that a launch takes longer than its bytes.
        lines.append([*words, f"{row['kernel_ms'] / row['floor_ms']:.2f}" if row["floor_ms"] > 0.02 else ""])
    heads = [
        "",
        "tensors",
        "elements",
        "host ms: stock",
        "step ms: stock",
        "host ms",
        "step ms",
        "kernels ms",
        "of the floor",
    ]
    return f"{markdown(heads, lines)}\n\n{about(rows[0])}"


def first() -> str:
    """The first step of a process."""
    rows = results("first")
    lines = [[CASES[row["case"]], row["process"], f"{row['first_ms']:.0f}", f"{row['second_ms']:.1f}"] for row in rows]
    return f"{markdown(['', 'process', 'first step ms', 'second ms'], lines)}\n\n{about(rows[0])}"


def train() -> str:
    """A training loop."""
    rows = results("train")
    lines = []
    for row in rows:
        share = f"{row['step_ms'] / row['iteration_ms']:.1%}"
        lines.append([row["tier"], f"{row['iteration_ms']:.1f}", f"{row['step_ms']:.2f}", share, f"{row['loss']:.4f}"])
    size = f"{rows[0]['parameters']:,} parameters in {rows[0]['tensors']} tensors"
    return f"{markdown(['step', 'iteration ms', 'step ms', 'of it', 'last loss'], lines)}\n\n{size}. {about(rows[0])}"


MEASURED = {"rivals": rivals, "host": host, "scaling": scaling, "first": first, "train": train}
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"figures": table, "loads": loads},
    "docs/performance.md": {
        name: content
        for name, content in MEASURED.items()
        if (ROOT / "benches" / "results" / f"{name}-h200.json").is_file()
    },
}


if __name__ == "__main__":
    for file, tables in TABLES.items():
        text = (ROOT / file).read_text()
        for name, content in tables.items():
            begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
            filled = f"{begin}\n{content()}\n{end}"
            text = re.sub(f"{begin}.*{end}", lambda _, filled=filled: filled, text, flags=re.S)
        (ROOT / file).write_text(text)
