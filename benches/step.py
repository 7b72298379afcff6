"""One optimizer step, tier by tier, on one device in one run.

    python benches/step.py --out benches/results/step-h200.json
    python benches/step.py --tensors 10 --elements 4096        (anywhere, on CPU kernels)

host_ms: until step() returns, the device idle before. step_ms: until the device is done. kernel_ms and launches: the
device's own record (torch.profiler). floor_ms: the bytes an update must move at the rate at which this device copied
8.6 GB in this run. Medians over fresh random gradients. The first tier of a case builds the model, the others go on.
"""

from __future__ import annotations

import datetime
import gc
import inspect
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import te_patches
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

CUDA = torch.cuda.is_available()
if not CUDA:
    import te_patches.cpu

    te_patches.cpu.enable()

from python_plan import PythonPlan  # noqa: E402
from transformer_engine.pytorch.optimizers import FusedAdam  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
REMAINDER = {"master_weights": True, "store_param_remainders": True}
MASTER = {"master_weights": True}
BF16_MOMENTS = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
FP16_MOMENTS = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
FP8_MOMENTS = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16}

# parameter dtype, DTensor, options, bytes an element moves, tensor size (None: --elements). Stock writes gradients back
# in capturable mode; without loss scaling they do not change, so an update need not.
CASES: dict[str, tuple[torch.dtype, bool, dict[str, Any], int, int | None]] = {
    "dtensor-bf16-remainder": (BF16, True, REMAINDER, 26, None),
    "dtensor-bf16-master": (BF16, True, MASTER, 28, None),
    "dtensor-fp32": (FP32, True, {}, 28, None),
    "plain-bf16-remainder": (BF16, False, REMAINDER, 26, None),
    "plain-bf16-remainder-bf16-moments": (BF16, False, REMAINDER | BF16_MOMENTS, 18, None),
    "plain-bf16-fp16-moments": (BF16, False, MASTER | FP16_MOMENTS, 20, None),
    "plain-bf16-fp8-fp16-moments": (BF16, False, MASTER | FP8_MOMENTS, 18, None),
    "plain-bf16-capturable": (BF16, False, MASTER | {"capturable": True}, 28, None),
    "plain-bf16-capturable-graph": (BF16, False, MASTER | {"capturable": True}, 28, None),
    "dtensor-small": (BF16, True, REMAINDER, 26, 4096),
}
TIERS = ("stock", "python-plan", "torch-fused", "replay", "native")


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """(ms until it returned, ms until the device was done)."""
    synchronize()
    begin = time.perf_counter()
    action()
    returned = time.perf_counter()
    synchronize()
    return 1e3 * (returned - begin), 1e3 * (time.perf_counter() - begin)


def copy_rate() -> float:
    """GB/s of a large device-to-device copy, bytes read plus written."""
    source = torch.randn((1 << 30) if CUDA else (1 << 24), device=DEVICE)
    target = torch.empty_like(source)
    times = [timed(lambda: target.copy_(source))[1] for _ in range(12)][2:]
    return 2 * source.numel() * 4 / statistics.median(times) / 1e6


def kernels(action: Callable[[], object]) -> tuple[float, int]:
    """(ms of kernel time, kernels) of one call, from the device's record."""
    from torch.profiler import ProfilerActivity, profile

    if not CUDA:
        return timed(action)[1], 0
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        action()
        synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    return sum(event.device_time for event in events) / 1e3, len(events)


