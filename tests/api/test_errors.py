"""Bad input is refused by name before anything has changed: parameters, states, counters."""

from __future__ import annotations

import pytest
import te_patches
import torch
from te_patches import _releases

RELEASE = _releases.probe(_releases.import_fused_adam())
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


def build(optimizer_class, *shapes, dtype=FP32, steps=1, **options):
    """Two groups, the last holding the last parameter; stepped, so that there is something to lose."""
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    groups = [{"params": params[:-1]}, {"params": params[-1:]}]
    optimizer = optimizer_class(groups, lr=0.1, use_decoupled_grad=True, **options)
    for _ in range(steps):
        for param in params:
            param.decoupled_grad = torch.randn_like(param)
        optimizer.step()
    for param in params:
        param.decoupled_grad = torch.randn_like(param)
    return params, optimizer


def snapshot(optimizer):
    tensors = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in optimizer.state]
    return tensors, states, [group.get("step") for group in optimizer.param_groups]


def assert_unchanged(optimizer, before):
    now = snapshot(optimizer)
    assert now[2] == before[2]
    assert len(now[1]) == len(before[1])
    for mine, old in zip(now[0], before[0], strict=True):
        assert torch.equal(mine, old)
    for mine, old in zip(now[1], before[1], strict=True):
        assert mine.keys() == old.keys()
        assert all(torch.equal(mine[k], old[k]) for k in mine)


def refused(optimizer, error, *words):
    before = snapshot(optimizer)
    with pytest.raises(error) as caught:
        optimizer.step()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert_unchanged(optimizer, before)


WHERE = "parameter 0 of group 1 (shape [6, 4], torch.float32, cpu)"


@pytest.mark.parametrize("kernels", ["auto", "native", "te"])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("grad", "words"),
    [
        (torch.ones(6, 4).to_sparse(), ["does not support sparse gradients", "sparse=False"]),
        (torch.ones(5, 4), ["another shape", "[5, 4]"]),
        (torch.ones(4, 6), ["another shape", "[4, 6]"]),
        (torch.ones(0, 4), ["another shape", "[0, 4]"]),
        (torch.ones(6, 4, device="meta"), ["gradient"]),
        (torch.ones(6, 4, dtype=torch.float64), ["unsupported dtype", "torch.float64"]),
    ],
    ids=["sparse", "another count", "another shape", "empty", "another device", "unsupported dtype"],
)
def test_bad_gradients(optimizer_class, kernels, steps, grad, words):
    te_patches.apply(kernels=kernels)
    params, optimizer = build(optimizer_class, (3,), (6, 4), steps=steps)
    params[1].decoupled_grad = grad
    refused(optimizer, RuntimeError, WHERE, *words)
    params[1].decoupled_grad = torch.ones(6, 4)
    optimizer.step()


def test_fp16_beside_bf16_in_a_group(optimizer_class):
    te_patches.apply()
    params = [torch.nn.Parameter(torch.ones(3).to(dtype)) for dtype in (BF16, FP32, FP16)]
    optimizer = optimizer_class(params)
    for param in params:
        param.grad = torch.ones_like(param)
    refused(optimizer, RuntimeError, "mix of float16 and bfloat16", "parameter 2 of group 0")
    params[0].grad = None
    optimizer.step()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "master_param"])
