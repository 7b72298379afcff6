"""Random sequences of everything that frameworks do to an optimizer, on one with patches and its twin without: all bits
equal, and as much memory held, after every operation. Some 600 operations here; TE_PATCHES_NIGHTLY=1 takes up to
18,000.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import sys

import hypothesis.strategies as st
import te_patches
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformer_engine.pytorch.optimizers import FusedAdam
from twin import DEVICE, assert_same

NIGHTLY = os.environ.get("TE_PATCHES_NIGHTLY") == "1"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPTIONS = [
    {},
    {"master_weights": True},
    {"master_weights": True, "store_param_remainders": True},
    {"master_weights": True, "store_param_remainders": True, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    {"master_weights": True, "master_weight_dtype": FP16, "exp_avg_dtype": FP16},
]
STATES = ("exp_avg", "exp_avg_sq", "master_param")


def stock_function(name):
    return inspect.unwrap(getattr(FusedAdam, name))


def storage_holders(tensor):
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def live_tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def setup_module():
    """What exists before is left out of collections, of which every example makes two."""
    gc.collect()
    gc.freeze()


def teardown_module():
    gc.unfreeze()


class Model(RuleBasedStateMachine):
    """Two optimizers on equal parameters; `each` does the same to both."""

    def __init__(self):
        super().__init__()
        gc.collect()
        self.tensors_at_first = live_tensors()

    @initialize(options=st.sampled_from(OPTIONS), seed=st.integers(0, 1 << 30), decoupled=st.booleans())
    def build(self, options, seed, decoupled):
        te_patches.revert()
        self.stock_step, self.stock_load = stock_function("step"), stock_function("load_state_dict")
        te_patches.apply()
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        shapes = [((5, 3), BF16), ((33,), FP32), ((0, 4), BF16), ((4097,), BF16), ((), FP32)]
        values = [self.random(shape).to(dtype) for shape, dtype in shapes]
        # Stock scales neither empty tensors nor those without dimensions in every release.
        if FP16 in options.values():
            values = [value for value in values if value.dim() and value.numel()]
        self.sides = [[torch.nn.Parameter(value.clone()) for value in values] for _ in range(2)]
        self.optimizers = [
            FusedAdam(
                [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}],
                lr=1e-2,
                use_decoupled_grad=decoupled,
                **options,
            )
            for params in self.sides
        ]
        self.saved = []
        self.calls = [0, 0]
        self.hooks = []

    def random(self, shape):
        return torch.randn(shape, generator=self.generator, device=DEVICE)

    def each(self, action):
        for side, (params, optimizer) in enumerate(zip(self.sides, self.optimizers, strict=True)):
            action(side, params, optimizer)

    @property
    def attribute(self):
        return "decoupled_grad" if self.optimizers[0].use_decoupled_grad else "grad"

    def same_outcome(self, mine, stock):
        """Both succeed, or both raise an exception of one type."""
        outcomes = []
        for action in (mine, stock):
            try:
                action()
                outcomes.append(None)
            except Exception as error:
                outcomes.append(type(error))
        assert outcomes[0] is outcomes[1], outcomes
        return outcomes[0] is None

    @rule(mask=st.integers(1, 255), wide=st.booleans())
    def gradients_arrive(self, mask, wide):
        for at in range(len(self.sides[0])):
            shape, dtype = self.sides[0][at].shape, self.sides[0][at].dtype
            wide_enough = wide and self.attribute == "decoupled_grad"
            value = self.random(shape).to(FP32 if wide_enough else dtype) if mask >> at & 1 else None
            self.each(
                lambda _, params, __, at=at, value=value: setattr(
                    params[at], self.attribute, None if value is None else value.clone()
                )
            )

    @rule(none=st.booleans())
    def zero_grad(self, none):
        def zero(_, params, optimizer):
            if not none:
                for param in params:
                    if getattr(param, self.attribute, None) is None:
                        setattr(param, self.attribute, torch.zeros_like(param))
            optimizer.zero_grad(set_to_none=none)

        self.each(zero)

    @rule()
    def step(self):
        self.same_outcome(self.optimizers[0].step, self.run_stock)

    @rule(masks=st.lists(st.integers(1, 255), min_size=1, max_size=3), wide=st.booleans())
    def training_goes_on(self, masks, wide):
        for mask in masks:
            self.gradients_arrive(mask, wide)
            self.step()

    @rule(mask=st.integers(1, 255))
    def one_more_step(self, mask):
        self.gradients_arrive(mask, False)
        self.step()

    def run_stock(self):
        self.stock_step(self.optimizers[1])
        # Hooks are around the class's function, which is not called here.
        self.calls[1] += sum(1 for hook in self.hooks if hook[1] is not None)

    @rule(name=st.sampled_from(["lr", "weight_decay", "eps", "bias_correction", "betas"]), value=st.floats(0.001, 0.5))
    def an_option_changes(self, name, value):
        values = {"eps": value * 1e-6, "bias_correction": value > 0.25, "betas": [1 - value, 1 - value / 10]}
        self.each(lambda *a: a[2].param_groups[0].__setitem__(name, values.get(name, value)))

    @rule()
    def the_mode_changes(self):
        self.each(lambda *a: setattr(a[2], "adam_w_mode", 1 - a[2].adam_w_mode))

    @rule(names=st.sets(st.sampled_from(STATES), min_size=1))
    def states_go_and_come_back(self, names):
        def move(_, __, optimizer):
            for states in optimizer.state.values():
                for name in names & states.keys():
                    states[name] = states[name].clone()

        self.each(move)

    @rule()
    def data_is_swapped(self):
        def swap(_, params, optimizer):
            for param in params:
                param.data = param.data.clone()
            for states in optimizer.state.values():
                for state in states.values():
                    state.data = state.data.clone()

        self.each(swap)

    @rule()
    def a_storage_is_released_and_revived(self):
        def resize(_, __, optimizer):
            for states in optimizer.state.values():
                for state in states.values():
                    values, storage = state.clone(), state.untyped_storage()
                    size = storage.nbytes()
                    storage.resize_(0)
                    storage.resize_(size)
                    state.copy_(values)

        self.each(resize)

    @rule()
    def groups_become_other_dicts(self):
        self.each(lambda *a: setattr(a[2], "param_groups", [dict(group) for group in a[2].param_groups]))

    @rule()
    def groups_change_places(self):
        self.each(lambda *a: a[2].param_groups.reverse())

    @precondition(lambda self: len(self.sides[0]) < 8)
    @rule(size=st.integers(1, 40))
    def a_group_is_added(self, size):
        value = self.random((size,)).bfloat16()

        def add(_, params, optimizer):
            params.append(torch.nn.Parameter(value.clone()))
            optimizer.add_param_group({"params": [params[-1]]})

        self.each(add)

    @precondition(lambda self: len(self.optimizers[0].param_groups) > 2)
    @rule()
    def the_last_group_is_removed(self):
        def remove(_, params, optimizer):
            for param in optimizer.param_groups.pop()["params"]:
                optimizer.state.pop(param, None)
                params[:] = [other for other in params if other is not param]

        self.each(remove)
        self.saved = []

    @rule(at=st.integers(0, 7))
    def a_parameter_is_replaced(self, at):
        def replace(_, params, optimizer):
            old = params[at % len(params)]
            new = torch.nn.Parameter(old.detach().clone())
            params[at % len(params)] = new
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
            if old in optimizer._scales:
                optimizer._scales[new] = optimizer._scales.pop(old)
            for group in optimizer.param_groups:
                group["params"] = [new if param is old else param for param in group["params"]]

        self.each(replace)

    @rule()
    def states_are_saved(self):
        dicts = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        for key, values in dicts[1]["state"].items():
            for name, value in values.items():
                pair = (dicts[0]["state"][key][name], value)
                if value.dtype == FP32:
                    pair = tuple(tensor + 0.0 for tensor in pair)
                assert_same(pair[:1], pair[1:], f"saved {name}")
        self.saved.append(dicts)

    def load(self, dicts):
        mine, stock = copy.deepcopy(dicts)
        return self.same_outcome(
            lambda: self.optimizers[0].load_state_dict(mine), lambda: self.stock_load(self.optimizers[1], stock)
        )

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 9))
    def an_older_state_is_loaded(self, which):
        self.load(self.saved[which % len(self.saved)])

    @rule()
    def the_own_state_is_loaded(self):
        self.same_outcome(
            lambda: self.optimizers[0].load_state_dict(self.optimizers[0].state_dict()),
            lambda: self.stock_load(self.optimizers[1], self.optimizers[1].state_dict()),
        )

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 9), key=st.integers(0, 7))
    def a_partial_state_is_loaded(self, which, key):
        dicts = copy.deepcopy(self.saved[which % len(self.saved)])
        for saved in dicts:
            saved["state"].pop(key, None)
        self.load(dicts)

    @precondition(lambda self: any(self.optimizers[0].state.values()))
    @rule(fault=st.sampled_from(["shape", "dtype", "name"]))
    def a_broken_state_is_refused(self, fault):
        broken = copy.deepcopy(self.optimizers[0].state_dict())
        values = next((values for values in broken["state"].values() if values), None)
        if values is None:
            return
        name = next(iter(values))
        if fault == "name":
            values["unknown"] = values[name]
        else:
            values[name] = torch.ones(3, 7, 2) if fault == "shape" else values[name].to(torch.int64)
        try:
            self.optimizers[0].load_state_dict(broken)
        except (RuntimeError, AssertionError, KeyError):
            return
        raise AssertionError("a broken state was loaded")

    @rule()
    def copies_are_made(self):
        for optimizer in self.optimizers:
            assert isinstance(copy.deepcopy(optimizer), FusedAdam)
            assert isinstance(pickle.loads(pickle.dumps(optimizer)), FusedAdam)

    @rule()
    def a_hook_comes_or_goes(self):
        if self.hooks:
            self.hooks.pop()[0].remove()
            return

        def count(*_):
            self.calls[0] += 1

        self.hooks.append((self.optimizers[0].register_step_post_hook(count), count))

    @rule()
    def patches_go_and_come_back(self):
        te_patches.revert()
        te_patches.apply()

    @rule()
    def one_step_without_patches(self):
        te_patches.revert()
        self.step()
        te_patches.apply()

    @invariant()
    def all_bits_are_equal(self):
        if not hasattr(self, "optimizers"):
            return
        assert_same(*self.sides, what="parameter")
        for mine, stock in zip(*self.sides, strict=True):
            states = [o.state.get(p, {}) for o, p in zip(self.optimizers, (mine, stock), strict=True)]
            assert states[0].keys() == states[1].keys()
            scales = [o._scales.get(p, {}) for o, p in zip(self.optimizers, (mine, stock), strict=True)]
            for name in states[0]:
                if states[0][name].dtype != FP16:
                    assert_same([states[0][name]], [states[1][name]], name)
                    continue
                # torch's maximum of -0.0 and 0.0 is -0.0 on the CPU and 0.0 on a GPU: zeros have scale 0.0 here.
                assert_same([states[0][name] + 0.0], [states[1][name] + 0.0], name)
                assert_same([scales[0][name] + 0.0], [scales[1][name] + 0.0], f"scale of {name}")
        for groups in zip(*(o.param_groups for o in self.optimizers), strict=True):
            assert groups[0].keys() == groups[1].keys()
            assert groups[0].get("step") == groups[1].get("step")
        assert self.calls[0] == self.calls[1]

    def tensors(self, side):
        """Every tensor that belongs to one side."""
        optimizer, found = self.optimizers[side], []
        for param in self.sides[side]:
            found += [param, *optimizer.state.get(param, {}).values(), *optimizer._scales.get(param, {}).values()]
            found += [getattr(param, name, None) for name in ("grad", "decoupled_grad")]
        return [tensor for tensor in found if tensor is not None]

    @invariant()
    def nothing_else_is_held(self):
        """Each tensor, and each storage, has as many holders as the twin's."""
        if not hasattr(self, "optimizers"):
            return
        counts = [
            [
                (
                    sys.getrefcount(tensor),
                    tensor._use_count(),
                    storage_holders(tensor),
                    tensor.untyped_storage().nbytes(),
                )
                for tensor in self.tensors(side)
            ]
            for side in (0, 1)
        ]
        assert counts[0] == counts[1]

    def teardown(self):
        for name in ("sides", "optimizers", "saved", "hooks"):
            vars(self).pop(name, None)
        gc.collect()
        held = live_tensors() - self.tensors_at_first
        te_patches.revert()
        assert held <= 0, f"{held} tensors outlive their optimizers"


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=300 if NIGHTLY else 12,
    stateful_step_count=60 if NIGHTLY else 50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not NIGHTLY,
    database=None,
)
