"""Counters of groups without parameters, and the other optimizer that shares the applier."""

from __future__ import annotations

import inspect

import pytest
import te_patches
import torch
from te_patches import _releases
from transformer_engine.pytorch.optimizers import FusedAdam, fused_adam

RELEASE = _releases.probe(fused_adam)


def steps(capturable, kernels, **options):
    te_patches.apply(kernels=kernels, **options)
    param = torch.nn.Parameter(torch.ones(5))
    groups = [{"params": []}, {"params": [param]}, {"params": []}]
    optimizer = FusedAdam(groups, capturable=capturable)
    for _ in range(3):
        param.grad = torch.ones(5)
        optimizer.step()
    return [int(group["step"]) if "step" in group else None for group in optimizer.param_groups]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kernels", ["native", "te"])
def test_empty_groups_count_by_the_releases_rule_or_the_later_one(capturable, kernels):
    count = 3 if RELEASE.counts_empty_groups else None
    assert steps(capturable, kernels) == [count, 3, count]
    assert steps(capturable, kernels, count_empty_groups=True) == [3, 3, 3]


def test_empty_tensors_stay_out_of_fused_sgds_kernel_too():
    te_patches.apply()
    sgd = _releases.import_fused_sgd()
    seen = []

    def operation(_chunk, _flag, lists, *_):
        seen.append([len(tensors) for tensors in lists])

    empty, full = torch.empty(0), torch.ones(3)
    sgd.multi_tensor_applier(operation, None, [[full, empty], [full, empty], [full, empty]])
    sgd.multi_tensor_applier(operation, None, [[empty], [empty], [empty]])
    assert seen == [[1, 1, 1]]
    te_patches.revert()
    assert inspect.ismethod(sgd.multi_tensor_applier.__call__)
