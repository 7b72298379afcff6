"""What somebody may use instead, for `step.py`; what is not installed is left out, and the bench says why.

    pip install nemo-automodel==0.7.0 torchao flashoptim deepspeed bitsandbytes      (apex: from its repository)

Of fp32 parameters all of them keep fp32 moments but for the 8-bit ones. Of bf16 parameters torch, DeepSpeed and apex
keep bf16 moments and bitsandbytes fp32 ones, none of them a master; torchao keeps 8-bit moments and rounds
stochastically, flashoptim 8-bit moments and the bits of a 24-bit master. `_bench`'s floors are those of FusedAdam.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import te_patches
import torch
from python_plan import PythonPlan
from te_patches import _bench as bench

Step = Callable[[], object]


def python_plan(model: bench.Model, options: dict[str, Any]) -> Step:
    """A plan in Python over Transformer Engine's kernels."""
    if options not in ({}, bench.REMAINDER, bench.MASTER, bench.REMAINDER | bench.BF16_MOMENTS):
        raise bench.Skipped("the original hands this back to stock")
    te_patches.revert()
    return PythonPlan(bench.optimizer_of(model, options)).step


def nemo(model: bench.Model, options: dict[str, Any]) -> Step:
    """Transformer Engine's step with NeMo Automodel's patches (0.7.0)."""
    from nemo_automodel.shared import te_patches as patches
    from transformer_engine.pytorch.optimizers import fused_adam

    te_patches.revert()
    # They have no way back: what they replace is put back here.
    with (
        mock.patch.object(fused_adam, "multi_tensor_applier", fused_adam.multi_tensor_applier),
        mock.patch.object(fused_adam.FusedAdam, "_initialize_state", fused_adam.FusedAdam._initialize_state),
        mock.patch.object(patches, "_TE_PATCHES_APPLIED", False),
    ):
        patches.apply_te_patches()
        applier = fused_adam.multi_tensor_applier
        step = bench.stock(model, options)

    def patched() -> None:
        with mock.patch.object(fused_adam, "multi_tensor_applier", applier):
            step()

    return patched


def torch_adamw(**how: Any) -> bench.Maker:
    def maker(model: bench.Model, options: dict[str, Any]) -> Step:
        if options not in ({}, bench.REMAINDER, bench.MASTER, bench.BF16_MOMENTS):
            raise bench.Skipped("torch has no such states")
        return torch.optim.AdamW(model.params, **how, **bench.ARGUMENTS).step

    return maker


def of(make: Callable[[list[Any]], Any], sharded: bool = False) -> bench.Maker:
    """An optimizer of another package, on a GPU; `sharded`: it takes DTensors."""

    def maker(model: bench.Model, options: dict[str, Any]) -> Step:
        if options not in ({}, bench.REMAINDER):
            raise bench.Skipped("compared with FusedAdam's simplest states only")
        if model.sharded and not sharded:
            raise bench.Skipped("takes no DTensors")
        if not bench.CUDA:
            raise bench.Skipped("needs a GPU")
        step: Step = make(model.params).step
        return step

    return maker


def deepspeed(params: list[Any]) -> Any:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(params, adam_w_mode=True, **bench.ARGUMENTS)


def apex(params: list[Any]) -> Any:
    from apex.optimizers import FusedAdam

    return FusedAdam(params, adam_w_mode=True, **bench.ARGUMENTS)


def bitsandbytes(params: list[Any]) -> Any:
    from bitsandbytes.optim import AdamW

    return AdamW(params, **bench.ARGUMENTS)


def bitsandbytes_8bit(params: list[Any]) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, **bench.ARGUMENTS)


def torchao(params: list[Any]) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, bf16_stochastic_round=params[0].dtype == torch.bfloat16, **bench.ARGUMENTS)


def flashoptim(params: list[Any]) -> Any:
    from flashoptim import FlashAdamW

    return FlashAdamW(params, **bench.ARGUMENTS)


RIVALS: dict[str, bench.Maker] = {
    "python-plan": python_plan,
    "nemo-0.7.0": nemo,
    "torch-fused": torch_adamw(fused=True),
    "torch-foreach": torch_adamw(foreach=True),
    "deepspeed": of(deepspeed),
    "apex": of(apex),
    "bitsandbytes": of(bitsandbytes),
    "bitsandbytes-8bit": of(bitsandbytes_8bit),
    "torchao-8bit": of(torchao, sharded=True),
    "flashoptim": of(flashoptim),
}
