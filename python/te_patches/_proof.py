"""The proof at first use: the first time a kernel is needed in a process it is run beside Transformer Engine's on the
same small random tensors, and the results are compared as bits. Equal: it is used. Different: Transformer Engine's
kernels are, and one warning says so.
"""

from __future__ import annotations

import itertools
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

    drawn = _Draw(names).operands()
    mine = _buffer(drawn).to(device)
    entries, stock = _views(mine, drawn), _Stock(optimizer, device, names, drawn, release)
    for step in range(1, _STEPS + 1):
        for mode in (1, 0):
            arguments = (1e-2, 0.9, 0.95, 1e-8, step, mode, step % 2, 0.1)
            if names[5] == "capturable":
                live = _live(arguments, device)
                _core.multi_tensor_adam_capturable(entries, *live)
                stock.step_capturable(live)
            else:
                _core.multi_tensor_adam(entries, *arguments, names[4])
                stock.step(arguments)
            ours = mine.cpu()
            if torch.equal(ours, stock.buffer):
                continue
            for a, b in zip(_tensors(_views(ours, drawn)), _tensors(stock.operands), strict=True):
                if different := int((bits(a) != bits(b)).sum()):
                    return f"{different} of {a.numel()} elements differ in step {step}, mode {mode}"
    return None


def _tensors(operands: Any) -> list[Any]:
    """The tensors of nested lists and tuples."""
    if isinstance(operands, list | tuple):
        return [tensor for part in operands for tensor in _tensors(part)]
    return [operands]


