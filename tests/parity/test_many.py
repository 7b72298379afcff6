"""Groups of so many parameters that several threads read them, and tensors that change between steps."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import te_patches
import te_release
import torch
from options import Combination
from twin import Twin, assert_same, bits

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8
# How parameters are read is the same for every release.
NEWEST = pytest.mark.skipif(te_release.chosen() != te_release.RELEASES[-1], reason="the newest release does for all")
COUNT = 300
SHAPES = [((3 + at % 5, 4), at % 3) for at in range(COUNT)]
# Without bias correction the gradients are torch's own, which threads find by themselves.
COMBINATIONS = [
    Combination(BF16, BF16, "remainder", FP32, bias_correction=False),
    Combination(BF16, BF16, "float32", BF16),
    Combination(FP32, FP32, "none", FP32, bias_correction=False, sharded=True),
    Combination(BF16, BF16, "remainder", BF16, sharded=True),
    Combination(BF16, BF16, "float32", FP16, bias_correction=False),
    Combination(BF16, BF16, "float16", FP32, bias_correction=False),
    Combination(BF16, BF16, "float32", FP8, bias_correction=False, exp_avg_sq=FP16),
    Combination(BF16, BF16, "float32", FP8, sharded=True),
]


def change(twin: Twin, chosen: list[int]) -> None:
    """Other objects, other memory and other keys with the same values in the chosen parameters' states."""
    for at in chosen:
        for optimizer, params in zip(twin.optimizers, twin.params, strict=True):
            state = optimizer.state[params[at]]
            if at % 3 == 0:
                state |= {name: value.clone() for name, value in state.items()}
            elif at % 3 == 1:
                # As a loaded file has them: keys that are equal and not the same object.
                optimizer.state[params[at]] = {"".join(list(name)): value for name, value in state.items()}
            else:
                # A dict, which moves what a Python object has beside its words.
                params[at].note = at


def run_many(combination: Combination, shard) -> None:
    te_patches.apply(kernels="native")
    sharded = combination.sharded
    twin = Twin(combination, shapes=SHAPES, groups=1, wrap=shard if sharded else lambda tensor: tensor)
    choice = random.Random(3)
    for step in range(6):
        missing = set(choice.sample(range(COUNT), 0 if step < 2 else 30))
        twin.fill_gradients(lambda at, missing=missing: at not in missing)
        twin.step()
        recalled = te_patches.report(twin.mine)["groups"][0]["recalled"]
        # Two steps make states and see them; gradients that come back are of a kind that was noted.
        assert recalled >= (COUNT - 80 if step > 1 else 0), "parameters that are as they were are read in full"
        change(twin, choice.sample(range(COUNT), 25))
    fault(twin)


def fault(twin: Twin) -> None:
    """One state among many that is refused leaves all as it was, and the step after it is right."""
    twin.fill_gradients()
    state = twin.mine.state[twin.params[0][COUNT - 2]]
    before = [bits(p).clone() for p in twin.params[0]]
    moments = [bits(s).clone() for s in twin.states(0, "exp_avg")]
    name = "master_param" if hasattr(state["exp_avg"], "_quantizer") else "exp_avg"
    whole = state[name]
    state[name] = twin.wrap(torch.zeros(5, dtype=whole.dtype, device=whole.device))
    with pytest.raises(RuntimeError, match=rf"parameter {COUNT - 2} of group 0"):
        twin.mine.step()
    state[name] = whole
    assert_same([bits(p) for p in twin.params[0]], before, "parameter")
    assert_same([bits(s) for s in twin.states(0, "exp_avg")], moments, "exp_avg")
    twin.step()


@NEWEST
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_cpu_many_parameters_that_change(combination, shard):
    run_many(combination, shard)


@pytest.mark.gpu
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_gpu_many_parameters_that_change(combination, shard):
    run_many(combination, shard)


def change_data(tensor: Any) -> None:
    tensor._data = tensor._data.clone()


def change_scale_inv(tensor: Any) -> None:
    tensor._scale_inv = tensor._scale_inv.clone()


def change_quantizer(tensor: Any) -> None:
    tensor._quantizer = tensor._quantizer.copy()
    tensor._quantizer.scale, tensor._quantizer.amax = tensor._quantizer.scale.clone(), tensor._quantizer.amax.clone()


