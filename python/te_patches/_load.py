"""FusedAdam.load_state_dict into the buffers that the optimizer has, all or nothing.

Layer: torch's own loader does hooks, groups and `__setstate__`, in its order. Ours goes in as its last pre-hook, which
reads and checks everything and takes the states out, and as its first post-hook, which writes them. Stock instead has
torch cast a copy of every state, drops the buffers and fills new ones.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from te_patches import _core, _foreign, _nvrtc
from te_patches._capturable import capturing
from te_patches._releases import import_fused_adam
from te_patches._settings import Switch

_log = logging.getLogger("te_patches")
_LAST = "_te_patches_load"


def last_load(optimizer: Any) -> dict[str, Any] | None:
    """What the optimizer's last load did. Kept on the instance, outside of what torch pickles and copies."""
    found = optimizer.__dict__.get(_LAST)
    return found if isinstance(found, dict) else None


def patched_load(stock: Callable[..., None], switch: Switch) -> Callable[..., None]:
    """A replacement for `stock`, Transformer Engine's `load_state_dict`."""

    @functools.wraps(stock)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        if not switch.active:
            stock(self, state_dict)
            return
        loading = _Loading(self, state_dict, switch)
        before = self.register_load_state_dict_pre_hook(loading.check)
        after = self.register_load_state_dict_post_hook(loading.commit, prepend=True)
        try:
            super(import_fused_adam().FusedAdam, self).load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    return load_state_dict


class _Loading:
    """One call of `load_state_dict`."""

    def __init__(self, optimizer: Any, state_dict: dict[str, Any], switch: Switch) -> None:
        self.switch = switch
        # Stock reads states from what the caller gave and groups from what the hooks made of it.
        self.saved = state_dict
        self.scales: dict[Any, dict[str, Any]] = {}
        self.native = _is_plain(optimizer)
        self.load: _core.Load | None = None

    def check(self, optimizer: Any, hooked: dict[str, Any]) -> dict[str, Any] | None:
        """Reads and checks everything and makes the buffers that are missing. Changes nothing."""
        if capturing():
            raise RuntimeError(
                "FusedAdam: a load cannot be captured in a CUDA graph; load before the capture or after it"
            )
        sizes = [
            [len(group["params"]) for group in groups] for groups in (hooked["param_groups"], optimizer.param_groups)
        ]
        if sizes[0] != sizes[1]:
            return None  # torch refuses it
        groups, states = _foreign.convert(optimizer, hooked["param_groups"], self.saved)
        ids = [key for group in self.saved["param_groups"] for key in group["params"]][: sum(sizes[0])]
        whole = not self.switch.release.shards_states
        self.load = load = _core.Load.read(optimizer, ids, states, whole, self.native and self.switch.in_place_load)
        self.held = load.held or _is_shared(load.sample())
        if self.native:
            with _apart(optimizer) as (state, scales):
                fresh = load.fresh()
                for param, name, remainder in fresh:
                    optimizer._initialize_state(param, name, False, remainder)
                load.place(state, scales)
            self.scales, self.fresh = scales, len(fresh)
            self.native = _is_ready(load)
        foreign = load.foreign()
        if not foreign:
            # torch copies the groups deeply; without states it only counts their parameters.
            groups = [{**group, "params": range(len(group["params"]))} for group in groups]
        return {**hooked, "state": foreign, "param_groups": groups}

    def commit(self, optimizer: Any) -> None:
        """Writes the states into an optimizer whose groups torch has just replaced."""
        load = self.load
        if load is None:
            raise RuntimeError("te_patches: torch loaded what was not checked; was a hook of this load removed?")
        count, same, host_bytes = load.counts()
        if self.native:
            if self.held:
                _warn_held()
            # First, so that the device works while the rest is done.
            with shown(host_bytes, self.switch.progress) as progress:
                load.write(progress)
            for index, source, target in load.staged():
                load.write_one(index, _stand_in(source, target))
            optimizer.state.update(load.states())
            for param, scales in self.scales.items():
                optimizer._scales.setdefault(param, {}).update(scales)
            done = {"states": count, "in_place": count - self.fresh - same, "same": same, "fresh": self.fresh}
        else:
            _write_by_stock(optimizer, load)
            done = {"states": count, "in_place": 0, "same": 0, "fresh": count}
        optimizer.__dict__[_LAST] = done
        if optimizer.capturable:
            _to_device(optimizer)


