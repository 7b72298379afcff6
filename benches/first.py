"""The first step of a process: what planning, compiling, loading and proving a kernel takes.

    python benches/first.py --out benches/results/first-h200.json

Each row is a new process whose states were made before: ms of the first step, of finding NVRTC and of the proof within
it, and of the second step, until the device is done. "cold": nothing in the kernels' cache; "cached": what the row
before left there. The processes start together and step one after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import click
import te_patches
import te_patches.cpu
from rich.console import Console
from rich.table import Table
from rows import Rows
from rows import options as row_options
from te_patches import _bench as bench
from te_patches import _nvrtc, _proof, _releases

TIERS = {"stock": ("stock", 1), "cold": ("native", 1), "cached": ("native", 3)}
"""Tier and processes; medians of several."""
READY = "ready to step"


def start(arguments: list[str], cache: str) -> subprocess.Popen[str]:
    """A process that makes states and then waits."""
    command, environment = [sys.executable, __file__, *arguments], os.environ | {"TE_PATCHES_CACHE": cache}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ready(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Waits until all of them wait."""
    for process in processes:
        if not any(line.strip() == READY for line in iter(process.stdout.readline, "")):  # type: ignore[union-attr]
            raise RuntimeError(f"it did not get so far: {process.args!r}")


def step(process: subprocess.Popen[str]) -> dict[str, float]:
    """Lets one of them step; ms of its first and second step."""
    out, _ = process.communicate("\n")
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


@contextlib.contextmanager
def spent(module: ModuleType, name: str) -> Iterator[list[float]]:
    """ms of each call of a function that is looked up in its module."""
    function = getattr(module, name)
    taken: list[float] = []

    def measured(*arguments: Any) -> None:
        taken.append(bench.timed(lambda: function(*arguments))[1])

    with mock.patch.object(module, name, measured):
        yield taken


def first(tier: str, case: str, tensors: int, elements: int) -> dict[str, float]:
    """ms of this process's first and second step, and of what of the first one finding NVRTC and the proof take."""
    dtype, sharded, options, _, fixed = bench.CASES[case]
    if tier != "stock":
        te_patches.apply(kernels=tier)  # type: ignore[arg-type]
    model = bench.Model(dtype, sharded, [fixed or elements] * tensors)
    model.fill()
    optimizer = _releases.import_fused_adam().FusedAdam(model.params, **bench.ARGUMENTS, **options)
    for param in model.params:
        optimizer.initialize_state(param, optimizer.store_param_remainders)
    bench.synchronize()
    print(READY, flush=True)
    input()
    with spent(_nvrtc, "preload") as nvrtc, spent(_proof, "prove") as proof:
        times = [bench.timed(optimizer.step)[1] for _ in range(2)]
    return {"first_ms": times[0], "nvrtc_ms": sum(nvrtc), "proof_ms": sum(proof), "second_ms": times[1]}


@click.command(help=__doc__)
@click.option("--tensors", default=1000, show_default=True, help="parameters")
@click.option("--elements", default=1 << 16, show_default=True, help="elements of each")
@click.option("--case", "cases", multiple=True, type=click.Choice(list(bench.CASES)), help="only these")
@click.option("--in-this-process", "here", hidden=True)
@row_options
def main(
    tensors: int, elements: int, cases: tuple[str, ...], here: str | None, revision: str | None, out: Path | None
) -> None:
    if not bench.CUDA:
        te_patches.cpu.enable()
    if here:
        print(json.dumps(first(here, cases[0], tensors, elements)))
        return
    rows, table = Rows(revision, out), Table("case", "process", "first ms", "of it NVRTC", "proof", "second ms")
    size = ["--tensors", str(tensors), "--elements", str(elements)]
    with contextlib.ExitStack() as folders:
        waiting = []
        for case in cases or ("dtensor-bf16-remainder", "plain-bf16-fp16-moments"):
            folder = folders.enter_context(tempfile.TemporaryDirectory())
            for name, (tier, count) in TIERS.items():
                arguments = ["--in-this-process", tier, "--case", case, *size]
                waiting.append((case, name, [start(arguments, folder) for _ in range(count)]))
        ready(process for _, _, processes in waiting for process in processes)
        for case, name, processes in waiting:
            found = sorted((step(process) for process in processes), key=lambda times: times["first_ms"])
            median = found[len(found) // 2]
            rows.add({"case": case, "process": name, "tensors": tensors, "elements": elements} | median)
            table.add_row(case, name, *(f"{value:.1f}" for value in median.values()))
    Console(width=140).print(f"{rows.about['gpu']}, TE {rows.about['te']}, torch {rows.about['torch']}", table)


if __name__ == "__main__":
    main()
