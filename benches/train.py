"""A training loop with stock's and with the patched step: how much of an iteration is the optimizer's.

    python benches/train.py --out benches/results/train-h200.json
    python benches/train.py --layers 1 --width 64 --batch 1 --length 32        (anywhere, on CPU kernels)

A decoder of bf16 parameters sharded by FSDP2 (one rank; parameters are DTensors), random tokens, gradients clipped,
then FusedAdam with int16 remainders. Medians over iterations: iteration_ms from one iteration to the next, step_ms of
it between the marks before and after the step in the device's stream, during which it does nothing else.
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import click
import te_patches
import te_patches.cpu
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rows import Rows
from rows import options as row_options
from te_patches import _bench as bench
from te_patches import _releases
from torch import nn
from torch.distributed.fsdp import fully_shard

VOCABULARY = 32_000


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        heads, how = max(1, width // 128), {"batch_first": True, "norm_first": True, "bias": False, "dropout": 0.0}
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", **how)  # type: ignore[arg-type]
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x)  # type: ignore[no-any-return]


def mark() -> Any:
    """A mark in the device's stream."""
    if not bench.CUDA:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """ms from one mark to another."""
    return float(begin.elapsed_time(end)) if bench.CUDA else 1e3 * (end - begin)


def train(layers: int, width: int, batch: int, length: int, iterations: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(bench.DEVICE):
        model = Decoder(layers, width).bfloat16()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = _releases.import_fused_adam().FusedAdam(model.parameters(), lr=1e-4, **bench.REMAINDER)
    marks = []
    for _ in range(iterations + 3):
        tokens = torch.randint(VOCABULARY, (batch, length + 1), device=bench.DEVICE)
        begin = mark()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = mark()
        optimizer.step()
        after = mark()
        optimizer.zero_grad()
        marks.append((begin, before, after))
    bench.synchronize()
    # The first iterations make states, compile and fill torch's cache of memory.
    marks = marks[3:]
    whole = [between(one[0], next_one[0]) for one, next_one in itertools.pairwise(marks)]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tensors": len(list(model.parameters())),
        "iteration_ms": statistics.median(whole),
        "step_ms": statistics.median(between(before, after) for _, before, after in marks),
        "loss": loss.item(),
    }


@click.command(help=__doc__)
@click.option("--layers", default=24, show_default=True)
@click.option("--width", default=2048, show_default=True)
@click.option("--batch", default=4, show_default=True, help="sequences")
@click.option("--length", default=2048, show_default=True, help="tokens of each")
@click.option("--iterations", default=15, show_default=True, help="iterations measured")
@row_options
def main(
    layers: int, width: int, batch: int, length: int, iterations: int, revision: str | None, out: Path | None
) -> None:
    if not bench.CUDA:
        te_patches.cpu.enable()
    backend = "nccl" if bench.CUDA else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows, table = (
        Rows(revision, out),
        Table("step", "parameters", "tensors", "iteration ms", "step ms", "of it", "loss"),
    )
    for tier in ("stock", "native"):
        te_patches.revert()
        if tier == "native":
            te_patches.apply(kernels="native")
        found = train(layers, width, batch, length, iterations)
        rows.add({"tier": tier, "batch": batch, "length": length, "layers": layers, "width": width} | found)
        share = f"{found['step_ms'] / found['iteration_ms']:.1%}"
        figures = [f"{found[name]:.2f}" for name in ("iteration_ms", "step_ms")]
        table.add_row(tier, f"{found['parameters']:,}", str(found["tensors"]), *figures, share, f"{found['loss']:.4f}")
    Console(width=140).print(f"{rows.about['gpu']}, TE {rows.about['te']}, torch {rows.about['torch']}", table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
