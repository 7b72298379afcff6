"""Trains a small FSDP2-sharded transformer with FusedAdam on any number of ranks, stock or patched, and writes a digest
of all that an optimizer step may change:

    torchrun --nproc-per-node 2 tests/distributed/fsdp2_train.py --patched --out patched.json

NCCL on GPUs, else gloo with CPU kernels. All ranks see the same data, and gradients are clipped by a norm that does not
depend on the sharding, so that runs on different numbers of ranks (powers of two) are equal bit for bit. The model has
layers with fewer rows than ranks, whose shards are empty on some, and experts that get no tokens on some steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, TOKENS, VOCABULARY = 32, 24, 50
OPTIONS: dict[str, dict[str, Any]] = {
    "remainder": {"master_weights": True, "store_param_remainders": True},
    "fp16-moments": {
        "master_weights": True,
        "exp_avg_dtype": torch.float16,
        "exp_avg_sq_dtype": torch.float16,
    },
}


class Block(nn.Module):
    """Attention, and experts of which some get no tokens on some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        # One row: most ranks hold nothing of it.
        self.gate = nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        mixed = sum(self.experts[index](x) for index in chosen)
        return x + torch.sigmoid(self.gate(x)) * mixed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, chosen)
        return self.head(x)


def mend_empty_shards() -> None:
    """Stock fails on shards without elements: in scaled states always, in its kernels up to 2.17. Nothing else of it is
    changed.
    """
    from te_patches import _empty_shards
    from transformer_engine.pytorch.optimizers import fused_adam

    fused_adam.FusedAdam._apply_scale = _empty_shards.scaling(fused_adam.FusedAdam._apply_scale)
    fused_adam.multi_tensor_applier = _empty_shards.filtering(fused_adam.multi_tensor_applier)


def build(device: str) -> Model:
    torch.manual_seed(5)
    model = Model().to(device=device, dtype=torch.bfloat16)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    # Gloo does not gather bf16: on the CPU modules compute in fp32.
    wide = torch.float32 if device == "cpu" else None
    policy = MixedPrecisionPolicy(param_dtype=wide, reduce_dtype=torch.float32)
    for block in model.blocks:
        for expert in block.experts:
            fully_shard(expert, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def clip(model: Model, limit: float) -> None:
    """Scales gradients by their norm, summed over whole tensors in double precision."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    squares = [grad.float().full_tensor().double().pow(2).sum() for grad in grads]
    factor = float(limit / torch.stack(squares).sum().sqrt().clamp(min=limit))
    for grad in grads:
        grad._local_tensor.mul_(factor)


def digest(tensor: torch.Tensor) -> str:
    """Of all bits of the whole tensor, which is sharded by rows."""
    local = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous()
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, local.view(torch.uint8).numpy().tobytes() if local.numel() else b"")
    return hashlib.sha256(b"".join(shards)).hexdigest()[:16]


def state_digests(model: Model, optimizer: Any) -> dict[str, Any]:
    """Bits of parameters, states and counters; scaled states as the values they stand for."""
    found: dict[str, Any] = {}
    saved = optimizer.state_dict()
    for index, (name, param) in enumerate(model.named_parameters()):
        found[name] = digest(param)
        for state, value in sorted(saved["state"].get(index, {}).items()):
            found[f"{name}.{state}"] = digest(value)
    found["steps"] = [int(group["step"]) for group in optimizer.param_groups]
    return found


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def checkpoint_of(model: Model, optimizer: Any) -> dict[str, Any]:
    """What is saved, and where what was saved is loaded to."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def resume(model: Model, optimizer: Any, folder: Path) -> None:
    state = checkpoint_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)


@click.command(help=__doc__)
@click.option("--patched", is_flag=True, help="with te_patches")
@click.option("--storage", type=click.Choice(list(OPTIONS)), default="remainder", show_default=True)
@click.option("--steps", default=50, show_default=True)
@click.option("--save-at", type=int, help="save a checkpoint after this step, and load it again at once")
@click.option("--resume-at", type=int, help="start from the checkpoint of this step")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="folder of the checkpoint")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file for the digest")
def main(
    patched: bool,
    storage: str,
    steps: int,
    save_at: int | None,
    resume_at: int | None,
    checkpoint: Path | None,
    out: Path,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    import te_patches

    if device == "cpu":
        import te_patches.cpu

        te_patches.cpu.enable()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    from transformer_engine.pytorch.optimizers import FusedAdam

    if patched:
        te_patches.apply(kernels="native")
    else:
        mend_empty_shards()
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    model = build(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1, **OPTIONS[storage])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    first = 0
    if resume_at is not None:
        assert checkpoint is not None
        resume(model, optimizer, checkpoint)
        first = resume_at
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scheduler.lr_lambdas[0](first)
        scheduler.last_epoch = first
    losses, times = [], []
    for step in range(first, steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator).to(device)
        chosen = [index for index in range(3) if (step + index) % 3 != 0]
        logits = model(tokens[:, :-1], chosen)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        clip(model, 1.0)
        begin = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if step + 1 == save_at:
            assert checkpoint is not None
            dcp.save(checkpoint_of(model, optimizer), checkpoint_id=checkpoint)
            # Scaled states are rounded anew by a save; the run that goes on starts from what was saved.
            resume(model, optimizer, checkpoint)
    found = {"losses": losses, "state": state_digests(model, optimizer)}
    local = {name: tuple(param._local_tensor.shape) for name, param in model.named_parameters()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {"median_ms": sorted(times)[len(times) // 2], "shapes": local})
    if dist.get_rank() == 0:
        found["ranks"] = [{"median_ms": rank["median_ms"]} for rank in everyone]
        found["empty_shards"] = sum(0 in shape for rank in everyone for shape in rank["shapes"].values())
        if patched:
            report = te_patches.report(optimizer)
            found["tiers"] = [group["tier"] for group in report["groups"]]
            found["load"] = report["load"]
        out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(standalone_mode=False)
    # gloo's threads may still be giving back the tensors of the last call. One that wants the interpreter while it is
    # taken down is ended by it, which C++ answers with an abort (pytorch/pytorch#179291): the run is over, so leave.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
