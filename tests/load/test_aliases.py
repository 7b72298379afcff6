"""Sources that are live buffers, buffers that somebody else holds, buffers that are gone."""

from __future__ import annotations

import copy
import logging

import pytest
import te_patches
import torch
from storages import addresses, every_storage, goes_on, load, trained
from te_patches import _load
from twin import DEVICE, assert_same, bits


@every_storage
def test_loading_ones_own_state_dict_changes_nothing_but_roundings(storage):
    te_patches.apply()
    twin = trained(storage)
    before = addresses(twin.mine)
    load(twin, twin.mine.state_dict(), twin.stock.state_dict())
    assert addresses(twin.mine) == before
    goes_on(twin)


@every_storage
def test_states_permuted_among_parameters_load_as_stocks(storage):
    """The sources are the buffers, each of another parameter."""
    te_patches.apply()
    twin = trained(storage, groups=1)
    shapes = [tuple(p.shape) for p in twin.params[0]]
    twin = trained(storage, groups=1)
    permuted = []
    for optimizer in (twin.mine, twin.stock):
        saved = optimizer.state_dict()
        alike = [key for key in saved["state"] if shapes[key] == shapes[0]]
        states = dict(saved["state"])
        for key, other in zip(alike, alike[1:] + alike[:1], strict=True):
            states[key] = saved["state"][other]
        # Names swapped as well: exp_avg_sq of what was exp_avg.
        states[5] = {
            **states[5],
            "exp_avg": saved["state"][5]["exp_avg_sq"],
            "exp_avg_sq": saved["state"][5]["exp_avg"],
        }
        permuted.append({**saved, "state": states})
    load(twin, permuted[0], permuted[1])
    settle = [bits(state).clone() for name in ("exp_avg", "exp_avg_sq") for state in twin.states(1, name)]
    assert_same([s for name in ("exp_avg", "exp_avg_sq") for s in map(bits, twin.states(0, name))], settle, "state")


@every_storage
def test_one_dict_into_two_optimizers_gives_each_its_own_buffers(storage):
    te_patches.apply()
    saved = copy.deepcopy(trained(storage, seed=1).stock.state_dict())
    twins = [trained(storage), trained(storage, steps=0)]
    twins[1].fill_gradients()
    for twin in twins:
        load(twin, saved)
    assert not set(addresses(twins[0].mine).values()) & set(addresses(twins[1].mine).values()) - {0}
    for twin in twins:
        goes_on(twin)


def test_a_held_state_dict_shows_what_is_loaded_and_that_is_said_once(caplog):
    te_patches.apply()
    _load._warn_held.cache_clear()
    twin = trained("fp32")
    earlier = twin.mine.state_dict()
    other = copy.deepcopy(trained("fp32", seed=1).stock.state_dict())
    with caplog.at_level(logging.WARNING, logger="te_patches"):
        load(twin, other)
        load(twin, other)
    assert sum("something else holds" in record.message for record in caplog.records) == 1
    assert torch.equal(earlier["state"][4]["exp_avg"], other["state"][4]["exp_avg"])
    goes_on(twin)


def test_nothing_is_said_where_nothing_is_held(caplog):
    te_patches.apply()
    _load._warn_held.cache_clear()
    twin = trained("remainder")
    other = copy.deepcopy(trained("remainder", seed=1).stock.state_dict())
    with caplog.at_level(logging.WARNING, logger="te_patches"):
        load(twin, other)
        load(twin, twin.mine.state_dict(), twin.stock.state_dict())
    assert not caplog.records


def test_a_held_state_dict_of_dtensors_is_noticed(shard, caplog):
    te_patches.apply()
    _load._warn_held.cache_clear()
    twin = trained("fp32", wrap=shard)
    earlier = twin.mine.state_dict()
    other = copy.deepcopy(trained("fp32", seed=1, wrap=shard).stock.state_dict())
    with caplog.at_level(logging.WARNING, logger="te_patches"):
        load(twin, other)
    assert sum("something else holds" in record.message for record in caplog.records) == 1
    del earlier


@every_storage
def test_the_switch_keeps_held_state_dicts_as_they_were(storage):
    te_patches.apply(in_place_load=False)
    twin = trained(storage)
    earlier, kept = twin.mine.state_dict(), copy.deepcopy(twin.mine.state_dict())
    load(twin, copy.deepcopy(trained(storage, seed=1).stock.state_dict()))
    for key, values in kept["state"].items():
        assert_same([earlier["state"][key][name] for name in values], list(values.values()), "a held tensor")
    assert te_patches.report(twin.mine)["load"]["in_place"] == 0
    goes_on(twin)


def test_adopted_tensors_are_not_written_by_the_next_load():
    """Megatron-Bridge has torch's own loader adopt the caller's tensors; states may then be views of one buffer."""
    te_patches.apply()
    twin = trained("fp32")
    flat = torch.zeros(2 * sum(p.numel() for p in twin.params[0]), device=DEVICE)
    at = 0
    for param in twin.params[0]:
        for name in ("exp_avg", "exp_avg_sq"):
            view = flat[at : at + param.numel()].view(param.shape)
            view.copy_(twin.mine.state[param][name])
            twin.mine.state[param][name] = view
            at += param.numel()
    twin.compare()
    saved = copy.deepcopy(trained("fp32", seed=1).stock.state_dict())
    # Overlapping views: nobody may be written in place there.
    first = twin.params[0][4]
    twin.mine.state[first]["exp_avg_sq"] = twin.mine.state[first]["exp_avg"]
    load(twin, saved)
    goes_on(twin)


@every_storage
def test_states_that_were_moved_or_released_are_made_anew(storage):
    te_patches.apply()
    twin = trained(storage)
    released = twin.mine.state[twin.params[0][4]]["exp_avg"]
    if type(released) is torch.Tensor:
        released.untyped_storage().resize_(0)
    other = twin.mine.state[twin.params[0][5]]
    other["exp_avg_sq"] = torch.zeros(3, device=DEVICE)
    twin.mine.state[twin.params[0][3]].clear()
    load(twin, copy.deepcopy(trained(storage, seed=1).stock.state_dict()))
    goes_on(twin)


@pytest.mark.gpu
@every_storage
def test_gpu_a_load_while_states_are_offloaded_puts_them_on_the_device(storage):
    te_patches.apply()
    twin = trained(storage)
    saved = te_patches.state_dict_cpu(trained(storage, seed=1).stock)
    for states in twin.mine.state.values():
        for name, state in states.items():
            if type(state) is torch.Tensor:
                states[name] = state.cpu()
    load(twin, saved)
    assert all(state.is_cuda for states in twin.mine.state.values() for state in states.values())
    goes_on(twin)


@every_storage
def test_states_in_another_memory_order_are_loaded_by_index(storage):
    te_patches.apply()
    twin = trained(storage)
    param = twin.params[0][3]
    assert param.dim() == 2
    for name, state in list(twin.mine.state[param].items()):
        if type(state) is torch.Tensor:
            twin.mine.state[param][name] = state.t().contiguous().t()
    load(twin, copy.deepcopy(trained(storage, seed=1).stock.state_dict()))
    for name, state in twin.mine.state[param].items():
        theirs = twin.stock.state[twin.params[1][3]][name]
        local = [getattr(s, "_data", s) for s in (state, theirs)]
        assert torch.equal(bits(local[0].contiguous()), bits(local[1].contiguous()))


@pytest.mark.gpu
@every_storage
def test_gpu_states_permuted_among_parameters_load_as_stocks(storage):
    test_states_permuted_among_parameters_load_as_stocks(storage)
