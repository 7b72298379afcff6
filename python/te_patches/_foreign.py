"""Checkpoints of torch.optim.Adam and AdamW as FusedAdam's, where their meaning is certain.

torch keeps a step per parameter, FusedAdam one per group; torch always corrects the bias and has no master. Whatever
else the two do not share is refused.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("te_patches")

_ONLY_TORCH = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")


def convert(
    optimizer: Any, groups: list[dict[str, Any]], saved: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Groups and states as FusedAdam saves them; the very objects if they are its own.

    ValueError, naming group and option, for a checkpoint of torch's that means something else.
    """
    states: dict[Any, Any] = saved["state"]
    if not any(isinstance(values, dict) and "step" in values for values in states.values()):
        return groups, dict(states)
    ids = [list(group["params"]) for group in saved["param_groups"]]
    converted = [_group(optimizer, index, group, ids[index], states) for index, group in enumerate(groups)]
    params = dict(
        zip(
            (key for keys in ids for key in keys),
            (param for group in optimizer.param_groups for param in group["params"]),
            strict=False,
        )
    )
    result = {
        key: _states(optimizer, params[key], values) if key in params and isinstance(values, dict) else values
        for key, values in states.items()
    }
    masters = " Masters are made of the parameters." if optimizer.master_weights else ""
    _log.info("The checkpoint is of torch.optim.Adam or AdamW: its steps become those of groups.%s", masters)
    return converted, result


def _refuse(index: int, what: str) -> ValueError:
    return ValueError(
        f"FusedAdam cannot load this state of torch.optim.Adam or AdamW: group {index} {what}. "
        "Build an optimizer with these options, or start with fresh states."
    )


def _group(optimizer: Any, index: int, group: dict[str, Any], ids: list[Any], states: dict[Any, Any]) -> dict[str, Any]:
    for option in ("amsgrad", "maximize"):
        if group.get(option):
            raise _refuse(index, f"was trained with {option}=True, which FusedAdam does not do")
    if group.get("weight_decay"):
        decoupled = group.get("decoupled_weight_decay")
        if decoupled is None:
            raise _refuse(index, "does not say whether its weight decay is decoupled (torch before 2.7)")
        if bool(decoupled) != bool(optimizer.adam_w_mode):
            raise _refuse(
                index,
                f"has decoupled_weight_decay={decoupled}, the optimizer adam_w_mode={bool(optimizer.adam_w_mode)}",
            )
    steps = {int(states[key]["step"]) for key in ids if key in states and "step" in states[key]}
    if len(steps) > 1:
        raise _refuse(index, f"has parameters at different steps ({sorted(steps)}), FusedAdam keeps one step per group")
    converted = {name: value for name, value in group.items() if name not in _ONLY_TORCH}
    converted.setdefault("bias_correction", True)
    converted["betas"] = tuple(float(beta) for beta in group["betas"])
    if steps:
        converted["step"] = steps.pop()
    return converted


def _states(optimizer: Any, param: Any, values: dict[str, Any]) -> dict[str, Any]:
    import torch

    result = {name: value for name, value in values.items() if name != "step"}
    if optimizer.master_weights and "master_param" not in result:
        local = getattr(param, "_local_tensor", param).detach()
        if optimizer.store_param_remainders and param.dtype == torch.bfloat16:
            result["master_param"] = torch.zeros((), dtype=torch.int16, device=local.device).expand(local.shape)
        else:
            result["master_param"] = local
    return result
