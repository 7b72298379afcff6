"""How a step's time grows: with the number of tensors, with their size, and for shapes of a real model.

    python benches/scaling.py --out benches/results/scaling-h200.json
    python benches/scaling.py --largest 1000000        (anywhere, on CPU kernels)

bf16 parameters with int16 remainders, AdamW: 26 bytes an element. 10,000 tensors of 4,096 elements; 21,000 of one; the
shards that one of 64 ranks has of twelve layers of DeepSeek-V3 (256 experts), and those that one of 512 ranks has of
all 61. "elements": one tensor of 1 Ki to 2 Gi + 8 elements. "tensors": 10 to 100,000 tensors of 64 elements (up to
10,000 DTensors, whose states Transformer Engine takes a while to make). What the columns mean: te_patches._bench.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import click
import te_patches.cpu
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rows import Rows
from rows import options as row_options
from te_patches import _bench as bench

BYTES = 26
"""Read and written for each element."""
STOCK_UP_TO = 1000
"""Tensors; stock's Python would take minutes beyond."""


def deepseek_v3(layers: int, ranks: int) -> list[int]:
    """Elements of one rank's shards, each parameter cut along its first dimension. Source of the shapes: the model's
    config.json (hidden 7168, 128 heads, q_lora 1536, kv_lora 512, rope 64, nope 128, v 128, dense 18432, experts 2048,
    vocabulary 129280; the first three layers are dense, one expert of each other layer is shared)."""
    hidden, heads, q_lora, kv_lora, rope, nope, value = 7168, 128, 1536, 512, 64, 128, 128
    attention = [(q_lora, hidden), (q_lora,), (heads * (nope + rope), q_lora), (kv_lora + rope, hidden), (kv_lora,)]
    attention += [(heads * (nope + value), kv_lora), (hidden, heads * value), (hidden,), (hidden,)]

    def mlp(inner: int) -> list[tuple[int, ...]]:
        return [(inner, hidden), (inner, hidden), (hidden, inner)]

    shapes: list[tuple[int, ...]] = [(129280, hidden), (129280, hidden), (hidden,)]
    for layer in range(layers):
        shapes += attention
        shapes += mlp(18432) if layer < 3 else [(256, hidden), *(shape for _ in range(257) for shape in mlp(2048))]
    sizes = [-(-shape[0] // ranks) * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    return [size for size in sizes if size]


def cases() -> Iterator[tuple[str, bool, list[int]]]:
    """(what grows, whether the parameters are DTensors, sizes)."""
    yield "10,000 of 4,096 elements", True, [4096] * 10_000
    yield "21,000 of one element", True, [1] * 21_000
    yield "DeepSeek-V3, 12 layers, 64 ranks", True, deepseek_v3(12, 64)
    yield "DeepSeek-V3, 512 ranks", True, deepseek_v3(61, 512)
    for power in range(10, 32, 3):
        yield "elements", False, [1 << power]
    yield "elements", False, [(1 << 31) + 8]
    for power in range(1, 6):
        yield "tensors", False, [64] * 10**power
        if power < 5:
            yield "tensors", True, [64] * 10**power


@click.command(help=__doc__)
@click.option("--steps", default=3, show_default=True, help="steps measured")
@click.option("--largest", default=6 << 30, show_default=True, help="leave out what has more elements in all")
@row_options
def main(steps: int, largest: int, revision: str | None, out: Path | None) -> None:
    if not bench.CUDA:
        te_patches.cpu.enable()
    console = Console(width=140, stderr=True)
    rate, rows = bench.copy_rate(), Rows(revision, out)
    table = Table("case", "DTensors", "tensors", "elements", "tier", "host ms", "step ms", "kernel ms", "of the floor")
    for case, sharded, sizes in track([*cases()], console=console):
        elements = sum(sizes)
        if elements > largest:
            continue
        for tier, maker in bench.TIERS.items():
            if tier == "stock" and len(sizes) > STOCK_UP_TO:
                continue
            gc.collect()
            if bench.CUDA:
                torch.cuda.empty_cache()
            try:
                figures = bench.measure(maker, bench.Model(bench.BF16, sharded, sizes), bench.REMAINDER, steps, False)
            except torch.OutOfMemoryError as error:
                console.print(f"{case}, {tier}: not measured, {error}")
                continue
            floor = BYTES * elements / rate / 1e6
            row = {"case": case, "sharded": sharded, "tensors": len(sizes), "elements": elements, "tier": tier}
            rows.add(row | figures | {"floor_ms": floor, "copy_gbs": rate})
            numbers = [f"{figures[name]:.3f}" for name in ("host_ms", "step_ms", "kernel_ms")]
            words = (case, "yes" if sharded else "no", f"{len(sizes):,}", f"{elements:,}", tier)
            table.add_row(*words, *numbers, f"{figures['kernel_ms'] / floor:.2f}")
    about = rows.about
    Console(width=140).print(f"{about['gpu']}, copy {rate:.0f} GB/s, TE {about['te']}, torch {about['torch']}", table)


if __name__ == "__main__":
    main()
