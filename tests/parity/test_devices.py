"""CPU tensors on a machine with a GPU: our kernels take them, stock's must never see them."""

from __future__ import annotations

import pytest
import te_patches
import torch


def train(optimizer_class, device, **options):
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(1000).to(device))
    optimizer = optimizer_class([param], lr=0.1, **options)
    for _ in range(3):
        param.grad = torch.randn(1000).to(device)
        optimizer.step()
    return param.detach().cpu(), optimizer


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("kernels", ["native", "te"])
def test_gpu_machine_cpu_tensors_are_stepped_on_the_cpu(optimizer_class, kernels):
    te_patches.apply(kernels=kernels)
    ours, _ = train(optimizer_class, "cpu")
    theirs, _ = train(optimizer_class, "cuda")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_gpu_machine_cpu_tensors_that_only_stock_serves_are_refused_by_name(optimizer_class):
    te_patches.apply(kernels="te")
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 .* is on cpu"):
        train(optimizer_class, "cpu", exp_avg_dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("what", ["state", "gradient"])
def test_gpu_a_cpu_tensor_beside_a_gpu_parameter_is_refused_by_name(optimizer_class, what):
    te_patches.apply()
    param = torch.nn.Parameter(torch.ones(10, device="cuda"))
    optimizer = optimizer_class([param], use_decoupled_grad=True)
    param.decoupled_grad = torch.ones(10, device="cuda")
    optimizer.step()
    before = param.detach().clone()
    if what == "state":
        optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"].cpu()
    else:
        param.decoupled_grad = torch.ones(10)
    with pytest.raises(RuntimeError, match=r"of parameter 0 of group 0 .*cuda:0\) is not where the parameter is"):
        optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.param_groups[0]["step"] == 1


@pytest.mark.gpu
def test_gpu_tensors_on_both_devices_in_one_group(optimizer_class):
    te_patches.apply()
    params = [torch.nn.Parameter(torch.ones(10, device=device)) for device in ("cuda", "cpu")]
    optimizer = optimizer_class(params, lr=0.1)
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    torch.testing.assert_close(params[0].detach().cpu(), params[1].detach())
    assert bool((params[0] < 1).all())
    assert len(te_patches.report(optimizer)["groups"][0]["kernels"]) == 2
