"""Transformer Engine's own kernels over lists read anew each step: no tensor is kept, no 20 us of DTensor dispatch.

For GPUs and releases on which the native kernels were not shown equal, and for users who ask for it. Reached only
after the native plan has read and checked the group.
"""

from __future__ import annotations

import contextlib
from typing import Any

from te_patches import _core, cpu
from te_patches._empty_shards import drop_empty
from te_patches._releases import Release, import_fused_adam

_MOST_TENSORS = 1024
"""Per native call: releases from 2.5 draw tensor handles from a pool that very long lists exhaust."""


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def step(optimizer: Any, group: dict[str, Any], release: Release) -> None:
    """One step of one group, whose states exist and have been checked."""
    import torch

    if "step" in group:
        group["step"] += 1
    else:
        group["step"] = 1
    buckets: dict[Any, list[tuple[Any, ...]]] = {}
    written: list[tuple[Any, Any]] = []

    def contiguous(tensor: Any, write: bool) -> Any:
        tensor = _local(tensor).detach()
        if tensor.is_contiguous():
            return tensor
        copy = tensor.contiguous()
        if write:
            written.append((tensor, copy))
        return copy

    def moment(tensor: Any) -> Any:
        tensor = contiguous(tensor, True)
        if tensor.dtype != torch.bfloat16 or release.bf16_moments_in_kernel:
            return tensor
        copy = tensor.float()
        written.append((tensor, copy))
        return copy

    for param in group["params"]:
        grad = getattr(param, "decoupled_grad", None) if optimizer.use_decoupled_grad else param.grad
        if grad is None:
            continue
        state = optimizer.state[param]
        grad, target = contiguous(grad, False), contiguous(param, True)
        column: tuple[Any, ...] = (grad, target, moment(state["exp_avg"]), moment(state["exp_avg_sq"]))
        function = optimizer.multi_tensor_adam
        if optimizer.master_weights and target.dtype != torch.float32:
            column = (*column, contiguous(state["master_param"], True))
            if optimizer.store_param_remainders and target.dtype == torch.bfloat16:
                function = optimizer.multi_tensor_adam_param_remainder
        key = (function, target.device, target.dtype, grad.dtype, len(column))
        buckets.setdefault(key, []).append(column)

    applier = import_fused_adam().multi_tensor_applier
    for (function, device, *_), columns in buckets.items():
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for start in range(0, len(columns), _MOST_TENSORS):
                part = columns[start : start + _MOST_TENSORS]
                lists = drop_empty([list(operand) for operand in zip(*part, strict=True)])
                if not lists[0]:
                    continue
                beta1, beta2 = group["betas"]
                mode, bias_correction = optimizer.adam_w_mode, 1 if group["bias_correction"] else 0
                decay = group["weight_decay"]
                scalars = (group["lr"], beta1, beta2, group["eps"], group["step"], mode, bias_correction, decay)
                if device.type == "cuda" or cpu.enabled():
                    applier(function, optimizer._dummy_overflow_buf, lists, *scalars)
                else:
                    # Transformer Engine's kernels take no CPU tensors.
                    remainder = function is optimizer.multi_tensor_adam_param_remainder
                    master = "remainder" if remainder else "none" if len(lists) == 4 else "float32"
                    _core.multi_tensor_adam(lists, *scalars, master)
    for tensor, copy in reversed(written):
        tensor.copy_(copy)
