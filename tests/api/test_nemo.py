"""NeMo Automodel's own patches beside ours, before and after, once and twice: its 0.7.0 from the package index, and a
stand-in for later releases that patch step and load_state_dict themselves.
"""

from __future__ import annotations

import copy
import importlib
import sys
from types import FunctionType

import pytest
import te_patches
import te_release
import torch
from te_patches import _releases
from transformer_engine.pytorch.optimizers import FusedAdam, fused_adam

RELEASE = _releases.probe(fused_adam)
NAMES = ("step", "load_state_dict", "_initialize_state", "get_unscaled_state", "set_scaled_state", "state_dict")


def originals():
    return {name: vars(FusedAdam)[name] for name in NAMES}, fused_adam.multi_tensor_applier


@pytest.fixture
def nemo(monkeypatch):
    """NeMo's module, fresh, which finds Transformer Engine as this process has it; what it patches is put back."""
    monkeypatch.syspath_prepend(str(te_release.fetch("0.7.0", "nemo-automodel")))
    methods, applier = originals()
    module = importlib.import_module("nemo_automodel.shared.te_patches")
    tools = importlib.import_module("nemo_automodel.shared.import_utils")
    version = tuple(int(part) for part in te_release.chosen().split("."))
    monkeypatch.setattr(
        tools, "is_te_min_version", lambda wanted: version >= tuple(int(part) for part in wanted.split("."))
    )
    monkeypatch.setattr(tools, "safe_import_te", lambda: (True, sys.modules["transformer_engine"]))
    monkeypatch.setattr(module, "_TE_PATCHES_APPLIED", False)
    yield module
    te_patches.revert()
    for name, method in methods.items():
        setattr(FusedAdam, name, method)
    fused_adam.multi_tensor_applier = applier


def train(shard):
    """Three steps of sharded parameters, the last of them empty, as all tests here take them."""
    torch.manual_seed(2)
    shapes = [(5, 3)] * 40 + [(0, 3)]
    params = [torch.nn.Parameter(shard(torch.randn(shape).bfloat16())) for shape in shapes]
    optimizer = FusedAdam(params, lr=0.1, master_weights=True, store_param_remainders=True)
    for _ in range(3):
        for param in params:
            param.grad = shard(torch.randn(param._local_tensor.shape).bfloat16())
        optimizer.step()
    return params, optimizer


def check(shard, expected):
    params, optimizer = train(shard)
    report = te_patches.report(optimizer)
    assert report["reached"]
    assert [group["tier"] for group in report["groups"]] == ["native"]
    for mine, theirs in zip(params, expected, strict=True):
        assert torch.equal(mine._local_tensor, theirs._local_tensor)
    for param in params:
        assert all(state._local_tensor.shape == param._local_tensor.shape for state in optimizer.state[param].values())
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert te_patches.report(optimizer)["load"]["in_place"] > 0


def filters(function):
    """How many filters an applier has before it reaches Transformer Engine's."""
    count = 0
    while isinstance(function, FunctionType):
        count += 1
        inner = [cell.cell_contents for cell in function.__closure__ or () if callable(cell.cell_contents)]
        function = inner[0] if inner else None
    return count


@pytest.mark.parametrize("order", ["nemo ours", "ours nemo", "nemo nemo ours ours", "ours nemo ours nemo"])
def test_nemos_patches_and_ours_in_any_order(nemo, shard, order):
    te_patches.apply()
    expected, _ = train(shard)
    te_patches.revert()
    before = originals()
    for who in order.split():
        if who == "ours":
            te_patches.apply()
        else:
            nemo.apply_te_patches()
    check(shard, expected)
    assert filters(fused_adam.multi_tensor_applier) <= 1
    theirs_first = order.startswith("nemo")
    if not theirs_first and not RELEASE.shards_states:
        # It recognises ours as a fixed method.
        assert vars(FusedAdam)["_initialize_state"].__module__ != nemo.__name__
    te_patches.revert()
    methods, _ = originals()
    for name in ("step", "load_state_dict"):
        assert methods[name] is before[0][name]
    if theirs_first:
        # Its other patch is for releases from 2.10, where it finds QuantizedTensor, to 2.11.
        kept = "_initialize_state" if te_release.chosen() == "2.11.0" else None
        assert kept is None or methods[kept].__module__ == nemo.__name__
        assert fused_adam.multi_tensor_applier._nemo_empty_shard_patch


def later_release(calls):
    """What a later NeMo does, by its documented names: a plan per group around step, and an in-place load."""
    scope = {"__name__": "nemo_automodel.shared.te_patches", "FusedAdam": FusedAdam, "calls": calls}
    code = """
def apply_te_patches():
    step, load = FusedAdam.step, FusedAdam.load_state_dict

    def planned_step(self, closure=None, grad_scaler=None):
        calls.append("step")
        return step(self, closure, grad_scaler)

    def load_state_dict(self, state_dict):
        calls.append("load")
        return load(self, state_dict)

    FusedAdam.step, FusedAdam.load_state_dict = planned_step, load_state_dict
"""
    exec(code, scope)
    return scope["apply_te_patches"]


@pytest.mark.parametrize("order", ["nemo ours", "ours nemo ours", "nemo ours nemo ours"])
def test_later_releases_of_nemo_that_patch_step_and_load(nemo, shard, order):
    te_patches.apply()
    expected, _ = train(shard)
    te_patches.revert()
    calls: list[str] = []
    apply_theirs = later_release(calls)
    for who in order.split():
        apply_theirs() if who == "nemo" else te_patches.apply()
    check(shard, expected)
    # Ours served, not theirs.
    assert calls == []
    te_patches.revert()
    assert vars(FusedAdam)["step"].__name__ == "planned_step"
    params, optimizer = train(shard)
    assert "step" in calls
    assert not te_patches.report(optimizer)["applied"]
    for mine, theirs in zip(params[:40], expected, strict=False):
        assert mine._local_tensor.shape == theirs._local_tensor.shape


def test_theirs_over_ours_goes_on_through_ours(nemo, shard):
    te_patches.apply()
    expected, _ = train(shard)
    calls: list[str] = []
    later_release(calls)()
    params, optimizer = train(shard)
    assert calls == ["step"] * 3
    assert [group["tier"] for group in te_patches.report(optimizer)["groups"]] == ["native"]
    for mine, theirs in zip(params, expected, strict=True):
        assert torch.equal(mine._local_tensor, theirs._local_tensor)
    te_patches.revert()
    assert vars(FusedAdam)["step"].__name__ == "planned_step"
