"""Every storage that a state can have, and what a test needs to load into it."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from options import Combination
from twin import DEVICE, RAGGED, Twin, assert_same, bits

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8

STORAGES = {
    "fp32": Combination(FP32, FP32, "none", FP32),
    "bf16-master": Combination(BF16, BF16, "float32", FP32),
    "remainder": Combination(BF16, FP32, "remainder", FP32),
    "bf16-moments": Combination(BF16, BF16, "remainder", BF16),
    "fp16-moments": Combination(BF16, BF16, "float32", FP16),
    "fp16-master": Combination(FP16, FP16, "float16", FP16, exp_avg_sq=BF16),
    "fp8-moments": Combination(BF16, BF16, "float32", FP8, exp_avg_sq=FP16),
    "fp8-both": Combination(BF16, BF16, "remainder", FP8),
}
# Around vectors, chunks and tails; a scalar's and a shard without elements among them.
SHAPES = [RAGGED[at] for at in (0, 2, 3, 4, 5, 8, 9, 10, 12)]


def taken() -> list[str]:
    """Storages that this release makes here: before 2.10 fp8 tensors need a GPU."""
    from transformer_engine.pytorch.tensor.float8_tensor import QuantizedTensor

    fp8 = DEVICE != "cpu" or "device" in inspect.signature(QuantizedTensor.__new__).parameters
    return [name for name in STORAGES if fp8 or not name.startswith("fp8")]


every_storage = pytest.mark.parametrize("storage", taken())


def trained(storage: str, steps: int = 3, seed: int = 0, **options: Any) -> Twin:
    """Two optimizers after some steps, equal in all bits."""
    twin = Twin(STORAGES[storage], shapes=SHAPES, seed=seed, **options)
    for _ in range(steps):
        twin.fill_gradients()
        twin.step()
    return twin


def load(twin: Twin, saved: dict[str, Any], stock_saved: dict[str, Any] | None = None) -> None:
    """Loads the same into both sides, each by its own loader."""
    stock_load = inspect.unwrap(type(twin.stock).load_state_dict)
    stock_load(twin.stock, copy.deepcopy(saved) if stock_saved is None else stock_saved)
    twin.mine.load_state_dict(saved)


def settle_amax(twin: Twin) -> None:
    """Stock lets a quantizer's amax start from the garbage of a new buffer; nobody reads it. Here: the same on both."""
    for mine, stock in zip(*twin.params, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            states = [optimizer.state[p].get(name) for optimizer, p in ((twin.mine, mine), (twin.stock, stock))]
            locals_ = [getattr(state, "_local_tensor", state) for state in states]
            if all(hasattr(state, "_quantizer") for state in locals_):
                locals_[0]._quantizer.amax.copy_(locals_[1]._quantizer.amax)


def goes_on(twin: Twin, steps: int = 2) -> None:
    """Both sides are equal now and after further steps."""
    settle_amax(twin)
    twin.compare()
    for _ in range(steps):
        twin.fill_gradients()
        twin.step()


def addresses(optimizer: Any) -> dict[tuple[int, str], int]:
    """Where each state lies."""
    found = {}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for at, param in enumerate(params):
        for name, state in optimizer.state[param].items():
            local = getattr(state, "_local_tensor", state)
            found[at, name] = getattr(local, "_data", local).data_ptr()
    return found


def snapshot(optimizer: Any) -> list[torch.Tensor]:
    """Copies of all bits of the optimizer: parameters, states, scales."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [bits(p).clone() for p in params]
    for param in params:
        for _, state in sorted(optimizer.state.get(param, {}).items()):
            tensors.append(bits(state).clone())
            local = getattr(state, "_local_tensor", state)
            if hasattr(local, "_quantizer"):
                tensors += [local._scale_inv.clone(), local._quantizer.scale.clone(), local._quantizer.amax.clone()]
        tensors += [scale.clone() for _, scale in sorted(optimizer._scales.get(param, {}).items())]
    return tensors


def assert_unchanged(optimizer: Any, before: list[torch.Tensor]) -> None:
    assert_same(snapshot(optimizer), before, "tensor")


def map_tensors(saved: dict[str, Any], change: Any) -> dict[str, Any]:
    """A copy of a state dict with every state but remainders changed."""
    states = {
        key: {name: value if value.dtype == torch.int16 else change(value) for name, value in values.items()}
        for key, values in saved["state"].items()
    }
    return {"state": states, "param_groups": copy.deepcopy(saved["param_groups"])}