@pytest.mark.parametrize(
    ("state", "error"),
    [
        (torch.zeros(6, 4, dtype=torch.float64), AssertionError),
        (torch.zeros(6, 4, dtype=torch.int32), AssertionError),
        (torch.zeros(5, 4), RuntimeError),
        (torch.zeros(6, 4, device="meta"), RuntimeError),
    ],
    ids=["float64", "int32", "another count", "another device"],
)
def test_bad_states(optimizer_class, name, state, error):
    te_patches.apply()
    params, optimizer = build(optimizer_class, (3,), (6, 4), dtype=BF16, master_weights=True)
    optimizer.state[params[1]][name] = state
    before = optimizer.state[params[1]][name]
    with pytest.raises(error) as caught:
        optimizer.step()
    assert f"the {name} of parameter 0 of group 1 (shape [6, 4], torch.bfloat16, cpu)" in str(caught.value)
    assert optimizer.state[params[1]][name] is before
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_an_fp32_master_in_a_remainder_optimizer(optimizer_class):
    te_patches.apply()
    options = {"master_weights": True, "store_param_remainders": True}
    params, optimizer = build(optimizer_class, (3,), (6, 4), dtype=BF16, **options)
    optimizer.state[params[1]]["master_param"] = torch.zeros(6, 4)
    refused(optimizer, AssertionError, "master_param", "torch.int16")


def test_a_missing_state_is_a_key_error(optimizer_class):
    te_patches.apply()
    params, optimizer = build(optimizer_class, (3,), (6, 4))
    del optimizer.state[params[1]]["exp_avg_sq"]
    refused(optimizer, KeyError, "exp_avg_sq", WHERE)


def test_unsupported_parameters(optimizer_class):
    te_patches.apply()
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = optimizer_class([param])
    param.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"fp32, fp16, bf16 and fp8: parameter 0 of group 0 .*float64"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay", "bias_correction"])
def test_a_missing_option_is_a_key_error_and_never_an_old_value(optimizer_class, key):
    te_patches.apply()
    _, optimizer = build(optimizer_class, (3,), (6, 4))
    del optimizer.param_groups[1][key]
    refused(optimizer, KeyError, key)


def test_betas_that_are_not_two(optimizer_class):
    te_patches.apply()
    _, optimizer = build(optimizer_class, (3,), (6, 4))
    optimizer.param_groups[1]["betas"] = (0.9,)
    refused(optimizer, ValueError, "betas")


def test_a_counter_that_is_no_integer(optimizer_class):
    te_patches.apply()
    _, optimizer = build(optimizer_class, (3,), (6, 4))
    optimizer.param_groups[1]["step"] = 1.5
    refused(optimizer, TypeError, "1.5")


@pytest.mark.skipif(not RELEASE.strict_parity, reason="releases before 2.14 take a DTensor beside a plain tensor")
def test_a_dtensor_beside_a_plain_tensor(optimizer_class, shard):
    te_patches.apply()
    params, optimizer = build(optimizer_class, (3,), (6, 4))
    params[1].decoupled_grad = shard(torch.ones(6, 4))
    refused(optimizer, AssertionError, "DTensor Disparity", WHERE, "gradient")
    params[1].decoupled_grad = torch.ones(6, 4)
    state = optimizer.state[params[1]]
    state["exp_avg"] = shard(state["exp_avg"])
    with pytest.raises(AssertionError, match=r"DTensor Disparity.*exp_avg"):
        optimizer.step()


def test_a_released_storage_is_refused(optimizer_class):
    te_patches.apply()
    flat = torch.zeros(30)
    params, optimizer = build(optimizer_class, (3,), (6, 4))
    optimizer.state[params[1]]["exp_avg"] = flat[5:29].view(6, 4)
    flat.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"exp_avg of parameter 0 of group 1 .*no memory"):
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def test_states_that_cannot_be_made_leave_none_behind(optimizer_class, monkeypatch):
    te_patches.apply()
    params, optimizer = build(optimizer_class, (3,), (6, 4), steps=0)
    original = optimizer_class._initialize_state

    def fail(self, param, *args, **kwargs):
        if param is params[1]:
            raise torch.OutOfMemoryError("injected")
        return original(self, param, *args, **kwargs)

    monkeypatch.setattr(optimizer_class, "_initialize_state", fail)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        optimizer.step()
    assert not optimizer.state
    assert all("step" not in group for group in optimizer.param_groups)
    monkeypatch.undo()
    optimizer.step()