def change_class(tensor: Any) -> None:
    """A quantizer whose scale is its own affair."""

    def moved(self: Any, value: Any = None) -> Any:
        if value is not None:
            self.elsewhere = value
        return self.elsewhere

    quantizer = tensor._quantizer
    scale = quantizer.__dict__.pop("scale")
    quantizer.__class__ = type("Moved", (type(quantizer),), {"scale": property(moved, moved)})
    quantizer.scale = scale


def keep_transpose(tensor: Any) -> None:
    tensor._transpose, tensor._transpose_invalid = tensor._data.t().contiguous(), False


# And whether the state is read in full from then on.
CHANGES = {
    change_data: False,
    change_scale_inv: False,
    change_quantizer: False,
    change_class: True,
    keep_transpose: False,
}


@NEWEST
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "dtensor"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_inside_of_an_fp8_state_is_read_at_every_step(change, wrapped, shard):
    te_patches.apply(kernels="native")
    shapes = [((4, 6), 0)] * 20
    combination = Combination(BF16, BF16, "float32", FP8, bias_correction=False, sharded=wrapped)
    twin = Twin(combination, shapes=shapes, groups=1, wrap=shard if wrapped else lambda tensor: tensor)
    for step in range(6):
        twin.fill_gradients()
        twin.step()
        assert gc.isenabled(), "the collector of garbage was left stopped"
        recalled = te_patches.report(twin.mine)["groups"][0]["recalled"]
        # Gradients may be of kinds that differ in bits that torch never wrote, and were not met before.
        least, most = (5 if step else 0), (19 if step > 2 and CHANGES[change] else 20 if step else 0)
        assert least <= recalled <= most
        if step == 2:
            for optimizer, params in zip(twin.optimizers, twin.params, strict=True):
                state = optimizer.state[params[7]]["exp_avg_sq"]
                change(getattr(state, "_local_tensor", state))
    if change is keep_transpose:
        state = twin.mine.state[twin.params[0][7]]["exp_avg_sq"]
        assert getattr(state, "_local_tensor", state)._transpose_invalid, "the transposed copy is out of date"


@NEWEST
def test_classes_of_fp8_tensors_with_ways_of_their_own_are_asked(monkeypatch):
    """The optimizer's state of a tensor is what its attributes say, not what its dict holds."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    te_patches.apply(kernels="native")
    combination = Combination(BF16, BF16, "float32", FP8, bias_correction=False)
    twin = Twin(combination, shapes=[((4, 6), 0)] * 20, groups=1)
    for _ in range(3):
        twin.fill_gradients()
        twin.step()
    quantizers = {state._quantizer for state in twin.states(0, "exp_avg")}
    others = {quantizer: quantizer.__dict__.pop("amax") for quantizer in quantizers}
    for quantizer in quantizers:
        quantizer.__dict__["amax"] = torch.full_like(others[quantizer], -1.0)
    prop = property(lambda self: others.get(self, self.__dict__["amax"]))
    monkeypatch.setattr(Float8Quantizer, "amax", prop, raising=False)
    twin.fill_gradients()
    twin.mine.step()
    assert te_patches.report(twin.mine)["groups"][0]["recalled"] == 0
    monkeypatch.undo()
    assert all(float(quantizer.amax) == -1.0 for quantizer in quantizers), "the dict's was written"
    for quantizer in quantizers:
        quantizer.__dict__["amax"] = others[quantizer]
    twin.stock_step(twin.stock, None, None)
    twin.compare()


class Own(torch.nn.Parameter):
    """A parameter whose gradient is its own affair."""

    @property
    def grad(self):
        return self.mine

    @grad.setter
    def grad(self, value):
        self.mine = value


@NEWEST
@pytest.mark.parametrize("kind", ["class", "instance"])
def test_gradients_of_classes_that_have_their_own(kind, monkeypatch):
    """What a class says of its gradients is asked at every step."""
    te_patches.apply(kernels="native")
    twin = Twin(COMBINATIONS[0], shapes=SHAPES, groups=1)
    for _ in range(3):
        twin.fill_gradients()
        twin.step()
    gradients = [param.grad for param in twin.params[0]]
    for param in twin.params[0]:
        param.mine, param.grad = param.grad, None
    if kind == "class":
        monkeypatch.setattr(torch.nn.Parameter, "grad", Own.grad, raising=False)
    else:
        for param in twin.params[0]:
            param.__class__ = Own
    twin.mine.step()
    monkeypatch.undo()
    twin.stock_step(twin.stock, None, None)
    for param, grad in zip(twin.params[0], gradients, strict=True):
        param.__class__ = torch.nn.Parameter
        param.grad = grad
    twin.compare()