def _is_plain(optimizer: Any) -> bool:
    """Whether states are written as FusedAdam writes them: a subclass or an instance may have its own way."""
    base = import_fused_adam().FusedAdam
    ours = ("set_scaled_state", "_apply_scale")
    return all(getattr(type(optimizer), name) is getattr(base, name) for name in ours) and not any(
        name in vars(optimizer) for name in ours
    )


@contextmanager
def _apart(optimizer: Any) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
    """States and scales that are made meanwhile do not show on the optimizer."""
    own = optimizer.state, optimizer._scales
    apart: tuple[dict[Any, Any], dict[Any, Any]] = defaultdict(dict), {}
    optimizer.state, optimizer._scales = apart
    try:
        yield apart
    finally:
        optimizer.state, optimizer._scales = own


def _is_ready(load: _core.Load) -> bool:
    _nvrtc.preload()
    try:
        load.prepare()
    except RuntimeError as error:
        _log.warning("states are loaded by Transformer Engine's own code, into new buffers: %s", error)
        return False
    return True


def _stand_in(source: Any, target: Any) -> Any:
    """`source` as a plain tensor of the target's layout and device, fp32 unless it is a remainder."""
    import torch

    if hasattr(source, "dequantize") and type(source) is not torch.Tensor:
        source = source.dequantize()
    if source.shape != target.shape:
        # Saved with the global shape by a release that lost the sharding: the first elements were used.
        source = source.reshape(-1)[: target.numel()].view(target.shape)
    dtype = torch.int16 if source.dtype == torch.int16 else torch.float32
    return torch.empty_like(target, dtype=dtype).copy_(source.detach())


def _write_by_stock(optimizer: Any, load: _core.Load) -> None:
    for param in load.params():
        optimizer.state[param] = {}
    for param, name, source, remainder in load.sources():
        value = source if remainder else source.float()
        # Scaling multiplies the tensor it is given in place.
        optimizer.set_scaled_state(param, name, value.clone() if value is source and not remainder else value)


def _to_device(optimizer: Any) -> None:
    """In capturable mode kernels read learning rate and step on the device; a checkpoint may have them elsewhere."""
    import torch

    for group in optimizer.param_groups:
        device = group["params"][0].device if group["params"] else optimizer._dummy_overflow_buf.device
        for name, dtype in (("lr", torch.float32), ("step", torch.int32)):
            if name not in group:
                continue
            value = group[name]
            if not torch.is_tensor(value):
                value = torch.tensor([value] if name == "step" else value, dtype=dtype)
            group[name] = value.to(device=device, dtype=dtype)


def _is_shared(tensor: Any) -> bool:
    """Whether another tensor shares the whole memory of this one, as those of a DTensor's `state_dict()` do."""
    import torch

    count = getattr(torch._C, "_storage_Use_Count", None)
    if tensor is None or count is None:
        return False
    storage, alone = tensor.untyped_storage(), torch.empty(1).untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.element_size()
    return whole and bool(count(storage._cdata) > count(alone._cdata) + 1)


@functools.cache
def _warn_held() -> None:
    _log.warning(
        "load_state_dict writes into the optimizer's own buffers, and something else holds some of them, such as an "
        "earlier state_dict(): it shows the loaded values now. Copy it before loading, or use "
        "te_patches.apply(in_place_load=False). This is said once."
    )


@contextmanager
def shown(total: int, wanted: bool) -> Iterator[Callable[[int], None] | None]:
    """A progress bar over `total` bytes on stderr."""
    if not wanted or total == 0:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("optimizer states", total=total)
        yield lambda count: bar.advance(task, count)
