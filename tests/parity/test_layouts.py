"""Memory orders: kernels pair elements by their place in memory, which must be their place in the tensor."""

from __future__ import annotations

import pytest
import te_patches
import torch
from twin import DEVICE, assert_same

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def pair(optimizer_class, values, layout, grad_layout, **options):
    """One optimizer over `layout(values)`, one over contiguous values, same gradients in either order."""
    param = torch.nn.Parameter(layout(values.clone()))
    plain = torch.nn.Parameter(values.clone())
    mine, reference = (optimizer_class([p], **OPTIONS, **options) for p in (param, plain))
    for _ in range(3):
        grad = torch.randn(values.shape, device=DEVICE).to(values.dtype)
        with torch.no_grad():
            param.grad, plain.grad = grad_layout(grad), grad.clone()
        mine.step()
        reference.step()
        assert_same([param.detach().contiguous()], [plain.detach()], "parameter")
        for name, state in reference.state[plain].items():
            assert_same([mine.state[param][name].contiguous()], [state], name)
    return mine


def channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last)


def transposed(tensor):
    return tensor.t().contiguous().t()


def sliced(tensor):
    wide = torch.randn(*tensor.shape[:-1], 2 * tensor.shape[-1], device=tensor.device).to(tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def same(tensor):
    return tensor


CASES = {
    "channels_last parameter, contiguous gradient": ((8, 4, 3, 3), channels_last, same),
    "channels_last both": ((8, 4, 3, 3), channels_last, channels_last),
    "contiguous parameter, channels_last gradient": ((8, 4, 3, 3), same, channels_last),
    "transposed parameter, contiguous gradient": ((17, 33), transposed, same),
    "transposed both": ((17, 33), transposed, transposed),
    "gradient with gaps": ((17, 33), same, sliced),
    "size-one dimension with another stride": ((2, 1, 100), same, lambda g: g.as_strided((2, 1, 100), (100, 1, 1))),
}


def check(optimizer_class, case, options, dtype):
    te_patches.apply()
    shape, layout, grad_layout = CASES[case]
    values = torch.randn(shape, device=DEVICE).to(dtype)
    mine = pair(optimizer_class, values, layout, grad_layout, **options)
    assert te_patches.report(mine)["groups"][0]["tier"] == "native"


REMAINDER = {"master_weights": True, "store_param_remainders": True}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("options", "dtype"), [({}, torch.float32), (REMAINDER, torch.bfloat16)])
def test_cpu_elements_are_paired_by_their_place_in_the_tensor(optimizer_class, case, options, dtype):
    check(optimizer_class, case, options, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("options", "dtype"), [({}, torch.float32), (REMAINDER, torch.bfloat16)])
def test_gpu_elements_are_paired_by_their_place_in_the_tensor(optimizer_class, case, options, dtype):
    check(optimizer_class, case, options, dtype)


def check_expanded(optimizer_class):
    te_patches.apply()
    params = [torch.nn.Parameter(torch.ones(4096, device=DEVICE)) for _ in range(2)]
    mine, reference = (optimizer_class([p], use_decoupled_grad=True, **OPTIONS) for p in params)
    grad = torch.full((1,), 0.5, device=DEVICE)
    params[0].decoupled_grad, params[1].decoupled_grad = grad.expand(4096), grad.repeat(4096)
    mine.step()
    reference.step()
    assert_same([params[0]], [params[1]], "parameter")


def test_cpu_an_expanded_gradient_is_read_within_its_bounds(optimizer_class):
    check_expanded(optimizer_class)


@pytest.mark.gpu
def test_gpu_an_expanded_gradient_is_read_within_its_bounds(optimizer_class):
    check_expanded(optimizer_class)
