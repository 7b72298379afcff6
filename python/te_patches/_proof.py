"""The proof at first use: the first time a kernel is needed in a process it is run beside Transformer Engine's on the
same small random tensors, and the results are compared as bits. Equal: it is used. Different: Transformer Engine's
kernels are, and one warning says so.
"""

from __future__ import annotations

import warnings
from typing import Any

from te_patches import _core, _releases
from te_patches._bits import bits
from te_patches._releases import Release

Names = tuple[str, str, str, str, str, str]
"""gradient, parameter, exp_avg, exp_avg_sq, master, mode"""

_SIZES = (1, 7, 2048, 8192 + 3, 65536 + 5)
_STEPS = 3


def prove(optimizer: Any, device: int, names: Names, release: Release) -> None:
    """Compares the kernel of `names` with stock on CUDA device `device` and
    records the outcome in the native core.
    """
    import torch

    with torch.no_grad(), torch.cuda.device(device):
        try:
            reason = _compare(optimizer, torch.device("cuda", device), names, release)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = f"the comparison with Transformer Engine's kernel failed: {error}"
    _core.record_proof(device, names, reason)
    if reason is not None:
        warnings.warn(
            f"te_patches: the native kernel for {' / '.join(names)} (gradient / parameter / exp_avg / "
            "exp_avg_sq / master / mode) "
            f"is not used on cuda:{device}, Transformer Engine's is: {reason}. Please report this with the output of "
            "te_patches.report().",
            RuntimeWarning,
            stacklevel=2,
        )


def _compare(optimizer: Any, device: Any, names: Names, release: Release) -> str | None:
    import torch

    mine, stock = _Operands(device, names), _Operands(device, names)
    for step in range(1, _STEPS + 1):
        for mode in (1, 0):
            arguments = (1e-2, 0.9, 0.95, 1e-8, step, mode, step % 2, 0.1)
            if names[5] == "capturable":
                _compare_capturable(optimizer, mine, stock, arguments)
            else:
                _core.multi_tensor_adam(mine.entries(), *arguments, names[4])
                _run_stock(optimizer, stock, arguments, release)
            for ours, theirs in zip(mine.tensors(), stock.tensors(), strict=True):
                ours, theirs = bits(ours.cpu()), bits(theirs.cpu())
                if not torch.equal(ours, theirs):
                    different = int((ours != theirs).sum())
                    return f"{different} of {ours.numel()} elements differ in step {step}, mode {mode}"
    return None


class _Operands:
    """Random tensors over a wide range of magnitudes, with special values among them, and what scales them. The same
    every time. Made on the CPU, as they are compared there: each kernel of torch's that the process has not used yet
    would take the device a while to load."""

    def __init__(self, device: Any, names: Names) -> None:
        import torch

        self.names = names
        self._device = device
        self._generator = torch.Generator().manual_seed(0x7EAD)
        grad, param, exp_avg, exp_avg_sq, master, _ = names
        fp8 = param.startswith("float8")
        values = {at: self._values(size, param) for at, size in enumerate(_SIZES)} if not fp8 else {}
        self.grads = [self._place(self._values(size, grad)) for size in _SIZES]
        self.params = [self._fp8_param(size) if fp8 else self._place(values[at]) for at, size in enumerate(_SIZES)]
        self.exp_avg = [self._state(size, exp_avg) for size in _SIZES]
        self.exp_avg_sq = [self._state(size, exp_avg_sq, positive=True) for size in _SIZES]
        self.masters: list[Any] = []
        if master == "float32":
            masters = [values[at].float() if values else self._values(s, master) for at, s in enumerate(_SIZES)]
            self.masters = [self._place(value) for value in masters]
        elif master in ("float16", "idle float16"):
            self.masters = [self._state(size, "float16") for size in _SIZES]
        elif master == "remainder":
            low, high = -(1 << 15), 1 << 15
            draw = {"generator": self._generator, "dtype": torch.int16}
            self.masters = [self._place(torch.randint(low, high, (size,), **draw)) for size in _SIZES]

    def _place(self, tensor: Any) -> Any:
        return tensor.to(self._device)

    def _values(self, size: int, dtype: str, special: bool = True) -> Any:
        import torch

        mantissa = torch.randn(size, generator=self._generator)
        exponent = torch.randint(-12, 4, (size,), generator=self._generator)
        tensor = torch.ldexp(mantissa, exponent)
        # One NaN or infinity makes all of a scaled tensor NaN: the largest tensor keeps them out. Beside remainders,
        # which stock keeps NaN from, so are zeros, since a negative remainder below zero is NaN.
        if special and 1000 < size < _SIZES[-1]:
            odd = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-30, 3e38, float("inf"), float("-inf"), float("nan")])
            odd = odd[2:5] if self.names[4] == "remainder" else odd
            places = torch.randint(0, size, (64,), generator=self._generator)
            tensor[places] = odd[torch.randint(0, len(odd), (64,), generator=self._generator)]
        return tensor.to(getattr(torch, dtype))

    def _number(self, value: float) -> Any:
        import torch

        return self._place(torch.full((1,), value, dtype=torch.float32))

    def _state(self, size: int, dtype: str, positive: bool = False) -> Any:
        """A state as FusedAdam keeps it: a tensor; fp16 with its factor; a Float8Tensor with its factor."""
        import torch

        if dtype == "float8_e4m3fn":
            from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

            kind = _releases.fp8_dtypes().kFloat8E4M3
            tensor = Float8Quantizer(self._number(1.0), self._number(0.0), kind).make_empty(
                (size,), device=self._device
            )
            codes = torch.randint(0, 0x7F, (size,), generator=self._generator, dtype=torch.uint8)
            tensor._data.copy_(codes)
            tensor._scale_inv.copy_(self._number(0.0078))
            tensor._quantizer.scale.copy_(self._number(1 / 0.0078))
            return tensor, self._number(1.0)
        values = self._values(size, dtype, special=dtype != "float16")
        values = self._place(values.abs() if positive else values)
        return (values, self._number(0.0123)) if dtype == "float16" else values

    def _fp8_param(self, size: int) -> Any:
        import torch

        data = self._place(torch.zeros(size, dtype=torch.uint8))
        return data, self._number(37.0), self._number(0.0), self._number(0.5)

    def entries(self) -> list[list[Any]]:
        """For the native function."""
        import torch

        def entry(state: Any) -> Any:
            if not isinstance(state, tuple) or (isinstance(state[0], torch.Tensor) and state[0].dtype == torch.float16):
                return state
            tensor, factor = state
            quantizer = tensor._quantizer
            data = tensor._data.view(torch.float8_e4m3fn)
            return data, factor, quantizer.scale, tensor._scale_inv, quantizer.amax

        def param(value: Any) -> Any:
            return (value[0].view(getattr(torch, self.names[1])), *value[1:]) if isinstance(value, tuple) else value

        lists = [self.grads, [param(p) for p in self.params]]
        lists += [[entry(state) for state in states] for states in (self.exp_avg, self.exp_avg_sq)]
        return [*lists, [entry(state) for state in self.masters]] if self.masters else lists

    def tensors(self) -> list[Any]:
        """Everything that an update may write."""
        return [
            tensor
            for entries in self.entries()
            for entry in entries
            for tensor in (entry if isinstance(entry, tuple) else (entry,))
        ]


