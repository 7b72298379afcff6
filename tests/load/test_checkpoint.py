"""torch.distributed.checkpoint around the loader: what Automodel does to save and resume, on one rank."""

from __future__ import annotations

import copy
import inspect

import pytest
import te_patches
import torch
from twin import DEVICE, assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
torch_state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")

STORAGES = {
    "remainder": {"master_weights": True, "store_param_remainders": True},
    "fp32-master": {"master_weights": True},
    "fp16-moments": {"master_weights": True, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "capturable": {"capturable": True},
}


def build():
    torch.manual_seed(3)
    layers = [torch.nn.Linear(7, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 3)]
    return torch.nn.Sequential(*layers).to(device=DEVICE, dtype=torch.bfloat16)


def train(models, optimizers, steps, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for _ in range(steps):
        for params in zip(*(model.parameters() for model in models), strict=True):
            grad = torch.randn(params[0].shape, generator=generator, device=DEVICE).to(params[0].dtype)
            for param in params:
                param.grad = grad.clone()
        for step in optimizers:
            step()
        for model in models:
            model.zero_grad()


def pair(optimizer_class, storage):
    """(models, optimizers): ours and stock's."""
    models = [build(), build()]
    return models, [optimizer_class(model.parameters(), lr=1e-2, **STORAGES[storage]) for model in models]


class Stock:
    """An optimizer of stock's through torch's functions: its step and load, whatever is patched."""

    def __init__(self, optimizer_class, monkeypatch):
        self.stock = {name: inspect.unwrap(getattr(optimizer_class, name)) for name in ("step", "load_state_dict")}
        self.patch, self.monkeypatch = optimizer_class, monkeypatch

    def __enter__(self):
        for name, function in self.stock.items():
            self.monkeypatch.setattr(self.patch, name, function)

    def __exit__(self, *_):
        self.monkeypatch.undo()


def assert_twins(models, optimizers):
    for at, params in enumerate(zip(*(model.parameters() for model in models), strict=True)):
        assert_same([params[0]], [params[1]], f"parameter {at}")
        states = [optimizer.state[param] for optimizer, param in zip(optimizers, params, strict=True)]
        assert states[0].keys() == states[1].keys()
        for name in states[0]:
            assert_same([states[0][name]], [states[1][name]], name)
    for groups in zip(*(optimizer.param_groups for optimizer in optimizers), strict=True):
        assert int(groups[0]["step"]) == int(groups[1]["step"])


def check_round_trip(optimizer_class, storage, options, tmp_path, monkeypatch):
    import torch.distributed.checkpoint as dcp

    te_patches.apply()
    stock = Stock(optimizer_class, monkeypatch)
    models, optimizers = pair(optimizer_class, storage)
    steps = [optimizers[0].step, lambda: stock.stock["step"](optimizers[1])]
    train(models, steps, 2, seed=1)
    options = torch_state_dict.StateDictOptions(**options)

    def save(side):
        state = torch_state_dict.get_optimizer_state_dict(models[side], optimizers[side], options=options)
        dcp.save({"optimizer": copy.deepcopy(state)}, checkpoint_id=tmp_path / str(side), no_dist=True)

    def load(side):
        state = torch_state_dict.get_optimizer_state_dict(models[side], optimizers[side], options=options)
        dcp.load({"optimizer": state}, checkpoint_id=tmp_path / str(side), no_dist=True)
        torch_state_dict.set_optimizer_state_dict(models[side], optimizers[side], state, options=options)

    save(0)
    with stock:
        save(1)
    # Into optimizers that never stepped: torch's dummy step comes first.
    weights = [copy.deepcopy(model.state_dict()) for model in models]
    models, optimizers = pair(optimizer_class, storage)
    for model, values in zip(models, weights, strict=True):
        model.load_state_dict(values)
    steps = [optimizers[0].step, lambda: stock.stock["step"](optimizers[1])]
    load(0)
    with stock:
        load(1)
    train(models, steps, 3, seed=2)
    assert_twins(models, optimizers)


FLAT = {"flatten_optimizer_state_dict": True}
OFFLOADED = FLAT | {"cpu_offload": True}
OPTIONS = pytest.mark.parametrize("options", [{}, FLAT, OFFLOADED], ids=["nested", "flat", "offloaded"])
EVERY = pytest.mark.parametrize("storage", ["remainder", "fp32-master", "fp16-moments"])


@EVERY
@OPTIONS
def test_a_round_trip_through_files_is_stocks(optimizer_class, storage, options, tmp_path, monkeypatch):
    check_round_trip(optimizer_class, storage, options, tmp_path, monkeypatch)


@pytest.mark.gpu
@EVERY
@OPTIONS
def test_gpu_a_round_trip_through_files_is_stocks(optimizer_class, storage, options, tmp_path, monkeypatch):
    check_round_trip(optimizer_class, storage, options, tmp_path, monkeypatch)


def check_raw_dict(optimizer_class, storage, tmp_path, monkeypatch):
    """dcp.load writes into the tensors of `state_dict()`: the live states, or fp32 copies of scaled ones."""
    import torch.distributed.checkpoint as dcp

    te_patches.apply()
    stock = Stock(optimizer_class, monkeypatch)
    models, optimizers = pair(optimizer_class, storage)
    steps = [optimizers[0].step, lambda: stock.stock["step"](optimizers[1])]
    train(models, steps, 2, seed=5)
    for side, optimizer in enumerate(optimizers):
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / str(side), no_dist=True)
    train(models, steps, 2, seed=6)
    addresses = [state.data_ptr() for states in optimizers[0].state.values() for state in states.values()]
    for side, optimizer in enumerate(optimizers):
        state = {"optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / str(side), no_dist=True)
        (
            optimizer.load_state_dict
            if side == 0
            else lambda saved: stock.stock["load_state_dict"](optimizers[1], saved)
        )(state["optimizer"])
    assert [s.data_ptr() for states in optimizers[0].state.values() for s in states.values()] == addresses
    train(models, steps, 2, seed=7)
    assert_twins(models, optimizers)
    assert optimizers[0].param_groups[0]["step"] == 4


@EVERY
def test_files_loaded_into_the_own_state_dict_are_stocks(optimizer_class, storage, tmp_path, monkeypatch):
    check_raw_dict(optimizer_class, storage, tmp_path, monkeypatch)


@pytest.mark.gpu
@EVERY
def test_gpu_files_loaded_into_the_own_state_dict_are_stocks(optimizer_class, storage, tmp_path, monkeypatch):
    check_raw_dict(optimizer_class, storage, tmp_path, monkeypatch)


def check_dummy_step(optimizer_class, storage, monkeypatch):
    """Asking an optimizer that never stepped for its state makes torch take a step with zero gradients and rate 0."""
    te_patches.apply()
    stock = Stock(optimizer_class, monkeypatch)
    models, optimizers = pair(optimizer_class, storage)
    torch_state_dict.get_optimizer_state_dict(models[0], optimizers[0])
    assert int(optimizers[0].param_groups[0]["step"]) == 1
    if DEVICE == "cpu" or storage != "capturable":
        with stock:
            torch_state_dict.get_optimizer_state_dict(models[1], optimizers[1])
    else:
        # Stock hands the CPU tensor that torch puts in as the rate to the device.
        for param in models[1].parameters():
            param.grad = torch.zeros_like(param)
        rate = optimizers[1].param_groups[0]["lr"].clone()
        optimizers[1].param_groups[0]["lr"].zero_()
        stock.stock["step"](optimizers[1])
        optimizers[1].param_groups[0]["lr"].copy_(rate)
        optimizers[1].zero_grad()
    train(models, [optimizers[0].step, lambda: stock.stock["step"](optimizers[1])], 3, seed=4)
    assert_twins(models, optimizers)


@pytest.mark.parametrize("storage", STORAGES)
def test_torchs_dummy_step_is_stocks(optimizer_class, storage, monkeypatch):
    check_dummy_step(optimizer_class, storage, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_gpu_torchs_dummy_step_is_stocks(optimizer_class, storage, monkeypatch):
    check_dummy_step(optimizer_class, storage, monkeypatch)
