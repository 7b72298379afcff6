"""Keeps zero-element tensors out of Transformer Engine's kernels, for the tiers that call them, and out of its search
for the largest magnitude of a scaled state, in which `torch.aminmax` fails for want of elements.

Layer: FusedAdam's method `_apply_scale`; and the name `multi_tensor_applier` in the module of FusedAdam, looked up at
every call. `MultiTensorApply.__call__` is left alone: Megatron's norms and FusedSGD share it. Up to 2.17 an empty
tensor in a list corrupts launches (NVIDIA/TransformerEngine issues 3202, 3207); from 2.18 the applier filters by itself
and that patch steps aside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Lists = list[list[Any]]


def drop_empty(lists: Lists) -> Lists:
    """New lists without the columns that have no elements; DTensors are replaced by their local tensors.

    RuntimeError if the lists' lengths differ or a gradient is empty where its parameter is not.
    """
    local = [[getattr(tensor, "_local_tensor", tensor) for tensor in tensors] for tensors in lists]
    if any(len(tensors) != len(local[0]) for tensors in local):
        raise RuntimeError(f"Expected aligned multi-tensor lists, got lengths {[len(tensors) for tensors in local]}")
    kept = []
    for index, column in enumerate(zip(*local, strict=True)):
        elements = [tensor.numel() for tensor in column]
        if elements[0] == 0 and len(column) > 1 and elements[1] > 0:
            shape = tuple(column[1].shape)
            raise RuntimeError(f"tensor {index} of a list has no elements, but the one it goes with has shape {shape}")
        if elements[0] > 0:
            kept.append(column)
    return [[column[i] for column in kept] for i in range(len(lists))]


def filtering(applier: Callable[..., Any]) -> Callable[..., Any]:
    """`applier`, called with the columns that have elements, or not at all if there are none."""

    @functools.wraps(applier, updated=())
    def multi_tensor_applier(operation: Any, noop_flag: Any, lists: Lists, *arguments: Any) -> Any:
        lists = drop_empty(lists)
        return applier(operation, noop_flag, lists, *arguments) if lists and lists[0] else None

    # NeMo's own filter looks for this mark before it wraps the applier.
    multi_tensor_applier._nemo_empty_shard_patch = True  # type: ignore[attr-defined]
    return multi_tensor_applier


def scaling(stock: Callable[..., None]) -> Callable[..., None]:
    """`FusedAdam._apply_scale`, which has nothing to scale where there are no elements."""

    @functools.wraps(stock)
    def _apply_scale(self: Any, state_name: str, unscaled_state: Any, scaled_state: Any, scale: Any) -> None:
        # Up to 2.13 a DTensor arrives here whole.
        scaled_state = getattr(scaled_state, "_local_tensor", scaled_state)
        if unscaled_state.numel() > 0:
            stock(self, state_name, unscaled_state, scaled_state, scale)

    return _apply_scale