def _run_stock(optimizer: Any, operands: _Operands, arguments: tuple[Any, ...], release: Release) -> None:
    """Transformer Engine's kernel on fp32 copies of what it does not take as stored, scaled back by FusedAdam."""
    import torch

    _, param, exp_avg, exp_avg_sq, master, _ = operands.names
    flag = torch.zeros(1, dtype=torch.int32, device=operands.grads[0].device)
    in_place = exp_avg == exp_avg_sq == "bfloat16" and release.bf16_moments_in_kernel
    backs: list[tuple[str, Any, Any]] = []

    def unscaled(name: str, state: Any) -> Any:
        if not isinstance(state, tuple):
            if state.dtype != torch.bfloat16 or in_place:
                return state
            copy = state.float()
        else:
            copy = state[0].float()
            if state[0].dtype == torch.float16:
                copy.mul_(state[1])
        backs.append((name, copy, state))
        return copy

    lists = [list(operands.grads), list(operands.params)]
    lists += [[unscaled("exp_avg", state) for state in operands.exp_avg]]
    lists += [[unscaled("exp_avg_sq", state) for state in operands.exp_avg_sq]]
    masters = [unscaled("master_param", state) if master != "remainder" else state for state in operands.masters]
    if param.startswith("float8"):
        data, scale, scale_inv, amax = (list(parts) for parts in zip(*operands.params, strict=True))
        kind = _releases.fp8_dtypes()
        kind = kind.kFloat8E4M3 if param == "float8_e4m3fn" else kind.kFloat8E5M2
        lists = [lists[0], data, lists[2], lists[3], masters, scale, amax, scale_inv]
        optimizer.multi_tensor_adam_fp8(65536, flag, lists, *arguments, kind)
    elif master == "remainder":
        optimizer.multi_tensor_adam_param_remainder(65536, flag, [*lists, masters], *arguments)
    else:
        with_master = masters and master != "idle float16"
        optimizer.multi_tensor_adam(65536, flag, [*lists, masters] if with_master else lists, *arguments)
    for name, copy, state in backs:
        if isinstance(state, tuple):
            optimizer._apply_scale(name, copy, *state)
        else:
            state.copy_(copy)


def _compare_capturable(optimizer: Any, mine: _Operands, stock: _Operands, arguments: tuple[Any, ...]) -> None:
    """The same arguments, those that live on the device moved there; gradients scaled by a power of two and not."""
    import torch

    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay = arguments
    device = mine.grads[0].device
    live_lr = torch.full((1,), lr, dtype=torch.float32, device=device)
    live_step = torch.full((1,), 7 * step, dtype=torch.int32, device=device)
    inv_scale = torch.full((1,), 0.5 if mode else 0.3, dtype=torch.float32, device=device)
    skip = torch.zeros(1, dtype=torch.int32, device=device)
    shared = (live_lr, beta1, beta2, eps, live_step, mode, bias_correction, weight_decay, inv_scale)
    _core.multi_tensor_adam_capturable(mine.entries(), *shared, skip)
    function = optimizer.multi_tensor_adam_capturable
    if mine.names[4] != "none":
        function = optimizer.multi_tensor_adam_capturable_master
    function(65536, skip, [list(tensors) for tensors in stock.entries()], *shared)
