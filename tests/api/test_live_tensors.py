"""Nothing is left to the caller: tensors, groups and options may change between any two steps, and nothing is kept.

Each test drives a patched optimizer and a stock twin through the same changes and compares bits.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import resource
import weakref

import pytest
import te_patches
import torch
from transformer_engine.pytorch.optimizers import FusedAdam

OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "master_weights": True, "store_param_remainders": True}


class Pair:
    """A patched optimizer and its stock twin."""

    def __init__(self, sizes=(33, 64, 7), dtype=torch.bfloat16, groups=1, **options):
        te_patches.apply()
        self.generator = torch.Generator().manual_seed(5)
        values = [torch.randn(size, generator=self.generator).to(dtype) for size in sizes]
        self.params = [[torch.nn.Parameter(v.clone()) for v in values] for _ in range(2)]
        self.optimizers = [
            FusedAdam([{"params": p[at::groups]} for at in range(groups)], **(OPTIONS | options)) for p in self.params
        ]

    @property
    def mine(self):
        return self.optimizers[0]

    def both(self, action):
        """The same change on both sides; returns what it returned."""
        return [action(o, p) for o, p in zip(self.optimizers, self.params, strict=True)]

    def step(self, present=lambda at: True, attribute="grad", dtype=None):
        for at in range(len(self.params[0])):
            shape = self.params[0][at].shape
            grad = torch.randn(shape, generator=self.generator)
            for params in self.params:
                value = grad.to(dtype or params[at].dtype).clone() if present(at) else None
                setattr(params[at], attribute, value)
        self.mine.step()
        inspect.unwrap(FusedAdam.step)(self.optimizers[1])
        self.compare()

    def compare(self):
        for ours, theirs in zip(*self.params, strict=True):
            assert torch.equal(ours, theirs)
            states = [o.state.get(p, {}) for o, p in zip(self.optimizers, (ours, theirs), strict=True)]
            assert states[0].keys() == states[1].keys()
            assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
        steps = [[group.get("step") for group in optimizer.param_groups] for optimizer in self.optimizers]
        assert steps[0] == steps[1]

    def native(self):
        return {group["tier"] for group in te_patches.report(self.mine)["groups"]} == {"native"}


def replace(names):
    def action(optimizer, params):
        for param in params:
            state = optimizer.state[param]
            for name in names:
                old = state[name]
                state[name] = old.clone()
                old.fill_(77)  # whoever still holds the old memory would see and spread this

    return action


@pytest.mark.parametrize("names", [["exp_avg"], ["master_param"], ["exp_avg", "exp_avg_sq", "master_param"]])
def test_state_tensors_replaced(names):
    pair = Pair()
    for _ in range(3):
        pair.step()
        pair.both(replace(names))
    pair.step()
    assert pair.native()


def test_data_swapped_under_parameters_states_and_gradients():
    pair = Pair()
    pair.step()

    def swap(optimizer, params):
        for param in params:
            for tensor in (param, *optimizer.state[param].values()):
                old = tensor.data
                tensor.data = old.clone()
                old.fill_(77)

    pair.both(swap)
    pair.step()


def test_a_lazy_copy_of_a_parameter_keeps_its_values():
    """torch copies the memory that both share at the first write, which ours must announce."""
    pair = Pair()
    for _ in range(3):
        pair.step()
    kept = [param.detach().clone() for param in pair.params[0]]
    lazy = [torch._lazy_clone(param.detach()) for param in pair.params[0]]
    pair.step()
    for copied, value, param in zip(lazy, kept, pair.params[0], strict=True):
        assert torch.equal(copied, value)
        assert not torch.equal(param, value)


@pytest.mark.parametrize("change", ["shape", "strides", "offset", "class", "negated"])
def test_one_tensor_of_many_that_is_no_longer_as_it_was(change):
    """The tensors of a kind that was checked are not checked again; one that is of another kind is."""
    pair = Pair(sizes=((6, 4),) * 5, dtype=torch.float32, master_weights=False, store_param_remainders=False)
    for _ in range(3):
        pair.step()
    grad = torch.randn(6, 4)
    before = [[param.detach().clone() for param in params] for params in pair.params]
    for params in pair.params:
        for param in params:
            param.grad = grad.clone()
    values = {
        "strides": grad.t().contiguous().t(),
        "offset": torch.cat([torch.full((1, 4), 77.0), grad])[1:],
        "class": torch.nn.Parameter(grad.clone()),
    }
    if change in values:
        for params in pair.params:
            # Stock's kernels take one memory order.
            params[2].grad = values[change] if params is pair.params[0] else values[change].contiguous()
        pair.mine.step()
        inspect.unwrap(FusedAdam.step)(pair.optimizers[1])
        pair.compare()
        return
    if change == "shape":
        param = pair.params[0][2]
        param.data = param.data.reshape(4, 6)
        words = r"parameter 2 of group 0 .*shape"
    else:
        pair.params[0][2].grad = torch._neg_view(grad.clone())
        words = r"parameter 2 of group 0 .*resolve_neg"
    with pytest.raises(RuntimeError, match=words):
        pair.mine.step()
    for param, value in zip(pair.params[0], before[0], strict=True):
        assert torch.equal(param.reshape(-1), value.reshape(-1))
    assert pair.mine.param_groups[0]["step"] == 3


def test_shapes_that_change_without_end():
    """Kinds of tensors are forgotten in time, and with them what was checked of tensors of those kinds."""

    def resize(pair, at, size):
        value = torch.randn(size, generator=pair.generator)

        def action(optimizer, params):
            param = params[at]
            param.grad = None
            param.data = value.to(param.dtype)
            for name, state in optimizer.state[param].items():
                optimizer.state[param][name] = value.abs().to(state.dtype)

        pair.both(action)

    # One parameter grows at every step; the other keeps its size until the step `last`, then takes the same.
    for last in range(20, 45):
        pair = Pair(sizes=(5, 5))
        for at in range(last):
            pair.step()
            resize(pair, 0, 6 + at)
        resize(pair, 1, 5 + last)
        pair.step()


def test_an_idle_master_that_comes_later():
    pair = Pair(dtype=torch.float32, store_param_remainders=False, master_weight_dtype=torch.float16)
    pair.step()
    masters = pair.both(lambda o, params: [o.state[p].pop("master_param") for p in params])
    for _ in range(2):
        pair.step()

    def bring_back(optimizer, params):
        side = masters[0] if optimizer is pair.mine else masters[1]
        for param, master in zip(params, side, strict=True):
            # Half of its range: scaling it anew changes it.
            optimizer.state[param]["master_param"] = master / 2

    pair.both(bring_back)
    pair.step()


def test_storages_released_and_revived():
    pair = Pair()
    pair.step()

    def cycle(optimizer, params):
        for param in params:
            for tensor in optimizer.state[param].values():
                kept, storage = tensor.clone(), tensor.untyped_storage()
                size = storage.nbytes()
                storage.resize_(0)
                junk = [torch.full((size,), 77, dtype=torch.uint8) for _ in range(4)]
                storage.resize_(size)
                tensor.copy_(kept)
                del junk

    for _ in range(3):
        pair.both(cycle)
        pair.step()


def test_inner_dicts_and_the_whole_state_rebound():
    pair = Pair()
    pair.step()
    pair.both(lambda o, p: [o.state.__setitem__(q, dict(o.state[q])) for q in p])
    pair.step()

    def shuffle(optimizer, params):
        entries = {param: optimizer.state[param] for param in reversed(params)}
        optimizer.state.clear()
        optimizer.state.update(entries)

    pair.both(shuffle)
    pair.step()
    pair.both(lambda o, p: o.state.pop(p[1]))
    pair.step()
    pair.both(lambda o, p: o.state.clear())
    pair.step()


def test_groups_rebound_added_emptied_and_removed():
    pair = Pair(groups=2)
    pair.step()
    pair.both(lambda o, p: setattr(o, "param_groups", [dict(group) for group in o.param_groups]))
    pair.step()
    pair.both(lambda o, p: o.param_groups[0]["params"].reverse())
    pair.step()
    pair.both(lambda o, p: p.append(torch.nn.Parameter(torch.ones(9, dtype=torch.bfloat16))))
    pair.both(lambda o, p: o.add_param_group({"params": [p[-1]], "lr": 0.5}))
    pair.step()
    assert [group["step"] for group in pair.mine.param_groups] == [4, 4, 1]
    pair.both(lambda o, p: o.param_groups.reverse())
    pair.step()
    pair.both(lambda o, p: o.param_groups.pop(0))
    pair.step()
    pair.both(lambda o, p: o.param_groups[0].__setitem__("params", []))
    pair.step()


def test_parameters_replaced_with_their_states():
    """Float16OptimizerWithFloat16Params: fp32 clones take the parameters' places and their states."""
    pair = Pair(dtype=torch.float32, master_weights=False, store_param_remainders=False)
    pair.step()

    def swap(optimizer, params):
        for at, param in enumerate(params):
            clone = torch.nn.Parameter(param.detach().clone())
            optimizer.state[clone] = optimizer.state.pop(param)
            optimizer.param_groups[0]["params"][at] = params[at] = clone

    pair.both(swap)
    pair.step()