def _places(operands: Any) -> list[int]:
    """Where each tensor starts in a buffer, in bytes, and where the last ends. Accesses of 16 bytes stay possible."""
    return [0, *itertools.accumulate(-(-tensor.nbytes // 16) * 16 for tensor in _tensors(operands))]


def _buffer(operands: Any) -> Any:
    """Copies of all tensors side by side in one allocation on the CPU: one copy moves them, one comparison does."""
    import torch

    places = _places(operands)
    buffer = torch.zeros(places[-1], dtype=torch.uint8)
    for tensor, start in zip(_tensors(operands), places[:-1], strict=True):
        buffer[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor)
    return buffer


def _views(buffer: Any, operands: Any) -> Any:
    """The same lists and tuples, their tensors replaced by those in a buffer."""
    places = iter(_places(operands))

    def view(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(view(part) for part in value)
        start = next(places)
        return buffer[start : start + value.nbytes].view(value.dtype)

    return view(operands)


class _Draw:
    """Random tensors over a wide range of magnitudes, with special values among them, and what scales them. The same
    every time. Made on the CPU, as they are compared there: each kernel of torch's that the process has not used yet
    would take the device a while to load."""

    def __init__(self, names: Names) -> None:
        import torch

        self._names = names
        self._generator = torch.Generator().manual_seed(0x7EAD)

    def operands(self) -> list[list[Any]]:
        """Gradients, parameters, exp_avg, exp_avg_sq and, where there are any, masters, as the native function takes
        them: a tensor; a scaled state with its factor; fp8 with all that scales it.
        """
        import torch

        grad, param, exp_avg, exp_avg_sq, master, _ = self._names
        fp8 = param.startswith("float8")
        lists = [
            [self._values(size, grad) for size in _SIZES],
            [self._fp8_param(size, param) if fp8 else self._values(size, param) for size in _SIZES],
            [self._state(size, exp_avg) for size in _SIZES],
            [self._state(size, exp_avg_sq, positive=True) for size in _SIZES],
        ]
        if master == "float32":
            lists += [[self._values(size, master) for size in _SIZES] if fp8 else [p.float() for p in lists[1]]]
        elif master == "remainder":
            draw = {"generator": self._generator, "dtype": torch.int16}
            lists += [[torch.randint(-(1 << 15), 1 << 15, (size,), **draw) for size in _SIZES]]
        elif master != "none":
            lists += [[self._state(size, "float16") for size in _SIZES]]
        return lists

    def _values(self, size: int, dtype: str, special: bool = True) -> Any:
        import torch

        mantissa = torch.randn(size, generator=self._generator)
        exponent = torch.randint(-12, 4, (size,), generator=self._generator)
        tensor = torch.ldexp(mantissa, exponent)
        # One NaN or infinity makes all of a scaled tensor NaN: the largest tensor keeps them out. Beside remainders,
        # which stock keeps NaN from, so are zeros, since a negative remainder below zero is NaN.
        if special and 1000 < size < _SIZES[-1]:
            odd = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-30, 3e38, float("inf"), float("-inf"), float("nan")])
            odd = odd[2:5] if self._names[4] == "remainder" else odd
            places = torch.randint(0, size, (64,), generator=self._generator)
            tensor[places] = odd[torch.randint(0, len(odd), (64,), generator=self._generator)]
        return tensor.to(getattr(torch, dtype))

    def _state(self, size: int, dtype: str, positive: bool = False) -> Any:
        import torch

        if dtype == "float8_e4m3fn":
            codes = torch.randint(0, 0x7F, (size,), generator=self._generator, dtype=torch.uint8)
            return codes.view(torch.float8_e4m3fn), _number(1.0), _number(1 / 0.0078), _number(0.0078), _number(0.0)
        values = self._values(size, dtype, special=dtype != "float16")
        values = values.abs() if positive else values
        return (values, _number(0.0123)) if dtype == "float16" else values

    def _fp8_param(self, size: int, dtype: str) -> Any:
        import torch

        data = torch.zeros(size, dtype=torch.uint8).view(getattr(torch, dtype))
        return data, _number(37.0), _number(0.0), _number(0.5)


def _number(value: float) -> Any:
    import torch

    return torch.full((1,), value, dtype=torch.float32)


class _Stock:
    """What stock makes of the same operands: Transformer Engine's kernel on the device, on fp32 copies of what it does
    not take as stored, scaled back by FusedAdam. fp16 is scaled on the CPU, by the same IEEE arithmetic."""

    def __init__(self, optimizer: Any, device: Any, names: Names, drawn: list[list[Any]], release: Release) -> None:
        self._optimizer, self._device, self._names = optimizer, device, names
        self._bf16_in_place = release.bf16_moments_in_kernel and names[2] == names[3] == "bfloat16"
        self.buffer = _buffer(drawn)
        self.operands = _views(self.buffer, drawn)
        states = zip(("exp_avg", "exp_avg_sq", "master_param"), self.operands[2:], strict=False)
        self._states = {name: [self._state(entry) for entry in entries] for name, entries in states}

    def _state(self, entry: Any) -> Any:
        """A state as FusedAdam keeps it: a tensor, or a tensor or Float8Tensor with its factor."""
        if not isinstance(entry, tuple) or len(entry) == 2:
            return entry
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

        data, factor, scale, scale_inv, amax = (part.to(self._device) for part in entry)
        quantizer = Float8Quantizer(scale, amax, _releases.fp8_dtypes().kFloat8E4M3)
        tensor = quantizer.make_empty(tuple(data.shape), device=self._device)
        tensor._data.copy_(bits(data))
        tensor._scale_inv.copy_(scale_inv)
        return tensor, factor

    def step(self, arguments: tuple[Any, ...]) -> None:
        import torch

        optimizer, (_, param, _, _, master, _) = self._optimizer, self._names
        values = [*self.operands[:2], *([self._unscaled(s) for s in states] for states in self._states.values())]
        buffer = _buffer(values).to(self._device)
        lists = _views(buffer, values)
        flag = torch.zeros(1, dtype=torch.int32).to(self._device)
        if param.startswith("float8"):
            data, scale, scale_inv, amax = (list(parts) for parts in zip(*lists[1], strict=True))
            kind = _releases.fp8_dtypes()
            kind = kind.kFloat8E4M3 if param == "float8_e4m3fn" else kind.kFloat8E5M2
            lists = [lists[0], [bits(codes) for codes in data], *lists[2:], scale, amax, scale_inv]
            optimizer.multi_tensor_adam_fp8(65536, flag, lists, *arguments, kind)
        elif master == "remainder":
            optimizer.multi_tensor_adam_param_remainder(65536, flag, lists, *arguments)
        else:
            optimizer.multi_tensor_adam(65536, flag, lists[:4] if master == "idle float16" else lists, *arguments)
        results = _views(buffer.cpu(), values)
        for kept, new in zip(_tensors(self.operands[:2]), _tensors(results[:2]), strict=True):
            kept.copy_(new)
        for (name, states), kept, new in zip(self._states.items(), self.operands[2:], results[2:], strict=True):
            for state, entry, value in zip(states, kept, new, strict=True):
                self._store(name, state, entry, value)

    def _unscaled(self, state: Any) -> Any:
        import torch

        if isinstance(state, tuple):
            return state[0].float().mul_(state[1]) if state[0].dtype == torch.float16 else state[0].float().cpu()
        return state.float() if state.dtype == torch.bfloat16 and not self._bf16_in_place else state

    def _store(self, name: str, state: Any, entry: Any, value: Any) -> None:
        if not isinstance(state, tuple):
            entry.copy_(value)
            if entry.dtype != value.dtype:
                _round_nan(entry)
        elif state[0].dtype == entry[0].dtype:
            self._optimizer._apply_scale(name, value, *entry)
            for part in entry:
                _round_nan(part)
        else:
            tensor, factor = state
            self._optimizer._apply_scale(name, value.to(self._device), tensor, factor)
            quantizer = tensor._quantizer
            now = (tensor._data, factor, quantizer.scale, tensor._scale_inv, quantizer.amax)
            for part, new in zip(entry, now, strict=True):
                bits(part).copy_(bits(new))

    def step_capturable(self, live: tuple[Any, ...]) -> None:
        buffer = self.buffer.to(self._device)
        lists = _views(buffer, self.operands)
        function = self._optimizer.multi_tensor_adam_capturable
        if self._names[4] != "none":
            function = self._optimizer.multi_tensor_adam_capturable_master
        function(65536, live[-1], lists, *live[:-1])
        self.buffer.copy_(buffer)


def _round_nan(tensor: Any) -> None:
    """NaN as a GPU computes and rounds it: all bits set but the sign."""
    import torch

    integers = bits(tensor)
    integers[tensor.isnan()] = torch.iinfo(integers.dtype).max


def _live(arguments: tuple[Any, ...], device: Any) -> tuple[Any, ...]:
    """The same arguments, those that live on the device moved there, and a flag that skips nothing; gradients scaled by
    a power of two and not.
    """
    import torch

    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay = arguments
    live_step, flag = (torch.tensor([value], dtype=torch.int32).to(device) for value in (7 * step, 0))
    live_lr, inv_scale = (_number(value).to(device) for value in (lr, 0.5 if mode else 0.3))
    return live_lr, beta1, beta2, eps, live_step, mode, bias_correction, weight_decay, inv_scale, flag
