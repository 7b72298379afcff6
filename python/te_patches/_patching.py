"""Putting the patches in place and taking them back: idempotent, thread-safe, all or nothing.

Layer: methods on the class FusedAdam, not the class's name: Megatron and NeMo import the class by name, often before
`apply()`, and subclasses inherit.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from te_patches import _empty_shards, _hooks, _load, _releases, _sharded_states, _step
from te_patches._settings import Kernels, Switch, choose_kernels, choose_progress

_log = logging.getLogger("te_patches")
_lock = threading.RLock()


@dataclass
class Patch:
    """One name that was replaced, or left alone for a reason."""

    target: str
    state: str
    why: str
    owner: Any = None
    name: str = ""
    original: Any = None
    replacement: Any = None

    @property
    def in_place(self) -> bool:
        return self.replacement is not None and vars(self.owner)[self.name] is self.replacement


@dataclass
class Applied:
    """What `apply()` did."""

    fused_adam: ModuleType
    switch: Switch
    patches: list[Patch]


_applied: Applied | None = None


def applied() -> Applied | None:
    """What is in place."""
    return _applied


def apply(
    kernels: Kernels | None = None,
    *,
    in_place_load: bool = True,
    progress: bool | None = None,
    count_empty_groups: bool = False,
) -> None:
    """Patches Transformer Engine's FusedAdam in this process.

    Call it once at startup, before optimizers and schedulers are built (a scheduler pins the step it finds). Calling
    it again changes nothing but these arguments. `kernels`:

    - "auto" (default, or from the environment variable TE_PATCHES): native kernels where they were shown equal to stock
      on this GPU, Transformer Engine's kernels elsewhere;
    - "native": native kernels or RuntimeError;
    - "te": Transformer Engine's kernels over lists read anew each step.

    `in_place_load`: whether `load_state_dict` writes into the buffers that the optimizer has, which an earlier
    `state_dict()` shares; False gives states buffers of their own, as stock does. `progress`: whether loads from host
    memory show a bar on stderr; None takes TE_PATCHES_PROGRESS (0 or 1) from the environment.

    `count_empty_groups`: whether a group without parameters advances its step on releases before 2.19 too, so that
    ranks agree on it; by default the installed release's rule holds.

    TE_PATCHES=off makes this call do nothing. Logs one INFO line per patch. Raises ImportError if Transformer Engine is
    missing, ValueError for an unknown word, RuntimeError if another library than NeMo has replaced FusedAdam.step; then
    nothing has changed. NeMo's patches may come before or after: ours serve, and `revert()` leaves NeMo's as they were.
    """
    global _applied
    chosen, shown = choose_kernels(kernels), choose_progress(progress)
    with _lock:
        if chosen == "off":
            _log.info("TE_PATCHES=off: nothing is patched")
            return
        if _applied is not None and any(patch.in_place for patch in _applied.patches):
            switch = _applied.switch
            switch.kernels, switch.in_place_load, switch.progress = chosen, in_place_load, shown
            switch.count_empty_groups = count_empty_groups
            _take_back(_applied.patches)
            return
        fused_adam = _releases.import_fused_adam()
        release = _releases.probe(fused_adam)
        switch = Switch(chosen, release, in_place_load, shown, count_empty_groups)
        patches = _patches(fused_adam, switch)
        for patch in patches:
            if patch.replacement is not None:
                setattr(patch.owner, patch.name, patch.replacement)
            _log.info("%s: %s (%s)", patch.target, patch.state, patch.why)
        _applied = Applied(fused_adam, switch, patches)


def _by_nemo(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).split(".")[0] == "nemo_automodel"


def _take_back(patches: list[Patch]) -> None:
    """Puts ours over NeMo's, where those came later."""
    for patch in patches:
        if patch.replacement is None or patch.in_place:
            continue
        now = vars(patch.owner)[patch.name]
        if _by_nemo(now):
            patch.original = now
            setattr(patch.owner, patch.name, patch.replacement)
            _log.info("%s: patched again, over %s", patch.target, now.__module__)


def verdicts(fused_adam: ModuleType) -> list[Patch]:
    """What `apply()` does or did: patched, or stepped aside, and why. Changes nothing. RuntimeError as in `apply()`."""
    if _applied is not None:
        return _applied.patches
    return _patches(fused_adam, Switch("auto", _releases.probe(fused_adam)))


def _patches(fused_adam: ModuleType, switch: Switch) -> list[Patch]:
    release = switch.release
    return [
        _patch_step(fused_adam, switch),
        _patch_load(fused_adam, switch),
        *_patch_appliers(fused_adam, release),
        _patch_scaling(fused_adam, release),
        *_patch_states(fused_adam, release),
    ]


