"""`state_dict()` in host memory, without copies on the device.

FusedAdam's own `state_dict()` makes an fp32 copy of every fp16, fp8 and bf16 state where the state lives, so that
memory doubles at save time, and leaves the way to the host to the caller.
"""

from __future__ import annotations

from typing import Any

from te_patches import _core, _nvrtc
from te_patches._load import shown
from te_patches._settings import choose_progress


def state_dict_cpu(optimizer: Any, *, progress: bool | None = None) -> dict[str, Any]:
    """The optimizer's `state_dict()` with all states in host memory: same keys, shapes and values.

    States are fp32 (int16 for remainders) CPU tensors of their own, which share nothing with the optimizer; those of
    DTensor parameters are DTensors of the same mesh, placements and global shape whose local tensors are on the CPU.
    Tensors of groups (`lr` and `step` in capturable mode) are CPU copies too. Torch's state-dict hooks run as in
    `state_dict()`. At most 16 MiB of device memory and 48 MiB of page-locked memory are used, whatever the model's
    size; done when this returns. `progress`: whether a bar is shown on stderr; None takes TE_PATCHES_PROGRESS from the
    environment.

    RuntimeError if a state is of a storage that FusedAdam does not have; nothing has changed then.
    """
    import torch
    from torch.optim import Optimizer

    _nvrtc.preload()
    wanted = choose_progress(progress)
    saved = Optimizer.state_dict(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = [key for group in saved["param_groups"] for key in group["params"]]
    rows: list[tuple[Any, Any, Any]] = []
    states: dict[Any, Any] = {}
    by_id = dict(zip(ids, params, strict=True))
    for key, values in saved["state"].items():
        if key not in by_id:
            states[key] = values
            continue
        param = by_id[key]
        states[key] = {}
        for name, state in values.items():
            local = getattr(state, "_local_tensor", state)
            inner = getattr(local, "_data", local).detach()
            dtype = torch.int16 if local.dtype == torch.int16 else torch.float32
            target = torch.empty_like(inner, dtype=dtype, device="cpu")
            if target.stride() != inner.stride():
                # Only elements without gaps between them are copied as they lie.
                local, target = inner.contiguous(), target.contiguous()
            factor = optimizer._scales[param][name] if local.dtype == torch.float16 else None
            rows.append((local, factor, target))
            states[key][name] = _like(target, param)
    total = sum(target.numel() * target.element_size() for *_, target in rows)
    with shown(total, wanted) as bar:
        _core.save_states(rows, bar)
    groups = [
        {name: value.cpu().clone() if torch.is_tensor(value) else value for name, value in group.items()}
        for group in saved["param_groups"]
    ]
    return {**saved, "state": states, "param_groups": groups}


def _like(local: Any, param: Any) -> Any:
    """`local` as the local tensor of a DTensor like the parameter, if that is one."""
    if not hasattr(param, "_local_tensor"):
        return local
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # `DTensor.from_local` would move a CPU tensor to the mesh's device.
    meta = TensorMeta(param.size(), param.stride(), local.dtype)
    return DTensor(local, DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta), requires_grad=False)
