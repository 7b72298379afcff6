"""The update of Adam against torch's in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from te_patches import _core


@pytest.mark.parametrize("adam_w", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_the_reference_follows_adam_in_double_precision(adam_w, bias_correction):
    rng = np.random.default_rng(7)
    grad, param, exp_avg = (rng.standard_normal(4097).astype(np.float32) for _ in range(3))
    exp_avg_sq = rng.random(4097).astype(np.float32)
    lr, betas, eps, weight_decay, step = 1e-2, (0.9, 0.95), 1e-8, 0.1, 3
    new_param, new_avg, new_sq = _core.adam_reference(
        grad, param, exp_avg, exp_avg_sq, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=step,
        bias_correction=bias_correction, adam_w=adam_w,
    )  # fmt: skip
    g, p, m, v = (array.astype(np.float64) for array in (grad, param, exp_avg, exp_avg_sq))
    if not adam_w:
        g = g + weight_decay * p
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    c1, c2 = (1 - betas[0] ** step, 1 - betas[1] ** step) if bias_correction else (1, 1)
    update = m / c1 / (np.sqrt(v / c2) + eps) + (weight_decay * p if adam_w else 0)
    np.testing.assert_allclose(new_avg, m, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(new_sq, v, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(new_param, p - lr * update, rtol=2e-6, atol=1e-6)


def test_lists_on_the_cpu_follow_the_reference_bit_for_bit():
    torch.manual_seed(3)
    lists = [[torch.randn(n)] for n in (5000, 5000, 5000)] + [[torch.rand(5000)]]
    expected = _core.adam_reference(
        *(tensors[0].numpy() for tensors in lists), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=2
    )
    _core.multi_tensor_adam(lists, 1e-2, 0.9, 0.95, 1e-8, 2, 1, 1, 0.1, "none")
    for tensors, array in zip(lists[1:], expected, strict=True):
        assert torch.equal(tensors[0].view(torch.int32), torch.from_numpy(array).view(torch.int32))


def test_arrays_of_unequal_lengths_are_refused():
    short, long = np.zeros(3, np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="lengths"):
        _core.adam_reference(short, long, short, short, lr=1, betas=(0.9, 0.9), eps=1, weight_decay=0, step=1)
