"""Steps by stock and by te_patches, measured side by side on this machine: `python -m te_patches bench`.

host_ms: until step() returns, the device idle before. step_ms: until the device is done. kernel_ms and launches: the
device's own record (torch.profiler). floor_ms: the bytes an update must move at the rate at which this device copied
8.6 GB in this run. Medians over fresh random gradients. The first tier of a case builds the model, the others go on.
"""

from __future__ import annotations

import datetime
import gc
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import te_patches
import te_patches.cpu
from te_patches import _releases

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
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
    "plain-fp32": (FP32, False, {}, 28, None),
    "plain-bf16-remainder": (BF16, False, REMAINDER, 26, None),
    "plain-bf16-remainder-bf16-moments": (BF16, False, REMAINDER | BF16_MOMENTS, 18, None),
    "plain-bf16-bf16-moments": (BF16, False, BF16_MOMENTS, 14, None),
    "plain-bf16-fp16-moments": (BF16, False, MASTER | FP16_MOMENTS, 20, None),
    "plain-bf16-fp8-fp16-moments": (BF16, False, MASTER | FP8_MOMENTS, 18, None),
    "fp8-parameters": (E4M3, False, MASTER, 27, None),
    "plain-bf16-capturable": (BF16, False, MASTER | {"capturable": True}, 28, None),
    "plain-bf16-capturable-graph": (BF16, False, MASTER | {"capturable": True}, 28, None),
    "dtensor-small": (BF16, True, REMAINDER, 26, 4096),
}


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
    rate: float = 2 * source.numel() * 4 / statistics.median(times) / 1e6
    return rate


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
    """Parameters of one case, each of a number of elements, and fresh gradients for them."""

    def __init__(self, dtype: torch.dtype, sharded: bool, sizes: Sequence[int]) -> None:
        self.wrap = self._shard if sharded else lambda tensor: tensor
        self.specs: dict[int, Any] = {}
        self.dtype, self.sharded, self.sizes = dtype, sharded, sizes
        stored = quantized if dtype == E4M3 else lambda values: values
        self.params = [torch.nn.Parameter(self.wrap(stored(self._random(size)))) for size in sizes]

    def _random(self, size: int) -> Any:
        """Values or a gradient; fp8 parameters are matrices with bf16 gradients."""
        if self.dtype == E4M3:
            return torch.randn(size // 16, 16, device=DEVICE).to(BF16)
        return torch.randn(size, device=DEVICE).to(self.dtype)

    def _shard(self, local: Any) -> Any:
        """A DTensor as FSDP2 makes them: those of one size share what says how they are sharded."""
        from torch.distributed.tensor import DTensor, Shard

        size = local.numel()
        if size not in self.specs:
            self.specs[size] = DTensor.from_local(local, mesh(), [Shard(0)], run_check=False)._spec
        return DTensor(local, self.specs[size], requires_grad=False)

    def fill(self, in_place: bool = False) -> None:
        if in_place:
            # Graphs read gradients where they were when captured.
            for param, size in zip(self.params, self.sizes, strict=True):
                param.grad.copy_(self._random(size))
            return
        for param in self.params:
            param.grad = None
        for param, size in zip(self.params, self.sizes, strict=True):
            param.grad = self.wrap(self._random(size))


def quantized(values: Any) -> Any:
    """A Float8Tensor with delayed scaling."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    scale, amax = torch.full((1,), 64.0, device=DEVICE), torch.zeros(1, device=DEVICE)
    quantizer = Float8Quantizer(scale=scale, amax=amax, fp8_dtype=_releases.fp8_dtypes().kFloat8E4M3)
    tensor = quantizer.make_empty(values.shape, dtype=BF16, device=torch.device(DEVICE))
    quantizer.update_quantized(values, tensor)
    return tensor


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


Maker = Callable[[Model, dict[str, Any]], Callable[[], object]]
"""Makes a function that takes one step; raises Skipped if it would be another tier's."""

ARGUMENTS = {"lr": 1e-3, "weight_decay": 0.1}


def optimizer_of(model: Model, options: dict[str, Any]) -> Any:
    """A FusedAdam that has taken its first step."""
    optimizer = _releases.import_fused_adam().FusedAdam(model.params, **ARGUMENTS, **options)
    optimizer.step()
    return optimizer


def stock(model: Model, options: dict[str, Any]) -> Callable[[], object]:
    """Transformer Engine's own step."""
    te_patches.revert()
    optimizer = optimizer_of(model, options)
    step = inspect.unwrap(type(optimizer).step)
    return lambda: step(optimizer)


def patched(tier: str) -> Maker:
    """A patched step that is served by a tier."""

    def maker(model: Model, options: dict[str, Any]) -> Callable[[], object]:
        te_patches.apply(kernels="te" if tier == "replay" else "auto")
        optimizer = optimizer_of(model, options)
        served = te_patches.report(optimizer)["groups"][0]
        if served["tier"] != tier:
            raise Skipped(f"served by {served['tier']}: {served['reason']}")
        step: Callable[[], object] = optimizer.step
        return step

    return maker


TIERS: dict[str, Maker] = {"stock": stock, "native": patched("native")}


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph."""
    if not CUDA:
        raise Skipped("graphs need a GPU")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], object] = graph.replay
    return replay


def measure(maker: Maker, model: Model, options: dict[str, Any], steps: int, graph: bool) -> dict[str, Any]:
    """One row's figures."""
    model.fill()
    step = maker(model, options)
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


def command() -> str:
    """How this was called; where files lie is no part of what was measured."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv]
    return " ".join(["python", *(["-m", "te_patches"] if words[0] == "__main__.py" else words[:1]), *words[1:]])


def setting() -> dict[str, str]:
    """Where, with what and how rows are measured."""
    return {
        "gpu": torch.cuda.get_device_name() if CUDA else "cpu",
        "te": _releases.probe(_releases.import_fused_adam()).version,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "te_patches": te_patches.__version__,
        "command": command(),
    }


def rows(
    cases: Iterable[str], tiers: dict[str, Maker], tensors: int, elements: int, steps: int, console: Console
) -> Iterator[dict[str, Any]]:
    """Measures every case in every tier; says on `console` which were not measured, and why."""
    if not CUDA:
        te_patches.cpu.enable()
    rate = copy_rate()
    for case in cases:
        dtype, sharded, options, moved, fixed = CASES[case]
        size = fixed or elements
        for tier, maker in tiers.items():
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
            torch.manual_seed(0)
            try:
                model = Model(dtype, sharded, [size] * tensors)
                row = measure(maker, model, options, steps, case.endswith("-graph"))
            except Skipped as reason:
                console.print(f"{case}, {tier}: not measured, {reason}")
                continue
            except Exception as error:
                console.print(f"{case}, {tier}: not measured, {type(error).__name__}: {error}")
                continue
            finally:
                model = None  # type: ignore[assignment]
            floor = moved * tensors * size / rate / 1e6
            yield {"case": case, "tier": tier, **row, "floor_ms": floor, "copy_gbs": rate}
    te_patches.revert()


def table(rows: list[dict[str, Any]]) -> Table:
    """Rows for people."""
    table = Table("case", "tier", "host ms", "step ms", "kernel ms", "launches", "floor ms", "kernel / floor")
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in ("host_ms", "step_ms", "kernel_ms")]
        ratio = f"{row['kernel_ms'] / row['floor_ms']:.3f}"
        table.add_row(row["case"], row["tier"], *numbers, str(row["launches"]), f"{row['floor_ms']:.3f}", ratio)
    return table


def report(tensors: int, elements: int, steps: int, cases: tuple[str, ...], as_json: bool) -> bool:
    """Measures stock and native and prints the rows; whether every case was measured in both."""
    from rich.progress import track

    console = Console(stderr=True, markup=False)
    chosen = cases or tuple(CASES)
    measured = rows(chosen, TIERS, tensors, elements, steps, console)
    found = list(track(measured, "measuring", total=len(chosen) * len(TIERS), console=console))
    about = setting()
    if as_json:
        import json

        print(json.dumps([row | about for row in found], indent=1))
    else:
        out = Console(width=None if sys.stdout.isatty() else 140, markup=False)
        out.print(table(found))
        out.print(", ".join(f"{name} {value}" for name, value in about.items()))
    return len(found) == len(chosen) * len(TIERS)
