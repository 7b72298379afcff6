"""Every combination of options steps to stock's bits."""

from __future__ import annotations

import options
import pytest
import te_patches
import torch
from te_patches import _releases
from twin import DEVICE, RAGGED, Twin

RELEASE = _releases.probe(_releases.import_fused_adam())
CASES = options.combinations(RELEASE) if DEVICE == "cuda" else options.few(RELEASE)
STEPS = 20 if DEVICE == "cuda" else 3


def run(combination, shard, steps, **kwargs):
    twin = Twin(combination, wrap=shard if combination.sharded else lambda tensor: tensor, **kwargs)
    for step in range(steps):
        # From the third step on, gradients come and go.
        twin.fill_gradients(lambda at, step=step: step < 2 or (at + step) % 3 != 0)
        twin.step()
    return twin


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("combination", CASES, ids=str)
def test_gpu_steps_equal_stock(combination, shard):
    te_patches.apply()
    twin = run(combination, shard, STEPS)
    groups = te_patches.report(twin.mine)["groups"]
    assert [group["tier"] for group in groups] == ["native", "native"], groups
    assert [group["plans"] for group in groups] == [1, 1], "gradients that come and go were planned anew"


@pytest.mark.parametrize("combination", CASES, ids=str)
def test_cpu_steps_equal_stock(combination, shard):
    te_patches.apply()
    twin = run(combination, shard, STEPS, shapes=RAGGED[:-1])
    groups = te_patches.report(twin.mine)["groups"]
    assert [group["tier"] for group in groups] == ["native", "native"], groups


@pytest.mark.parametrize("combination", CASES[::7], ids=str)
def test_cpu_replay_equals_stock(combination, shard):
    te_patches.apply(kernels="te")
    twin = run(combination, shard, STEPS, shapes=RAGGED[:-1])
    expected = "stock" if combination.capturable else "replay"
    assert {group["tier"] for group in te_patches.report(twin.mine)["groups"]} == {expected}


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("combination", options.few(RELEASE), ids=str)
def test_gpu_replay_equals_stock(combination, shard):
    te_patches.apply(kernels="te")
    twin = run(combination, shard, 4)
    expected = "stock" if combination.capturable else "replay"
    assert {group["tier"] for group in te_patches.report(twin.mine)["groups"]} == {expected}


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("combination", options.few(RELEASE), ids=str)
def test_gpu_native_forced_equals_stock(combination, shard):
    te_patches.apply(kernels="native")
    twin = run(combination, shard, 3)
    assert {group["tier"] for group in te_patches.report(twin.mine)["groups"]} == {"native"}


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("combination", options.few(RELEASE), ids=str)
def test_gpu_special_values_equal_stock(combination, shard):
    te_patches.apply()
    run(combination, shard, 10, special=True, shapes=RAGGED[6:])


def test_many_tensors_and_groups_equal_stock():
    te_patches.apply()
    combination = options.Combination(torch.bfloat16, torch.bfloat16, "remainder", torch.float32)
    twin = Twin(combination, shapes=[((3,), 0)] * 1500, groups=50)
    for _ in range(2):
        twin.fill_gradients()
        twin.step()


@pytest.mark.gpu
def test_gpu_twenty_one_thousand_tensors_equal_stock():
    """Releases before 2.20 do not slice their lists: there the reference itself runs out of handles beyond 13,000."""
    te_patches.apply()
    slices = hasattr(_releases.import_fused_adam(), "_MAX_TENSORS_PER_MULTI_TENSOR_ADAM_CALL")
    combination = options.Combination(torch.bfloat16, torch.bfloat16, "remainder", torch.float32)
    twin = Twin(combination, shapes=[((1,), 0)] * (21_000 if slices else 10_000), groups=1)
    for _ in range(2):
        twin.fill_gradients()
        twin.step()
    assert te_patches.report(twin.mine)["groups"][0]["launches"] < 100
