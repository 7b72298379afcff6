"""Megatron-LM's ways with the optimizer, call for call: its distributed optimizer rebinds groups to detached views,
loads scaffolds and fills them state by state; its names are bound before anything is patched.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import te_patches
import torch
from te_patches import _releases
from transformer_engine.pytorch.optimizers import FusedAdam as Adam
from transformer_engine.pytorch.optimizers import fused_adam
from twin import DEVICE, assert_same

RELEASE = _releases.probe(fused_adam)
PRECISION_AWARE = {
    "master_weights": True,
    "use_decoupled_grad": True,
    "store_param_remainders": True,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.bfloat16,
}
SIDES = ("patched", "stock")


class DistributedOptimizer:
    """One rank's share of a model in one flat buffer, stepped as Megatron steps it."""

    def __init__(self, side):
        self.stock = {name: inspect.unwrap(getattr(Adam, name)) for name in ("step", "load_state_dict")}
        self.side = side
        torch.manual_seed(7)
        self.buffer = torch.randn(4096, device=DEVICE).bfloat16()
        self.model = [torch.nn.Parameter(self.buffer[at : at + 1024].view(32, 32)) for at in range(0, 4096, 1024)]
        self.inner = Adam(
            [{"params": self.model[:2]}, {"params": self.model[2:], "weight_decay": 0.1}], **PRECISION_AWARE
        )
        # The groups are rebound to views of shards, which are no Parameters.
        shards = [param.detach().view(-1)[16:1000] for param in self.model]
        self.inner.param_groups[0]["params"] = shards[:2]
        self.inner.param_groups[1]["params"] = shards[2:]
        self.shards = shards
        self.load(self.inner.state_dict())

    def load(self, saved):
        if self.side == "patched":
            self.inner.load_state_dict(saved)
        else:
            self.stock["load_state_dict"](self.inner, saved)

    def step(self, grads):
        for shard, grad in zip(self.shards, grads, strict=True):
            shard.decoupled_grad = grad.clone()[16:1000]
        if self.side == "patched":
            self.inner.step()
        else:
            self.stock["step"](self.inner)

    def restore(self, tensors, step):
        """Scaffold, fill, load once more, as a resume does."""
        saved = self.inner.state_dict()
        saved["state"] = {
            index: {
                "exp_avg": torch.empty(shard.shape, device=DEVICE),
                "exp_avg_sq": torch.empty(shard.shape, device=DEVICE),
                "master_param": torch.empty(shard.shape, dtype=torch.int16, device=DEVICE),
            }
            for index, shard in enumerate(self.shards)
        }
        for group in saved["param_groups"]:
            group["step"] = step
        self.load(saved)
        for shard, values in zip(self.shards, tensors, strict=True):
            for name, value in values.items():
                self.inner.set_scaled_state(shard, name, value.clone())
        self.load(self.inner.state_dict())

    def tensors(self):
        return [
            {name: self.inner.get_unscaled_state(shard, name).clone() for name in self.inner.state[shard]}
            for shard in self.shards
        ]


def gradients(count, seed):
    torch.manual_seed(seed)
    return [torch.randn(1024, device=DEVICE) for _ in range(count)]


def check():
    te_patches.apply()
    both = [DistributedOptimizer(side) for side in SIDES]

    def compare():
        assert_same([both[0].buffer], [both[1].buffer], "parameters")
        for mine, stock in zip(*(one.shards for one in both), strict=True):
            states = [one.inner.state[shard] for one, shard in zip(both, (mine, stock), strict=True)]
            assert states[0].keys() == states[1].keys()
            for name in states[0]:
                assert_same([states[0][name]], [states[1][name]], name)
        assert [g["step"] for g in both[0].inner.param_groups] == [g["step"] for g in both[1].inner.param_groups]

    for seed in range(3):
        for one in both:
            one.step(gradients(4, seed))
        compare()
    kept = both[1].tensors()
    for one in both:
        one.step(gradients(4, 9))
        one.restore(kept, 3)
    compare()
    for seed in range(3, 6):
        for one in both:
            # The buffer is released and comes back elsewhere, as between the phases of reinforcement learning.
            values = one.buffer.clone().cpu()
            one.buffer.untyped_storage().resize_(0)
            junk = torch.zeros(5000, device=DEVICE)
            one.buffer.untyped_storage().resize_(2 * 4096)
            one.buffer.copy_(values)
            one.step(gradients(4, seed))
            del junk
        compare()
    assert {group["tier"] for group in te_patches.report(both[0].inner)["groups"]} == {"native"}


