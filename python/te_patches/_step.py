"""FusedAdam.step through the native plan. The tiers below it: Transformer Engine's kernels over lists read anew
(`_replay`), and Transformer Engine's own step.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from te_patches import _core, _nvrtc, _proof, _replay, cpu
from te_patches._capturable import Counters, capturing
from te_patches._settings import Switch

_log = logging.getLogger("te_patches")
_PLAN = "_te_patches_plan"
_MARK = "_te_patches_step"


def plan_of(optimizer: Any) -> _core.Plan | None:
    """The optimizer's plan, if it has stepped. Kept on the instance, outside of what torch pickles and copies."""
    plan = optimizer.__dict__.get(_PLAN)
    return plan if isinstance(plan, _core.Plan) else None


def patched_step(stock: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """A replacement for `stock`, Transformer Engine's function without torch's hooks around it."""

    @functools.wraps(stock)
    def step(self: Any, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        if not switch.active:
            return stock(self, closure, grad_scaler)
        loss = None if closure is None else closure()
        plan = plan_of(self)
        first = plan is None
        if plan is None:
            _nvrtc.preload()
            plan = self.__dict__[_PLAN] = _core.Plan()
        _run(self, plan, switch, stock, grad_scaler)
        if first:
            _log.info("first step of an optimizer: %s", _tiers(plan))
        return loss

    # Whatever wraps this step for one optimizer takes the mark along.
    setattr(step, _MARK, True)
    return step


def _tiers(plan: _core.Plan) -> str:
    """How many groups took which tier, and why."""
    groups = plan.report()
    counted = Counter((group["tier"], group["reason"]) for group in groups)
    tensors = sum(group["tensors"] for group in groups)
    words = [f"{count} x {tier}" + (f" ({reason})" if reason else "") for (tier, reason), count in counted.items()]
    return f"groups {', '.join(words)}; {tensors} tensors in native plans"


def reaches(optimizer: Any) -> bool:
    """Whether the optimizer's step is the patched one, also where a scheduler has wrapped it."""
    return bool(getattr(optimizer.step, _MARK, False))


def _run(optimizer: Any, plan: _core.Plan, switch: Switch, stock: Callable[..., Any], grad_scaler: Any) -> None:
    kernels = switch.kernels
    served: list[int] = []
    done: set[str] = set()
    release = switch.release
    if switch.count_empty_groups and not release.counts_empty_groups:
        release = replace(release, counts_empty_groups=True)
    counters = Counters(optimizer, grad_scaler, release.counts_empty_groups) if optimizer.capturable else None
    live = counters.live if counters else None
    while True:
        todo = plan.step(optimizer, kernels, served, release, live)
        if todo is None:
            if counters:
                counters.commit()
            return
        kind, items = todo
        if kind in done:
            raise RuntimeError(f"te_patches: the optimizer asks to {kind} again after it was done: {items!r:.500}")
        done.add(kind)
        if kind == "initialize":
            _initialize(optimizer, items)
        elif kind == "prove":
            if capturing():
                # A comparison would synchronise, which a capture forbids.
                kernels = "te"
            else:
                for device, names in items:
                    _proof.prove(optimizer, device, names, release)
        elif counters:
            # Stock orders counters and flags across groups by itself: it gets all of them.
            _step_stock(optimizer, list(range(len(optimizer.param_groups))), stock, grad_scaler)
            if release is not switch.release:
                counters.commit_empty()
            return
        else:
            served = [group for group, _ in items]
            own = [group for group, tier in items if tier == "stock"]
            if own:
                _step_stock(optimizer, own, stock, grad_scaler)
            for group, tier in items:
                if tier == "replay":
                    _replay.step(optimizer, optimizer.param_groups[group], release)


def _initialize(optimizer: Any, params: list[tuple[Any, bool]]) -> None:
    """Makes the states as stock does; if that fails half-way, none is left."""
    try:
        for param, remainder in params:
            optimizer.initialize_state(param, remainder)
    except BaseException:
        for param, _ in params:
            optimizer.state.pop(param, None)
            optimizer._scales.pop(param, None)
        raise


def _step_stock(optimizer: Any, groups: list[int], stock: Callable[..., Any], grad_scaler: Any) -> None:
    every = optimizer.param_groups
    _refuse_cpu_tensors(every, groups)
    if len(groups) == len(every):
        stock(optimizer, None, grad_scaler)
        return
    optimizer.param_groups = [every[group] for group in groups]
    try:
        stock(optimizer, None, grad_scaler)
    finally:
        optimizer.param_groups = every


def _refuse_cpu_tensors(every: list[dict[str, Any]], groups: list[int]) -> None:
    """Stock hands any address to the GPU: on one it cannot read, the process dies."""
    if cpu.enabled():
        return
    for group in groups:
        for index, param in enumerate(every[group]["params"]):
            if not param.is_cuda:
                raise RuntimeError(
                    f"FusedAdam: parameter {index} of group {group} (shape {list(param.shape)}, {param.dtype}) is on "
                    f"{param.device}, and its options are only served by Transformer Engine's own step, which takes "
                    "CUDA tensors; move it to a GPU"
                )
