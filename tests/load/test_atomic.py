"""A load that is refused leaves no trace: every state in turn is spoilt in every way, and training goes on as if the
load had never been tried.
"""

from __future__ import annotations

import copy

import pytest
import te_patches
import torch
from storages import STORAGES, assert_unchanged, every_storage, goes_on, snapshot, taken, trained
from te_patches import _load


class Weird:
    """No tensor."""


FAULTS = {
    "another shape": (RuntimeError, lambda value: torch.zeros(3, 11, 2, dtype=value.dtype, device=value.device)),
    "a shape that broadcasts": (RuntimeError, lambda value: torch.ones(1, 1, 1, 1, dtype=value.dtype)),
    "another element count": (RuntimeError, lambda value: value.new_zeros(value.numel() + 1)),
    "integers": (AssertionError, lambda value: value.to(torch.int32)),
    "complex numbers": (AssertionError, lambda value: value.to(torch.complex64)),
    "no tensor": (TypeError, lambda _: Weird()),
    "a number": (TypeError, lambda _: 1.5),
    "sparse": (RuntimeError, lambda value: torch.zeros(value.shape).to_sparse() if value.dim() else value.new_ones(2)),
}


# Every fault in storages that are read in different ways, and one fault in all.
SPOILT = [(storage, fault) for storage in ("remainder", "fp16-moments") for fault in FAULTS]
SPOILT += [(storage, "another shape") for storage in taken() if (storage, "another shape") not in SPOILT]


@pytest.mark.parametrize(("storage", "fault"), SPOILT)
def test_a_spoilt_state_is_named_and_nothing_has_changed(storage, fault):
    te_patches.apply()
    error, spoil = FAULTS[fault]
    twin = trained(storage)
    good = copy.deepcopy(trained(storage, seed=1).stock.state_dict())
    before, states = snapshot(twin.mine), dict(twin.mine.state)
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in twin.mine.param_groups])
    keys = [(key, name) for key, values in good["state"].items() for name in values]
    for key, name in keys:
        bad = {"state": {k: dict(v) for k, v in good["state"].items()}, "param_groups": good["param_groups"]}
        bad["state"][key][name] = spoil(good["state"][key][name])
        with pytest.raises(error, match=rf"saved {name} of parameter \d+ of group \d+"):
            twin.mine.load_state_dict(bad)
        assert [{k: v for k, v in g.items() if k != "params"} for g in twin.mine.param_groups] == groups
        assert all(twin.mine.state[param] is value for param, value in states.items())
    assert_unchanged(twin.mine, before)
    assert not twin.mine._optimizer_load_state_dict_pre_hooks
    assert not twin.mine._optimizer_load_state_dict_post_hooks
    goes_on(twin)


@every_storage
def test_a_buffer_that_cannot_be_made_leaves_no_trace(storage, monkeypatch):
    """Out of memory at each allocation in turn, in an optimizer that never stepped."""
    te_patches.apply()
    good = copy.deepcopy(trained(storage, seed=1).stock.state_dict())
    twin = trained(storage, steps=0)
    initialize = type(twin.mine)._initialize_state
    count = sum(len(values) for values in good["state"].values())
    for fatal in range(count):
        left = fatal

        def failing(*arguments, **options):
            nonlocal left
            if left == 0:
                raise torch.OutOfMemoryError("injected")
            left -= 1
            return initialize(*arguments, **options)

        monkeypatch.setattr(type(twin.mine), "_initialize_state", failing)
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            twin.mine.load_state_dict(good)
        monkeypatch.undo()
        assert not twin.mine.state
        assert not twin.mine._scales
        assert "step" not in twin.mine.param_groups[0]
    twin.fill_gradients()
    twin.step()


def test_groups_that_do_not_match_are_torchs_errors():
    te_patches.apply()
    twin = trained("fp32")
    before = snapshot(twin.mine)
    for spoil in (lambda groups: groups[:1], lambda groups: [groups[0], {**groups[1], "params": [0]}]):
        saved = twin.mine.state_dict()
        saved["param_groups"] = spoil(saved["param_groups"])
        with pytest.raises(ValueError, match="loaded state dict"):
            twin.mine.load_state_dict(saved)
    assert_unchanged(twin.mine, before)
    goes_on(twin)


def test_a_state_that_fused_adam_does_not_keep_is_stocks_keyerror():
    te_patches.apply()
    twin = trained("bf16-master")
    before = snapshot(twin.mine)
    saved = copy.deepcopy(twin.mine.state_dict())
    saved["state"][3]["momentum_buffer"] = saved["state"][3]["exp_avg"]
    with pytest.raises(KeyError, match="momentum_buffer"):
        twin.mine.load_state_dict(saved)
    assert_unchanged(twin.mine, before)
    goes_on(twin)


@pytest.mark.parametrize(("into", "of"), [("bf16-master", "remainder"), ("remainder", "bf16-master")])
def test_remainders_and_masters_are_not_taken_for_each_other(into, of):
    """Stock installs the integers of remainders as weights."""
    te_patches.apply()
    twin = trained(into)
    before = snapshot(twin.mine)
    saved = copy.deepcopy(trained(of, seed=1).stock.state_dict())
    with pytest.raises(AssertionError, match=r"master_param of parameter 0 of group 0.*store_param_remainders"):
        twin.mine.load_state_dict(saved)
    assert_unchanged(twin.mine, before)
    goes_on(twin)


def test_a_load_during_a_capture_is_refused(monkeypatch):
    te_patches.apply()
    twin = trained("remainder")
    before = snapshot(twin.mine)
    monkeypatch.setattr(_load, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"):
        twin.mine.load_state_dict(copy.deepcopy(twin.mine.state_dict()))
    assert_unchanged(twin.mine, before)
    monkeypatch.undo()
    goes_on(twin)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_that_raises_leaves_no_hook_behind(when):
    te_patches.apply()
    twin = trained("remainder")

    def hook(*_):
        raise RuntimeError("the hook's own")

    handle = getattr(twin.mine, f"register_load_state_dict_{when}_hook")(hook)
    before = snapshot(twin.mine)
    with pytest.raises(RuntimeError, match="the hook's own"):
        twin.mine.load_state_dict(twin.mine.state_dict())
    handle.remove()
    assert not twin.mine._optimizer_load_state_dict_pre_hooks
    assert not twin.mine._optimizer_load_state_dict_post_hooks
    assert_unchanged(twin.mine, before)
    goes_on(twin)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_gpu_a_spoilt_state_is_named_and_nothing_has_changed(storage):
    test_a_spoilt_state_is_named_and_nothing_has_changed(storage, "another shape")