def test_options_changed_before_every_step():
    pair = Pair(groups=2)
    rng = torch.Generator().manual_seed(9)
    for at in range(20):
        draw = torch.rand(5, generator=rng, dtype=torch.float64).tolist()

        def change(optimizer, _, at=at, draw=draw):
            for group in optimizer.param_groups:
                group["lr"] = [draw[0], torch.tensor(draw[0])][at % 2]
                group["betas"] = [0.5 + draw[1] / 2, 0.5 + draw[2] / 2]
                group["eps"], group["weight_decay"] = 1e-8 + draw[3], draw[4]
                group["bias_correction"] = at % 3 != 0
            optimizer.adam_w_mode = at % 5 != 0

        pair.both(change)
        pair.step()
    assert te_patches.report(pair.mine)["groups"][0]["plans"] == 1, "nothing numeric is part of the plan"


@pytest.mark.parametrize("count", [0, 7, 1000])
def test_the_counter_is_the_groups_own(count):
    pair = Pair()
    pair.step()
    pair.both(lambda o, p: o.param_groups[0].__setitem__("step", count))
    pair.step()
    assert pair.mine.param_groups[0]["step"] == count + 1


def test_gradients_come_and_go_without_another_plan():
    pair = Pair(sizes=(5, 6, 7))
    for mask in ("111", "101", "000", "010", "111", "101"):
        pair.step(lambda at, mask=mask: mask[at] == "1")
    assert te_patches.report(pair.mine)["groups"][0]["plans"] == 1
    assert pair.mine.param_groups[0]["step"] == 6


