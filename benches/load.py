"""Loading and saving optimizer states: stock against patched, on one GPU in one run.

    python benches/load.py --out benches/results/load-h200.json
    python benches/load.py --tensors 8 --elements 65536        (anywhere, on CPU kernels)

Seconds until the device is done: of loads into an optimizer that has stepped the fastest of three (stock once, since it
scales its sources in place), of saves the fastest of two. Extra bytes: the peak of torch's allocator above what was
allocated before. gbs: bytes read and written over the time; copy_gbs and pinned_gbs are this GPU's own copies, between
device buffers (read plus written) and from page-locked memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import te_patches
import torch
from rich.console import Console
from rich.table import Table

CUDA = torch.cuda.is_available()
if not CUDA:
    import te_patches.cpu

    te_patches.cpu.enable()

from rows import Rows  # noqa: E402
from rows import options as row_options  # noqa: E402
from te_patches._bench import FP16_MOMENTS, MASTER, REMAINDER, copy_rate, synchronize  # noqa: E402
from transformer_engine.pytorch.optimizers import FusedAdam  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
CASES = {"bf16-remainder": REMAINDER, "bf16-fp16-moments": MASTER | FP16_MOMENTS}
SOURCES = ("gpu", "pageable", "pinned", "mapped")


def measured(action: Callable[[], object], runs: int) -> tuple[float, int]:
    """(seconds of the fastest run, largest peak of device memory above what was allocated before)."""
    times, peaks = [], [0]
    for _ in range(runs):
        synchronize()
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        action()
        synchronize()
        times.append(time.perf_counter() - begin)
        if CUDA:
            peaks.append(torch.cuda.max_memory_allocated() - before)
    return min(times), max(peaks)


def pinned_rate() -> float:
    """GB/s of a large copy from page-locked memory."""
    if not CUDA:
        return 0.0
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=DEVICE)
    seconds, _ = measured(lambda: target.copy_(source, non_blocking=True), 5)
    return source.numel() / seconds / 1e9


def converted(saved: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    states = {key: {name: change(value) for name, value in values.items()} for key, values in saved["state"].items()}
    return {**saved, "state": states}


def source_of(kind: str, host: dict[str, Any], folder: Path) -> dict[str, Any]:
    if kind == "gpu":
        return converted(host, lambda value: value.to(DEVICE))
    if kind == "pinned" and CUDA:
        return converted(host, lambda value: value.pin_memory())
    if kind == "mapped":
        path = folder / "optimizer.pt"
        torch.save(host, path)
        loaded: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
        return loaded
    return host


def step_once(optimizer: FusedAdam) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, device=DEVICE).to(param.dtype)
    optimizer.step()
    optimizer.zero_grad()


def measure(case: str, tensors: int, elements: int, add: Callable[[dict[str, Any]], None]) -> None:
    """Rows of one case: a load from each kind of source, and a save."""
    te_patches.revert()
    stock_load = FusedAdam.load_state_dict
    te_patches.apply()
    params = [torch.nn.Parameter(torch.randn(elements, device=DEVICE).bfloat16()) for _ in range(tensors)]
    mine, stock = (FusedAdam(params, **CASES[case]) for _ in range(2))
    step_once(mine)
    host = te_patches.state_dict_cpu(mine)
    sources = sum(value.nbytes for values in host["state"].values() for value in values.values())
    targets = sum(value.nbytes for values in mine.state.values() for value in values.values())
    # Sources of scaled states are read twice: their largest magnitude comes first.
    scaled = {name for name, dtype in mine.name_to_dtype_map.items() if dtype in (torch.float16, torch.uint8)}
    twice = sum(value.nbytes for values in host["state"].values() for name, value in values.items() if name in scaled)

    def row(source: str, theirs: tuple[float, int], ours: tuple[float, int]) -> None:
        moved = sources + targets + (twice if source == "gpu" else 0)
        values = {"case": case, "source": source, "stock_s": theirs[0], "patched_s": ours[0]}
        values |= {"stock_extra_bytes_per_param": theirs[1] / (tensors * elements), "patched_extra_bytes": ours[1]}
        add(values | {"gbs": moved / ours[0] / 1e9, "source_gbs": sources / ours[0] / 1e9})

    with tempfile.TemporaryDirectory() as folder:
        for kind in SOURCES:
            saved = source_of(kind, host, Path(folder))
            ours = measured(lambda saved=saved: mine.load_state_dict(saved), 3)
            report = te_patches.report(mine)["load"]
            assert report["in_place"] == report["states"], report
            step_once(stock)
            # Stock scales fp32 sources in place: its second load would read something else, and so would the next kind.
            theirs = measured(lambda saved=saved: stock_load(stock, saved), 1)
            stock.state.clear()
            row(kind, theirs, ours)
            del saved
            host = te_patches.state_dict_cpu(mine)
    ours = measured(lambda: te_patches.state_dict_cpu(mine), 2)
    theirs = measured(lambda: converted(mine.state_dict(), lambda value: value.cpu()), 2)
    row("save", theirs, ours)
    te_patches.revert()


@click.command(help=__doc__)
@click.option("--tensors", default=1024, show_default=True, help="parameters")
@click.option("--elements", default=1 << 20, show_default=True, help="elements of each")
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)), help="only these")
@row_options
def main(tensors: int, elements: int, cases: tuple[str, ...], revision: str | None, out: Path | None) -> None:
    rates = {"copy_gbs": copy_rate(), "pinned_gbs": pinned_rate()}
    rows = Rows(revision, out)
    for case in cases or CASES:
        measure(case, tensors, elements, lambda row: rows.add(row | rates))
    table = Table(
        "case", "source", "stock s", "patched s", "ratio", "source GB/s", "GB/s", "stock B/param", "extra MiB"
    )
    for row in rows:
        ratio = row["stock_s"] / row["patched_s"]
        numbers = [f"{row['stock_s']:.4f}", f"{row['patched_s']:.4f}", f"{ratio:.1f}", f"{row['source_gbs']:.1f}"]
        numbers += [f"{row['gbs']:.0f}", f"{row['stock_extra_bytes_per_param']:.1f}"]
        table.add_row(row["case"], row["source"], *numbers, f"{row['patched_extra_bytes'] / 2**20:.1f}")
    about = rows.about
    title = f"{about['gpu']}, copy {rates['copy_gbs']:.0f}, pinned {rates['pinned_gbs']:.1f} GB/s, TE {about['te']}"
    Console(width=140).print(title, table)


if __name__ == "__main__":
    main()
