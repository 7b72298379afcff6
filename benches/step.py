"""One optimizer step, tier by tier, on one device in one run.

    python benches/step.py --out benches/results/step-h200.json
    python benches/step.py --tensors 10 --elements 4096        (anywhere, on CPU kernels)

What the columns mean: te_patches._bench; the rivals and how to install them: rivals.py.
"""

from __future__ import annotations

from pathlib import Path

import click
import te_patches.cpu
from rich.console import Console
from rich.progress import track
from te_patches import _bench as bench

if not bench.CUDA:
    te_patches.cpu.enable()

from rivals import RIVALS
from rows import Rows
from rows import options as row_options

TIERS: dict[str, bench.Maker] = {
    **bench.TIERS,
    "replay": bench.patched("replay"),
    **RIVALS,
}


@click.command(help=__doc__)
@click.option("--tensors", default=1000, show_default=True, help="parameters")
@click.option("--elements", default=1 << 20, show_default=True, help="elements of each")
@click.option("--steps", default=7, show_default=True, help="steps measured; slow tiers take fewer")
@click.option("--case", "cases", multiple=True, type=click.Choice(list(bench.CASES)), help="only these")
@click.option("--tier", "tiers", multiple=True, type=click.Choice(list(TIERS)), help="only these")
@row_options
def main(
    tensors: int,
    elements: int,
    steps: int,
    cases: tuple[str, ...],
    tiers: tuple[str, ...],
    revision: str | None,
    out: Path | None,
) -> None:
    rows = Rows(revision, out)
    console = Console(width=140, stderr=True)
    chosen = {tier: maker for tier, maker in TIERS.items() if not tiers or tier in tiers}
    names = cases or tuple(bench.CASES)
    measured = bench.rows(names, chosen, tensors, elements, steps, console)
    for row in track(measured, total=len(names) * len(chosen), console=console):
        rows.add(row)
    rate = f"copy {rows[0]['copy_gbs']:.0f} GB/s" if rows else "nothing was measured"
    words = f"{rows.about['gpu']}, {rate}, TE {rows.about['te']}, torch {rows.about['torch']}"
    Console(width=140).print(words, bench.table(rows))


if __name__ == "__main__":
    main()