def test_the_gradient_attribute_and_dtype_are_read_live():
    pair = Pair(use_decoupled_grad=True)
    start = pair.params[0][0].detach().clone()
    pair.step()  # only `.grad` is filled: nothing happens
    assert torch.equal(start, pair.params[0][0])
    pair.step(attribute="decoupled_grad", dtype=torch.float32)
    pair.step(attribute="decoupled_grad", dtype=torch.bfloat16)
    assert not torch.equal(start, pair.params[0][0])
    pair.both(lambda o, p: setattr(o, "use_decoupled_grad", False))
    pair.step()


def test_masters_switched_off_and_alien_masters_ignored():
    pair = Pair(store_param_remainders=False)
    pair.step()
    pair.both(lambda o, p: setattr(o, "master_weights", False))
    pair.step()
    before = [state["master_param"].clone() for state in pair.mine.state.values()]
    pair.step()
    assert all(torch.equal(a, s["master_param"]) for a, s in zip(before, pair.mine.state.values(), strict=True))


def test_zero_learning_rates_and_zero_gradients_are_steps_like_others():
    pair = Pair()
    pair.both(lambda o, p: o.param_groups[0].update(lr=0.0, weight_decay=0.0))
    for params in pair.params:
        for param in params:
            param.grad = torch.zeros_like(param)
    pair.mine.step()
    inspect.unwrap(FusedAdam.step)(pair.optimizers[1])
    pair.compare()
    pair.both(lambda o, p: o.param_groups[0].update(lr=0.1, weight_decay=0.1))
    pair.step()