class Model:
    """Parameters of one case and fresh gradients for them."""

    def __init__(self, dtype: torch.dtype, sharded: bool, tensors: int, elements: int) -> None:
        self.wrap = self._shard if sharded else lambda tensor: tensor
        self.dtype, self.tensors, self.elements = dtype, tensors, elements
        self.params = [torch.nn.Parameter(self.wrap(self._random())) for _ in range(tensors)]

    def _random(self) -> torch.Tensor:
        return torch.randn(self.elements, device=DEVICE).to(self.dtype)

    @staticmethod
    def _shard(local: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(local, mesh(), [Shard(0)], run_check=False)

    def fill(self, in_place: bool = False) -> None:
        if in_place:
            # Graphs read gradients where they were when captured.
            for param in self.params:
                param.grad.copy_(self._random())
            return
        for param in self.params:
            param.grad = None
        for param in self.params:
            param.grad = self.wrap(self._random())


def mesh() -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    if not hasattr(mesh, "made"):
        mesh.made = init_device_mesh(DEVICE, (1,))  # type: ignore[attr-defined]
    return mesh.made  # type: ignore[attr-defined]


class Skipped(Exception):
    """The tier does not serve the case."""


def stepper(tier: str, model: Model, options: dict[str, Any]) -> Callable[[], object]:
    """A function that takes one step in this tier; Skipped if it would be another."""
    arguments = {"lr": 1e-3, "weight_decay": 0.1}
    if tier == "torch-fused":
        if options not in ({}, REMAINDER, MASTER):
            raise Skipped("torch has no such states")
        # Of bf16 parameters torch keeps bf16 states and no master.
        return torch.optim.AdamW(model.params, fused=True, **arguments).step
    te_patches.revert()
    if tier in ("replay", "native"):
        te_patches.apply(kernels="te" if tier == "replay" else "auto")
    optimizer = FusedAdam(model.params, **arguments, **options)
    optimizer.step()
    if tier == "python-plan":
        if options not in ({}, REMAINDER, MASTER, REMAINDER | BF16_MOMENTS):
            raise Skipped("the original hands this back to stock")
        return PythonPlan(optimizer).step
    if tier in ("replay", "native"):
        served = te_patches.report(optimizer)["groups"][0]
        if served["tier"] != tier:
            raise Skipped(f"served by {served['tier']}: {served['reason']}")
        return optimizer.step
    stock = inspect.unwrap(FusedAdam.step)
    return lambda: stock(optimizer)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph."""
    if not CUDA:
        raise Skipped("graphs need a GPU")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(tier: str, model: Model, options: dict[str, Any], steps: int, graph: bool) -> dict[str, Any]:
    model.fill()
    step = stepper(tier, model, options)
    for _ in range(2):
        step()
    if graph:
        step = captured(step)
    rows = []
    for _ in range(steps):
        model.fill(graph)
        rows.append(timed(step))
    model.fill(graph)
    times = [kernels(step) for _ in range(2)]
    kernel_ms, launches = min(times)
    host_ms, step_ms = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"host_ms": host_ms, "step_ms": step_ms, "kernel_ms": kernel_ms, "launches": launches}


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return shown.stdout.strip() or "unknown"


def setting(revision: str | None) -> dict[str, str]:
    """Where, with what and how rows were measured; `revision` is the code's commit where there is no git."""
    return {
        "gpu": torch.cuda.get_device_name() if CUDA else "cpu",
        "te": te_patches._releases._version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": revision or commit(),
        # Where the rows are written is no part of what was measured.
        "command": " ".join(["python", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]),
    }


@click.command(help=__doc__)
@click.option("--tensors", default=1000, show_default=True, help="parameters")
@click.option("--elements", default=1 << 20, show_default=True, help="elements of each")
@click.option("--steps", default=7, show_default=True, help="steps measured; slow tiers take fewer")
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)), help="only these")
@click.option("--tier", "tiers", multiple=True, type=click.Choice(TIERS), help="only these")
@click.option("--commit", "revision", default=None, help="of the code measured, where there is no git")
@click.option("--out", type=click.Path(path_type=Path), help="JSON file for the rows")
def main(
    tensors: int,
    elements: int,
    steps: int,
    cases: tuple[str, ...],
    tiers: tuple[str, ...],
    revision: str | None,
    out: Path | None,
) -> None:
    rate = copy_rate()
    about = setting(revision)
    console = Console(width=140, stderr=True)
    rows: list[dict[str, Any]] = []
    for case in track(cases or CASES, console=console):
        dtype, sharded, options, moved, fixed = CASES[case]
        size = fixed or elements
        for tier in tiers or TIERS:
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
            torch.manual_seed(0)
            try:
                model = Model(dtype, sharded, tensors, size)
                row = measure(tier, model, options, steps, case.endswith("-graph"))
            except Skipped as reason:
                console.print(f"{case}, {tier}: not measured, {reason}")
                continue
            except Exception as error:
                console.print(f"{case}, {tier}: not measured, {type(error).__name__}: {error}")
                continue
            finally:
                model = None  # type: ignore[assignment]
            floor = moved * tensors * size / rate / 1e6
            rows.append({"case": case, "tier": tier, **row, "floor_ms": floor, "copy_gbs": rate, **about})
            if out:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(rows, indent=1) + "\n")
    te_patches.revert()
    table = Table("case", "tier", "host ms", "step ms", "kernel ms", "launches", "floor ms", "kernel / floor")
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in ("host_ms", "step_ms", "kernel_ms")]
        ratio = f"{row['kernel_ms'] / row['floor_ms']:.3f}"
        table.add_row(row["case"], row["tier"], *numbers, str(row["launches"]), f"{row['floor_ms']:.3f}", ratio)
    Console(width=140).print(f"{about['gpu']}, copy {rate:.0f} GB/s, TE {about['te']}, torch {about['torch']}", table)


if __name__ == "__main__":
    main()
