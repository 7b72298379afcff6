"""torch's hooks around a step, entered only where somebody listens.

torch wraps every optimizer's step in a range for profilers and in calls of hooks. With no hook registered and nothing
observing torch that wrapper does nothing, and takes some 25 microseconds, several times that after a backward pass that
left the caches with other things.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer


def hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` with torch's hooks, marked as torch marks it, so that torch adds no second layer."""
    by_torch = Optimizer.profile_hook_step(step)
    chosen: Any = _where_heard(by_torch, step) or by_torch
    chosen.hooked = True
    return chosen  # type: ignore[no-any-return]


def _where_heard(by_torch: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any] | None:
    """`by_torch` where a hook or an observer wants it, else `step`; None for a torch that does not tell."""
    try:
        from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

        # at::hasCallbacks(): profilers, execution traces and whatever else is told of ranges, in this thread.
        observed = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))._ZN2at12hasCallbacksEv
    except (ImportError, OSError, AttributeError):
        return None
    observed.restype, observed.argtypes = ctypes.c_bool, []
    for_all = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)

    @functools.wraps(by_torch)
    def where_heard(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(for_all) or self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or observed():
            return by_torch(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    return where_heard
