"""The proof at first use: the first time a kernel is needed in a process it is run beside Transformer Engine's on the
same small random tensors, and the results are compared as bits. Equal: it is used. Different: Transformer Engine's
kernels are, and one warning says so.
"""

from __future__ import annotations

import warnings
from typing import Any

from te_patches import _core
from te_patches._releases import Release

Names = tuple[str, str, str, str, str]
"""gradient, parameter, moments, master, mode"""

_SIZES = (1, 7, 2048, 8192 + 3, 65536 + 5)
_STEPS = 3


def prove(optimizer: Any, device: int, names: Names, release: Release) -> None:
    """Compares the kernel of `names` (gradient, parameter, moments, master) with stock on CUDA device `device` and
    records the outcome in the native core.
    """
    import torch

    with torch.no_grad(), torch.cuda.device(device):
        try:
            reason = _compare(optimizer, device, names, release)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = f"the comparison with Transformer Engine's kernel failed: {error}"
    _core.record_proof(device, names, reason)
    if reason is not None:
        warnings.warn(
            f"te_patches: the native kernel for {' / '.join(names)} (gradient / parameter / moments / master / mode) "
            f"is not used on cuda:{device}, Transformer Engine's is: {reason}. Please report this with the output of "
            "te_patches.report().",
            RuntimeWarning,
            stacklevel=2,
        )


def _compare(optimizer: Any, device: int, names: Names, release: Release) -> str | None:
    import torch

    mine = _operands(device, names)
    stock = [[tensor.clone() for tensor in tensors] for tensors in mine]
    for step in range(1, _STEPS + 1):
        for mode in (1, 0):
            arguments = (1e-2, 0.9, 0.95, 1e-8, step, mode, step % 2, 0.1)
            if names[4] == "capturable":
                _compare_capturable(optimizer, mine, stock, arguments, names)
            else:
                _core.multi_tensor_adam(mine, *arguments, names[3] == "remainder")
                _run_stock(optimizer, stock, arguments, names, release)
            for ours, theirs in zip(mine, stock, strict=True):
                for mine_now, stock_now in zip(ours, theirs, strict=True):
                    if not torch.equal(mine_now.view(_bits(mine_now)), stock_now.view(_bits(stock_now))):
                        different = (mine_now.view(_bits(mine_now)) != stock_now.view(_bits(stock_now))).sum().item()
                        return f"{different} of {mine_now.numel()} elements differ in step {step}, mode {mode}"
    return None


def _run_stock(
    optimizer: Any, lists: list[list[Any]], arguments: tuple[Any, ...], names: Names, release: Release
) -> None:
    import torch

    remainder = names[3] == "remainder"
    function = optimizer.multi_tensor_adam_param_remainder if remainder else optimizer.multi_tensor_adam
    flag = torch.zeros(1, dtype=torch.int32, device=lists[0][0].device)
    lists = [list(tensors) for tensors in lists]
    through_copies = names[2] == "bfloat16" and not release.bf16_moments_in_kernel
    moments = lists[2:4]
    if through_copies:
        lists[2:4] = [[tensor.float() for tensor in tensors] for tensors in moments]
    function(65536, flag, lists, *arguments)
    if through_copies:
        for originals, copies in zip(moments, lists[2:4], strict=True):
            for original, copy in zip(originals, copies, strict=True):
                original.copy_(copy)


def _compare_capturable(
    optimizer: Any, mine: list[list[Any]], stock: list[list[Any]], arguments: tuple[Any, ...], names: Names
) -> None:
    """The same arguments, those that live on the device moved there; gradients scaled by a power of two and not."""
    import torch

    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay = arguments
    device = mine[0][0].device
    live_lr = torch.full((1,), lr, dtype=torch.float32, device=device)
    live_step = torch.full((1,), 7 * step, dtype=torch.int32, device=device)
    inv_scale = torch.full((1,), 0.5 if mode else 0.3, dtype=torch.float32, device=device)
    skip = torch.zeros(1, dtype=torch.int32, device=device)
    shared = (live_lr, beta1, beta2, eps, live_step, mode, bias_correction, weight_decay, inv_scale)
    _core.multi_tensor_adam_capturable(mine, *shared, skip)
    with_master = names[3] != "none"
    function = optimizer.multi_tensor_adam_capturable_master if with_master else optimizer.multi_tensor_adam_capturable
    function(65536, skip, [list(tensors) for tensors in stock], *shared)


def _operands(device: int, names: Names) -> list[list[Any]]:
    """Random tensors over a wide range of magnitudes, with the special values among them."""
    import torch

    grad, param, moment, master, _ = names
    generator = torch.Generator().manual_seed(0x7EAD)
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-30, 3e38, float("inf"), float("-inf"), float("nan")])

    def values(size: int, dtype: str) -> Any:
        mantissa = torch.randn(size, generator=generator)
        exponent = torch.randint(-12, 4, (size,), generator=generator)
        tensor = torch.ldexp(mantissa, exponent)
        if size > 1000:
            places = torch.randint(0, size, (64,), generator=generator)
            tensor[places] = special[torch.randint(0, len(special), (64,), generator=generator)]
        return tensor.to(device=device, dtype=getattr(torch, dtype))

    lists = [
        [values(size, grad) for size in _SIZES],
        [values(size, param) for size in _SIZES],
        [values(size, moment) for size in _SIZES],
        [values(size, moment).abs() for size in _SIZES],
    ]
    if master == "float32":
        lists.append([tensor.float() for tensor in lists[1]])
    elif master == "remainder":
        low, high = -(1 << 15), 1 << 15
        remainders = [torch.randint(low, high, (size,), generator=generator, dtype=torch.int16) for size in _SIZES]
        lists.append([remainder.to(device) for remainder in remainders])
    return lists


def _bits(tensor: Any) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
