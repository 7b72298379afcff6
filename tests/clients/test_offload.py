"""Reinforcement learning with states, parameters and buffers that leave the device between steps (NeMo-RL, verl, slime,
Megatron's offloaders).
"""

from __future__ import annotations

import copy

import pytest
import te_patches
import torch
from client import RELEASE, compare, everywhere, states
from transformer_engine.pytorch.optimizers import FusedAdam
from twin import DEVICE

RL = {
    "lr": 1e-2,
    "master_weights": True,
    "store_param_remainders": True,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.bfloat16,
}
SHAPES = ((33, 64), (7,), (257,), (4097,))


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def junk() -> list[torch.Tensor]:
    """Memory of every size that was just freed, full of garbage."""
    return [torch.full((size,), float("nan"), device=DEVICE) for size in (7, 257, 2112, 4097) for _ in range(4)]


@everywhere
def test_states_move_slot_by_slot_and_their_memory_is_free_meanwhile(machine):
    def sequence(run):
        params = run.params(*SHAPES)
        optimizer = FusedAdam(params, **RL)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(3):
            run.fill(params)
            optimizer.step()
            scheduler.step()
            run.note(optimizer)
            before = allocated()
            size = sum(slots[name].untyped_storage().nbytes() for slots, name in states(optimizer))
            for slots, name in states(optimizer):
                slots[name] = slots[name].to("cpu", copy=True)
            assert DEVICE == "cpu" or allocated() <= before - size, "something still holds the states"
            held = junk()
            for slots, name in states(optimizer):
                slots[name] = slots[name].to(DEVICE, copy=True, non_blocking=True)
            del held
            run.step(optimizer, params)
        return optimizer

    compare(sequence)


@everywhere
def test_one_flat_buffer_of_masters_and_states_is_resized_away_and_back(machine):
    """verl and Megatron: views into flat fp32 buffers, storages resized to nothing and revived elsewhere."""

    def sequence(run):
        sizes = (2112, 7, 257, 4097)
        flat = run.random((sum(sizes),))
        params = [piece.view(-1) for piece in flat.split(sizes)]
        optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1)
        for _ in range(4):
            run.step(optimizer, params)
            tensors = [flat, *(slots[name] for slots, name in states(optimizer))]
            kept = [(tensor, tensor.to("cpu", copy=True), tensor.untyped_storage().nbytes()) for tensor in tensors]
            for tensor, _, _ in kept:
                tensor.untyped_storage().resize_(0)
            held = junk()
            for tensor, values, size in kept:
                tensor.untyped_storage().resize_(size)
                tensor.copy_(values)
            del held
        run.step(optimizer, params)
        return optimizer

    compare(sequence)


@everywhere
@pytest.mark.skipif(not RELEASE.shards_states, reason="stock loses the sharding of states before 2.14")
def test_a_model_of_dtensors_leaves_and_comes_back(machine, shard):
    """`model.to` swaps DTensor parameters, and refuses those that anything else holds."""

    def sequence(run):
        model = torch.nn.ParameterList(
            [torch.nn.Parameter(shard(run.random(shape, torch.bfloat16))) for shape in SHAPES]
        )
        optimizer = FusedAdam(model.parameters(), **RL)
        for _ in range(3):
            run.step(optimizer, list(model.parameters()), wrap=shard)
            optimizer.zero_grad()
            before = allocated()
            size = sum(param._local_tensor.untyped_storage().nbytes() for param in model.parameters())
            model._apply(lambda tensor: tensor.to("cpu", copy=True))
            assert DEVICE == "cpu" or allocated() <= before - size, "something still holds the parameters"
            held = junk()
            model._apply(lambda tensor: tensor.to(DEVICE, copy=True))
            del held
        run.step(optimizer, list(model.parameters()), wrap=shard)
        return optimizer

    compare(sequence)


@everywhere
@pytest.mark.parametrize("gone", ["on the CPU", "released"])
def test_a_load_while_states_are_away_puts_them_beside_their_parameters(machine, gone):
    def sequence(run):
        params = run.params(*SHAPES)
        optimizer = FusedAdam(params, **RL)
        run.step(optimizer, params)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"] = {
            at: {name: value.cpu() for name, value in values.items()} for at, values in saved["state"].items()
        }
        run.fill(params)
        optimizer.step()
        for slots, name in states(optimizer):
            if gone == "released":
                slots[name].untyped_storage().resize_(0)
            else:
                slots[name] = slots[name].cpu()
        optimizer.load_state_dict(saved)
        places = {slots[name].device.type for slots, name in states(optimizer)}
        assert places == {DEVICE}
        run.note(optimizer)
        run.step(optimizer, params)
        return optimizer

    compare(sequence)


@pytest.mark.gpu
def test_gpu_a_load_while_states_are_away_needs_no_second_copy_of_them():
    te_patches.apply()
    params = [torch.nn.Parameter(torch.randn(1 << 24, device="cuda").bfloat16()) for _ in range(8)]
    optimizer = FusedAdam(params, master_weights=True, store_param_remainders=True)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    saved = te_patches.state_dict_cpu(optimizer)
    size = sum(slots[name].nbytes for slots, name in states(optimizer))
    largest = max(slots[name].nbytes for slots, name in states(optimizer))
    for slots, name in states(optimizer):
        slots[name] = slots[name].cpu()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.load_state_dict(saved)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= size + largest


@everywhere
def test_states_are_reset_in_place_before_a_rollout(machine):
    """slime: the counter to 0 and the moments zeroed where they are."""

    def sequence(run):
        params = run.params(*SHAPES)
        optimizer = FusedAdam(params, **RL)
        for _ in range(3):
            for _ in range(2):
                run.step(optimizer, params)
            for group in optimizer.param_groups:
                group["step"] = 0
            for slots, name in states(optimizer):
                if name != "master_param":
                    slots[name].zero_()
        run.step(optimizer, params)
        return optimizer

    compare(sequence)
