"""The demo: a small model, sharded by FSDP2, trained twice from one seed: by stock FusedAdam and by a patched one."""

from __future__ import annotations

import inspect
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

import te_patches
import te_patches.cpu
from te_patches._bits import bits


@dataclass
class Run:
    """What one training run came to."""

    losses: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    held: int = 0
    counter: int = 0
    optimizer: Any = None


def _device() -> str:
    """Where to train; with no GPU, Transformer Engine's Python files run on this project's CPU kernels."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    te_patches.cpu.enable()
    return "cpu"


def _model(mesh: Any, device: str) -> Any:
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    layers = [torch.nn.Linear(48, 256), torch.nn.GELU()]
    for _ in range(6):
        layers += [torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)]
    layers += [torch.nn.Linear(256, 10)]
    model = torch.nn.Sequential(*layers).to(device=device, dtype=torch.bfloat16)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _train(mesh: Any, device: str, steps: int, patched: bool) -> Run:
    import torch
    from transformer_engine.pytorch.optimizers import FusedAdam

    te_patches.revert()
    if patched:
        te_patches.apply()
    model = _model(mesh, device)
    optimizer = FusedAdam(
        model.parameters(), lr=3e-3, weight_decay=0.1, master_weights=True, store_param_remainders=True
    )
    step = optimizer.step if patched else lambda: inspect.unwrap(FusedAdam.step)(optimizer)
    run = Run(optimizer=optimizer)

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(48, 10, generator=generator)
    for _ in range(steps):
        x = torch.randn(64, 48, generator=generator)
        wanted = (x @ rule).tanh().to(device)
        loss = (model(x.to(device=device, dtype=torch.bfloat16)).float() - wanted).square().mean()
        loss.backward()
        run.losses.append(float(loss.detach()))
        synchronize()
        begin = time.perf_counter()
        step()
        run.host_ms.append(1e3 * (time.perf_counter() - begin))
        synchronize()
        run.step_ms.append(1e3 * (time.perf_counter() - begin))
        optimizer.zero_grad()
    run.counter = optimizer.param_groups[0]["step"]
    params = list(model.parameters())
    run.tensors["parameter"] = [p._local_tensor for p in params]
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        states = [optimizer.state[p][name] for p in params]
        run.tensors[name] = [getattr(state, "_local_tensor", state) for state in states]
    run.held = sum(t.numel() * t.element_size() for tensors in run.tensors.values() for t in tensors)
    return run


def _differences(stock: Run, patched: Run) -> dict[str, tuple[int, int]]:
    """Per kind of tensor: elements compared, elements whose bits differ."""
    rows = {}
    for name, mine in patched.tensors.items():
        pairs = list(zip(mine, stock.tensors[name], strict=True))
        rows[name] = (
            sum(a.numel() for a, _ in pairs),
            sum(int((bits(a.detach()) != bits(b.detach())).sum()) for a, b in pairs),
        )
    return rows


def run(steps: int) -> bool:
    """Trains, prints, and says whether every bit was equal."""
    import torch
    import torch.distributed as dist

    console = Console(markup=False)
    device = _device()
    from torch.distributed.device_mesh import init_device_mesh

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        stock, patched = (_train(mesh, device, steps, on) for on in (False, True))
        report = te_patches.report(patched.optimizer)
    finally:
        dist.destroy_process_group()
        te_patches.revert()

    where = (
        torch.cuda.get_device_name() if device == "cuda" else "the CPU (no GPU here: CPU kernels, timings say little)"
    )
    console.print(
        f"FusedAdam of Transformer Engine {report['te'] or '?'} on {where}: "
        f"bf16 parameters with int16 remainders, sharded by FSDP2 over one process, {steps} steps"
    )
    losses = Table("step", "loss, stock", "loss, patched", title="losses")
    for at in sorted({0, 1, 2, steps // 2, steps - 1} & set(range(steps))):
        losses.add_row(str(at + 1), f"{stock.losses[at]:.6f}", f"{patched.losses[at]:.6f}")
    speed = Table("", "stock", "patched", title="speed and memory")
    warm = slice(min(3, steps - 1), None)
    for label, times in (("host ms a step", "host_ms"), ("step ms", "step_ms")):
        values = [statistics.median(getattr(side, times)[warm]) for side in (stock, patched)]
        speed.add_row(label, *[f"{value:.3f}" for value in values])
    speed.add_row("parameters and states, KiB", *[f"{side.held / 1024:.0f}" for side in (stock, patched)])
    speed.add_row("group counter", str(stock.counter), str(patched.counter))
    parity = Table("tensors", "elements compared", "bits differ in", title="parity")
    rows = _differences(stock, patched)
    for name, (elements, different) in rows.items():
        parity.add_row(name, str(elements), str(different))
    groups = Table("group", "tier", "kernels", "tensors", "elements", "steps", "launches", "plans", title="report")
    for group in report["groups"]:
        columns = [group[key] for key in ("tensors", "elements", "steps", "launches", "plans")]
        groups.add_row(str(group["index"]), group["tier"], "\n".join(group["kernels"]), *map(str, columns))
    for table in (losses, speed, parity, groups):
        console.print(table)
    same = stock.losses == patched.losses and stock.counter == patched.counter and not any(d for _, d in rows.values())
    console.print("parity: every bit is equal" if same else "parity: DIFFERENT, please report this")
    return same