def test_cpu_the_distributed_optimizer_trains_and_resumes_as_with_stock():
    check()


@pytest.mark.gpu
def test_gpu_the_distributed_optimizer_trains_and_resumes_as_with_stock():
    check()


def test_states_are_made_read_and_written_directly():
    """On the signatures of the installed release: Megatron drives these by itself."""
    te_patches.apply()
    param = torch.nn.Parameter(torch.randn(33, device=DEVICE).bfloat16())
    optimizer = Adam([param], **PRECISION_AWARE)
    with pytest.raises(TypeError):
        optimizer.initialize_state(param)
    optimizer.initialize_state(param, True)
    values = torch.randn(33, device=DEVICE)
    optimizer.set_scaled_state(param, "exp_avg", values.clone())
    assert torch.equal(optimizer.get_unscaled_state(param, "exp_avg"), values.bfloat16().float())
    with pytest.raises(AttributeError):
        optimizer.set_scaled_state(param, "padding", False)
    del optimizer.state[param]["exp_avg"]
    optimizer.set_scaled_state(param, "exp_avg", values.clone())
    twin = torch.nn.Parameter(param.detach().clone())
    stock = Adam([twin], **PRECISION_AWARE)
    stock.initialize_state(twin, True)
    stock.set_scaled_state(twin, "exp_avg", values.clone())
    for p in (param, twin):
        p.decoupled_grad = values * 2
    optimizer.step()
    inspect.unwrap(Adam.step)(stock)
    assert_same([param], [twin], "parameter")


def test_a_param_replaced_by_its_fp32_clone_takes_its_state_along():
    """Float16OptimizerWithFloat16Params: the group's entry becomes an fp32 clone, and the state moves to it."""
    te_patches.apply()
    sides = []
    for side in SIDES:
        torch.manual_seed(1)
        param = torch.nn.Parameter(torch.randn(65, device=DEVICE).bfloat16())
        optimizer = Adam([param])
        step = optimizer.step if side == "patched" else (lambda o=optimizer: inspect.unwrap(Adam.step)(o))
        param.grad = torch.randn(65, device=DEVICE).bfloat16()
        step()
        main = param.detach().clone().float()
        optimizer.param_groups[0]["params"][0] = main
        optimizer.state[main] = optimizer.state.pop(param)
        for _ in range(2):
            main.grad = torch.randn(65, device=DEVICE)
            step()
        sides.append((main, optimizer))
    assert_same([sides[0][0]], [sides[1][0]], "parameter")
    assert sides[0][1].param_groups[0]["step"] == sides[1][1].param_groups[0]["step"] == 3


def test_a_bridge_that_adopts_the_callers_tensors_and_then_leaves():
    """Megatron-Bridge: an instance's load_state_dict goes to torch's own loader, so the scaffold becomes the state."""
    te_patches.apply()
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(17, device=DEVICE)) for _ in range(2)]
    optimizer = Adam(params)
    scaffold = {
        "state": {at: {n: torch.randn(17, device=DEVICE).abs() for n in ("exp_avg", "exp_avg_sq")} for at in (0, 1)},
        "param_groups": [{**copy.deepcopy(optimizer.state_dict()["param_groups"][0]), "step": 4}],
    }
    optimizer.load_state_dict = lambda saved: torch.optim.Optimizer.load_state_dict(optimizer, saved)
    optimizer.load_state_dict(scaffold)
    del optimizer.load_state_dict
    assert optimizer.state[params[0]]["exp_avg"] is scaffold["state"][0]["exp_avg"]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert [g["tier"] for g in te_patches.report(optimizer)["groups"]] == ["native"]
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert te_patches.report(optimizer)["load"]["in_place"] == 4
    assert optimizer.param_groups[0]["step"] == 5
