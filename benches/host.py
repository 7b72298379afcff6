"""Where the host's time of a patched step goes, by the ranges in torch's profiler.

    python benches/host.py --out benches/results/host-h200.json
    python benches/host.py --elements 64        (anywhere, on CPU kernels)

us, medians over steps with fresh gradients: alone, the whole call without a profiler. Under it, which takes some time
itself and has torch's hooks entered: step, the whole call; before, torch's hooks and range and Python's dispatch until
the first group is read; read, finding and checking every tensor of the group; plan, tables, counters and scratch memory
between reading and launching; launch, the launches; after, what is left.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import click
import te_patches.cpu
import torch
from rich.console import Console
from rich.table import Table
from rows import Rows
from rows import options as row_options
from te_patches import _bench as bench

PHASES = ("alone", "step", "before", "read", "plan", "launch", "after")


def phases(step: Any) -> dict[str, float]:
    """A step's phases in us."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        # The first launch under a profiler takes half a millisecond more.
        torch.zeros(1, device=bench.DEVICE)
        bench.synchronize()
        step()
    ranges = {}
    for event in profiler.events():
        name = event.name.removeprefix("te_patches: group 0: ")
        if event.name.startswith(("Optimizer.step", "te_patches: group 0")):
            ranges["read" if name == "read" else "step" if name == event.name else "launch"] = event.time_range
    whole, read, launch = ranges["step"], ranges["read"], ranges["launch"]
    return {
        "step": whole.end - whole.start,
        "before": read.start - whole.start,
        "read": read.end - read.start,
        "plan": launch.start - read.end,
        "launch": launch.end - launch.start,
        "after": whole.end - launch.end,
    }


@click.command(help=__doc__)
@click.option("--tensors", default=1000, show_default=True, help="parameters")
@click.option("--elements", default=1 << 20, show_default=True, help="elements of each")
@click.option("--steps", default=9, show_default=True, help="steps measured")
@row_options
def main(tensors: int, elements: int, steps: int, revision: str | None, out: Path | None) -> None:
    if not bench.CUDA:
        te_patches.cpu.enable()
    table, rows = Table("case", "recalled", *(f"{phase} us" for phase in PHASES)), Rows(revision, out)
    for case, (dtype, sharded, options, _, fixed) in bench.CASES.items():
        if case.endswith("-graph"):
            continue
        model = bench.Model(dtype, sharded, [fixed or elements] * tensors)
        model.fill()
        step = bench.patched("native")(model, options)
        found = []
        for at in range(steps + 2):
            model.fill()
            bench.synchronize()
            taken = phases(step)
            model.fill()
            taken["alone"] = 1e3 * bench.timed(step)[0]
            # The first two note what the tensors are and start the profiler.
            if at >= 2:
                found.append(taken)
        medians = {phase: statistics.median(taken[phase] for taken in found) for phase in PHASES}
        recalled = te_patches.report(step.__self__)["groups"][0]["recalled"]  # type: ignore[attr-defined]
        rows.add({"case": case, "tensors": tensors, "recalled": recalled} | medians)
        table.add_row(case, str(recalled), *(f"{medians[phase]:.0f}" for phase in PHASES))
    Console(width=140).print(f"{rows.about['gpu']}, TE {rows.about['te']}, torch {rows.about['torch']}", table)


if __name__ == "__main__":
    main()
