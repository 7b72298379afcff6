"""Tensors of more than 2^31 elements."""

from __future__ import annotations

import inspect

import pytest
import te_patches
import torch
from twin import assert_same

EDGE = 8


@pytest.mark.gpu
@pytest.mark.parametrize("numels", [[5, 2**31 + 8, 7], [2**30 + 4, 2**30 + 4]])
def test_gpu_every_element_of_huge_tensors_is_updated(optimizer_class, numels):
    """First, middle and last elements against a small optimizer, and no element left where it was."""
    te_patches.apply()
    options = {"lr": 1e-1, "weight_decay": 0.1, "master_weights": True, "store_param_remainders": True}
    params = [torch.nn.Parameter(torch.randn(n, device="cuda", dtype=torch.bfloat16)) for n in numels]
    places = [torch.tensor(sorted({*range(min(EDGE, n)), n // 2, *range(max(0, n - EDGE), n)})) for n in numels]
    small = [torch.nn.Parameter(p.detach()[at.cuda()].clone()) for p, at in zip(params, places, strict=True)]
    huge, reference = optimizer_class(params, **options), optimizer_class(small, **options)
    for param, part, at in zip(params, small, places, strict=True):
        param.grad = torch.randn_like(param)
        part.grad = param.grad[at.cuda()].clone()
    huge.step()
    inspect.unwrap(optimizer_class.step)(reference)
    for param, part, at in zip(params, small, places, strict=True):
        assert_same([param.detach()[at.cuda()]], [part], "parameter")
        for name, state in reference.state[part].items():
            assert_same([huge.state[param][name][at.cuda()]], [state], name)
        # Gradients are never zero where a step of lr 0.1 would not move the first moment.
        untouched = (huge.state[param]["exp_avg"] == 0) & (param.grad != 0)
        assert not untouched.any()
    assert te_patches.report(huge)["groups"][0]["tier"] == "native"
