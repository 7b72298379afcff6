"""Sweeps the constants of Adam's kernels on one GPU: threads of a block, elements per access, accesses in flight and,
for scaled states, the chunks between finding magnitudes and updating.

    maturin develop --release --features tune && python benches/tune.py [--case plain-fp32]

Every combination is compared with Transformer Engine's kernel before it is measured. Prints the fastest and the
slowest of each case: milliseconds of kernel time, and how many times that which its bytes take at this GPU's copy rate.
"""

from __future__ import annotations

import itertools

import click
import te_patches
from rich.console import Console
from rich.table import Table
from te_patches import _bench as bench
from te_patches import _core

CASES = (
    "plain-fp32",
    "plain-bf16-remainder",
    "plain-bf16-remainder-bf16-moments",
    "plain-bf16-fp16-moments",
    "plain-bf16-fp8-fp16-moments",
)
NAMES = ("threads", "vector", "unroll", "lag")


def options(function):
    for name, values in zip(NAMES, ((128, 256, 512), (4, 8), (1, 2), (128, 256, 512)), strict=True):
        function = click.option(f"--{name}", multiple=True, default=values, show_default=True)(function)
    return function


@click.command(help=__doc__)
@click.option("--case", "cases", multiple=True, type=click.Choice(list(bench.CASES)), default=CASES, help="only these")
@click.option("--tensors", default=1000, show_default=True, help="parameters")
@click.option("--elements", default=1 << 20, show_default=True, help="elements of each")
@click.option("--rows", "shown", default=6, show_default=True, help="fastest combinations that are printed")
@options
def main(cases: tuple[str, ...], tensors: int, elements: int, shown: int, **sweep: tuple[int, ...]) -> None:
    console = Console(width=140)
    rate = bench.copy_rate()
    console.print(f"{bench.setting()['gpu']}: copy {rate:.0f} GB/s")
    te_patches.apply(kernels="native")
    for case in cases:
        bench.torch.cuda.empty_cache()
        dtype, sharded, arguments, moved, _ = bench.CASES[case]
        model = bench.Model(dtype, sharded, [elements] * tensors)
        model.fill()
        optimizer = bench.optimizer_of(model, arguments)
        floor = moved * tensors * elements / rate / 1e6
        scaled = "fp16" in case or "fp8" in case
        lags = sweep["lag"] if scaled else sweep["lag"][:1]
        rows = []
        for constants in itertools.product(*(sweep[name] for name in NAMES[:3]), lags):
            _core.tune(bench.torch.cuda.current_device(), *constants)
            optimizer.step()
            rows.append((min(bench.kernels(optimizer.step)[0] for _ in range(3)), *constants))
        rows.sort()
        table = Table("ms", "of the floor", *NAMES, title=f"{case}: floor {floor:.3f} ms")
        for ms, *constants in [*rows[:shown], *rows[shown:][-1:]]:
            table.add_row(f"{ms:.3f}", f"{ms / floor:.3f}", *(str(value) for value in constants))
        console.print(table)
        del model, optimizer


if __name__ == "__main__":
    main()
