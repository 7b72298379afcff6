"""Draws benches/results as pictures for the README and docs: python benches/plot.py (needs matplotlib)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from tables import CASES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benches" / "results"
# The same rows give the same file.
plt.rcParams.update({"svg.hashsalt": "te_patches", "svg.fonttype": "none", "font.size": 9})


def save(figure: Any, name: str, row: dict[str, Any]) -> None:
    words = f"{row['gpu']}, Transformer Engine {row['te']}, torch {row['torch']}, commit {row['commit']}, {row['date']}"
    figure.text(0.01, 0.01, f"{words}\n{row['command']}", fontsize=6, va="bottom")
    figure.savefig(ROOT / "docs" / name, metadata={"Date": None})
    print(f"docs/{name}")


def steps() -> None:
    """A step of every case: stock, patched, and the floor."""
    rows = json.loads((RESULTS / "step-h200.json").read_text())
    found = {(row["case"], row["tier"]): row for row in rows}
    figure, axes = plt.subplots(figsize=(8, 6))
    tiers = {"stock": ("Transformer Engine", "#9aa0a6"), "native": ("te_patches", "#2a7d4f")}
    cases = {case: label for case, label in CASES.items() if (case, "native") in found}
    for at, case in enumerate(cases):
        for place, (tier, (label, colour)) in enumerate(tiers.items()):
            if row := found.get((case, tier)):
                height = at + 0.4 * (place - 0.5)
                axes.barh(height, row["step_ms"], 0.38, color=colour, label=label if at == 0 else None)
                axes.text(row["step_ms"] * 1.03, height, f"{row['step_ms']:.1f}", va="center", fontsize=6)
        floor = found[case, "native"]["floor_ms"]
        axes.plot([floor, floor], [at - 0.42, at + 0.42], color="black", label="bytes / copy rate" if at == 0 else None)
    axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), [label.replace(", ", ",\n") for label in cases.values()], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms a step (logarithmic)")
    axes.set_title("One optimizer step, 1,000 parameters of 1,048,576 elements")
    axes.set_xlim(right=1000)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.15), fontsize=7)
    figure.subplots_adjust(left=0.27, right=0.97, top=0.94, bottom=0.13)
    save(figure, "steps.svg", rows[0])


def scaling() -> None:
    """Growth with the number of tensors and with their size."""
    file = RESULTS / "scaling-h200.json"
    if not file.is_file():
        return
    rows = json.loads(file.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    for tier, colour in (("stock", "#9aa0a6"), ("native", "#2a7d4f")):
        for sharded, line in ((False, "-"), (True, "--")):
            points = [r for r in rows if (r["case"], r["tier"], r["sharded"]) == ("tensors", tier, sharded)]
            name = f"{tier}, {'DTensors' if sharded else 'plain'}"
            left.plot([r["tensors"] for r in points], [r["host_ms"] for r in points], line, color=colour, label=name)
        points = [r for r in rows if (r["case"], r["tier"]) == ("elements", tier)]
        right.plot([r["elements"] for r in points], [r["kernel_ms"] for r in points], color=colour, label=tier)
    floors = [r for r in rows if (r["case"], r["tier"]) == ("elements", "native")]
    right.plot([r["elements"] for r in floors], [r["floor_ms"] for r in floors], ":", color="black", label="floor")
    for axes, what, unit in (
        (left, "tensors of 64 elements", "host ms"),
        (right, "elements of one tensor", "kernel ms"),
    ):
        axes.set(xscale="log", yscale="log", xlabel=what, ylabel=unit)
        axes.legend(fontsize=7)
    figure.subplots_adjust(left=0.08, right=0.98, top=0.96, bottom=0.22)
    save(figure, "scaling.svg", rows[0])


if __name__ == "__main__":
    steps()
    scaling()
