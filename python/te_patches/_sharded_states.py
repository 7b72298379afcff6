"""States of sharded and of quantized parameters, for releases before 2.14: allocated like the local shard, plain
inside, and DTensors of the parameter's mesh, placements and global shape outside, as 2.14 makes them.

2.10 and 2.11 allocate the states of a DTensor as plain tensors of the global shape, and fail with masters; up to 2.13
those of a DTensor over a quantized tensor are quantized themselves (NVIDIA/TransformerEngine pull requests 2535, 2698).
Layer: FusedAdam's methods that make, read and write a state. Each hands stock's method the local tensors, so that
dtypes, scales and errors stay the release's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def _sharded(tensor: Any) -> bool:
    return hasattr(tensor, "_local_tensor")


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def _plain(tensor: Any) -> Any:
    """The local tensor, dequantized."""
    from transformer_engine.pytorch.tensor import QuantizedTensor

    local = _local(tensor)
    return local.dequantize() if isinstance(local, QuantizedTensor) else local


def _wrap(local: Any, param: Any) -> Any:
    from torch.distributed.tensor import DTensor

    shape, stride = param.size(), param.stride()
    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride)


def initialising(stock: Callable[..., None]) -> Callable[..., None]:
    """`FusedAdam._initialize_state` for any parameter."""

    @functools.wraps(stock)
    def _initialize_state(
        self: Any, param: Any, state_name: str, zero_buffer: bool, store_param_remainders: bool = False
    ) -> None:
        # NeMo's patch replaces the method unless its source has three phrases, by which it knows a fixed release:
        # param.dequantize() if isinstance(param, QuantizedTensor), torch.zeros_like(param_for_empty,
        # torch.empty_like(param_for_empty.
        plain = _plain(param)
        if plain is param:
            stock(self, param, state_name, zero_buffer, store_param_remainders)
            return
        # Stock makes the state of a tensor like the shard; then it becomes the parameter's.
        stand_in = plain.detach()
        try:
            stock(self, stand_in, state_name, zero_buffer, store_param_remainders)
            state = self.state[stand_in][state_name]
            scales = self._scales.get(stand_in, {})
        finally:
            self.state.pop(stand_in, None)
            self._scales.pop(stand_in, None)
        self.state[param][state_name] = _wrap(state, param) if _sharded(param) else state
        if state_name in scales:
            self._scales.setdefault(param, {})[state_name] = scales[state_name]

    # The source that NeMo's patch reads must be this one's.
    del _initialize_state.__wrapped__
    return _initialize_state


@contextmanager
def _local_state(optimizer: Any, param: Any, state_name: str) -> Iterator[None]:
    """The state is its local tensor meanwhile."""
    states = optimizer.state[param]
    whole = states[state_name]
    states[state_name] = _local(whole)
    try:
        yield
    finally:
        states[state_name] = whole


def reading(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`FusedAdam.get_unscaled_state`: the local tensor of a sharded state."""

    @functools.wraps(stock)
    def get_unscaled_state(self: Any, param: Any, state_name: str, *arguments: Any, **options: Any) -> Any:
        if not _sharded(self.state[param][state_name]):
            return stock(self, param, state_name, *arguments, **options)
        with _local_state(self, param, state_name):
            return stock(self, param, state_name, *arguments, **options)

    return get_unscaled_state


def writing(stock: Callable[..., None]) -> Callable[..., None]:
    """`FusedAdam.set_scaled_state`: a DTensor, its local tensor, or what the release saved before it was patched, a
    tensor of the global shape of which the first elements were used.
    """

    @functools.wraps(stock)
    def set_scaled_state(self: Any, param: Any, state_name: str, unscaled_state: Any) -> None:
        if not _sharded(param):
            stock(self, param, state_name, unscaled_state)
            return
        if state_name not in self.state[param]:
            remainder = self.store_param_remainders and state_name == "master_param" and "bfloat16" in str(param.dtype)
            self._initialize_state(param, state_name, False, remainder)
        local = _local(self.state[param][state_name])
        value = _plain(unscaled_state)
        if not _sharded(unscaled_state) and value.shape == param.shape and value.shape != local.shape:
            value = value.reshape(-1)[: local.numel()].view(local.shape)
        with _local_state(self, param, state_name):
            stock(self, param, state_name, value)

    return set_scaled_state


def saving(stock: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`FusedAdam.state_dict`: DTensors for sharded parameters, for torch.distributed.checkpoint."""

    @functools.wraps(stock)
    def state_dict(self: Any) -> dict[str, Any]:
        saved = stock(self)
        params = [param for group in self.param_groups for param in group["params"]]
        for index, states in saved["state"].items():
            if isinstance(index, int) and _sharded(params[index]):
                param = params[index]
                saved["state"][index] = {
                    name: value if _sharded(value) or value.shape != _local(param).shape else _wrap(value, param)
                    for name, value in states.items()
                }
        return saved

    return state_dict