def test_a_stock_load_state_dict_between_steps():
    pair = Pair()
    pair.step()
    saved = pair.both(lambda o, p: copy.deepcopy(o.state_dict()))
    pair.step()
    for optimizer, state in zip(pair.optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    pair.step()
    assert pair.mine.param_groups[0]["step"] == 2


def test_copies_and_pickles_carry_no_plan_and_fail_as_stock_does():
    pair = Pair()
    pair.step()
    for duplicate in (copy.deepcopy(pair.mine), pickle.loads(pickle.dumps(pair.mine))):
        assert not [name for name in vars(duplicate) if "te_patches" in name]
        duplicate.param_groups[0]["params"][0].grad = torch.ones(33, dtype=torch.bfloat16)
        with pytest.raises(AttributeError):
            duplicate.step()
    pair.step()


def test_nothing_is_added_to_states_and_groups():
    pair = Pair()
    pair.step()
    assert pair.mine.state_dict()["param_groups"][0].keys() == pair.optimizers[1].state_dict()["param_groups"][0].keys()
    assert all(isinstance(key, torch.nn.Parameter) for key in pair.mine.state)


def test_replaced_tensors_are_freed_when_their_owner_frees_them():
    pair = Pair()
    pair.step()
    gc.collect()
    gone = []
    for param in pair.params[0]:
        state = pair.mine.state[param]
        gone += [weakref.ref(tensor.untyped_storage()) for tensor in state.values()]
        owners = [weakref.ref(tensor) for tensor in state.values()]
        for name in list(state):
            state[name] = state[name].clone()
        assert not any(owner() is not None for owner in owners), "a state tensor is still held"
        grads = weakref.ref(param.grad)
        param.grad = None
        assert grads() is None, "a gradient is still held"
    pair.step()


def test_swapping_parameters_works_as_if_unpatched():
    """`model.to` swaps tensors and refuses those with other handles."""
    pair = Pair()
    pair.step()
    for params in pair.params:
        for param in params:
            other = torch.nn.Parameter(param.detach().clone())
            param.grad = None
            torch.utils.swap_tensors(param, other)
    pair.step()


def test_classes_of_parameters_are_not_kept_without_end():
    pair = Pair(sizes=(5,))
    classes = []
    for at in range(100):
        kind = type(f"Parameter{at}", (torch.nn.Parameter,), {})
        classes.append(weakref.ref(kind))
        pair.params[0][0].__class__ = kind
        del kind
        pair.step()
    gc.collect()
    assert sum(kind() is not None for kind in classes) < 40


def test_memory_stays_flat_over_many_steps():
    pair = Pair(sizes=(3,) * 200)
    pair.step()

    def held(steps):
        for _ in range(steps):
            pair.mine.step()
        gc.collect()
        return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    held(200)
    objects, kib = held(200)
    later, kib_later = held(2000)
    assert later - objects < 10
    assert kib_later - kib < 1024, "more than half a KiB a step is kept"


def test_twenty_one_thousand_tensors():
    pair = Pair(sizes=(1,) * 21_000)
    pair.step()
    pair.step()
    assert te_patches.report(pair.mine)["groups"][0]["tensors"] == 21_000