def revert() -> None:
    """Puts the original objects back; optimizers go on with Transformer Engine's own step.

    NeMo's patches over ours stay, and find Transformer Engine's functions beneath. RuntimeError if another library has
    since replaced a patched name; then nothing has changed.
    """
    global _applied
    with _lock:
        if _applied is None:
            return
        replaced = []
        for patch in _applied.patches:
            if patch.replacement is None:
                continue
            now = vars(patch.owner)[patch.name]
            if patch.in_place:
                replaced.append(patch)
            elif not _by_nemo(now):
                raise RuntimeError(
                    f"te_patches cannot be reverted: {patch.target} was replaced since by "
                    f"{getattr(now, '__module__', '?')}.{getattr(now, '__qualname__', now)}; revert that first"
                )
        _applied.switch.active = False
        for patch in reversed(replaced):
            setattr(patch.owner, patch.name, patch.original)
        _rehook(_applied.fused_adam.FusedAdam)
        _applied = None


def _patch_step(fused_adam: ModuleType, switch: Switch) -> Patch:
    optimizer = fused_adam.FusedAdam
    original = vars(optimizer)["step"]
    # torch puts its hooks around the class's function when the first instance is built, and marks it.
    stock: Callable[..., Any] = original.__wrapped__ if getattr(original, "hooked", False) else original
    if not _by_nemo(stock) and (hasattr(stock, "__wrapped__") or stock.__module__ != fused_adam.__name__):
        raise RuntimeError(
            f"FusedAdam.step was replaced by {original.__module__}.{original.__qualname__} before te_patches.apply(); "
            "call te_patches.apply() first"
        )
    replacement = _hooks.hooked(_step.patched_step(stock, switch))
    target = f"{fused_adam.__name__}.FusedAdam.step"
    return Patch(target, "patched", "native plan and kernels", optimizer, "step", original, replacement)


def _patch_load(fused_adam: ModuleType, switch: Switch) -> Patch:
    optimizer = fused_adam.FusedAdam
    original = vars(optimizer)["load_state_dict"]
    target = f"{fused_adam.__name__}.FusedAdam.load_state_dict"
    replacement = _load.patched_load(original, switch)
    return Patch(target, "patched", "in place, all or nothing", optimizer, "load_state_dict", original, replacement)


def _patch_appliers(fused_adam: ModuleType, release: _releases.Release) -> list[Patch]:
    patches = []
    # Each optimizer's module has a name of its own for the one applier.
    for module in (fused_adam, _releases.import_fused_sgd()):
        target = f"{module.__name__}.multi_tensor_applier"
        original = module.multi_tensor_applier
        if release.filters_empty:
            patches.append(Patch(target, "stepped aside", "this release keeps empty tensors out of its kernels"))
        elif getattr(original, "_nemo_empty_shard_patch", False):
            patches.append(Patch(target, "stepped aside", "NeMo's patch already keeps empty tensors out"))
        else:
            why = "empty tensors corrupt this release's launches"
            filtering = _empty_shards.filtering(original)
            patches.append(Patch(target, "patched", why, module, "multi_tensor_applier", original, filtering))
    return patches


def _patch_scaling(fused_adam: ModuleType, release: _releases.Release) -> Patch:
    target = f"{fused_adam.__name__}.FusedAdam._apply_scale"
    if release.scales_empty:
        return Patch(target, "stepped aside", "this release scales states without elements")
    optimizer = fused_adam.FusedAdam
    original = vars(optimizer)["_apply_scale"]
    why = "scaled states without elements fail in this release"
    return Patch(target, "patched", why, optimizer, "_apply_scale", original, _empty_shards.scaling(original))


def _patch_states(fused_adam: ModuleType, release: _releases.Release) -> list[Patch]:
    optimizer = fused_adam.FusedAdam
    patches = []
    for name, patch in (
        ("_initialize_state", _sharded_states.initialising),
        ("get_unscaled_state", _sharded_states.reading),
        ("set_scaled_state", _sharded_states.writing),
        ("state_dict", _sharded_states.saving),
    ):
        target = f"{fused_adam.__name__}.FusedAdam.{name}"
        if release.shards_states:
            patches.append(Patch(target, "stepped aside", "this release shards states itself"))
            continue
        original = vars(optimizer)[name]
        why = "this release loses the sharding of states, or quantizes them"
        patches.append(Patch(target, "patched", why, optimizer, name, original, patch(original)))
    return patches


def _rehook(optimizer: Any) -> None:
    """Instances built while the patch was in place need torch's hooks around the original as well."""
    if getattr(optimizer.step, "hooked", False):
        return
    for candidate in gc.get_objects():
        if issubclass(type(candidate), optimizer):
            candidate._patch_step_function()
            return
