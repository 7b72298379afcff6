"""What a load puts where: bits against stock, for every storage and every kind of source."""

from __future__ import annotations

import copy

import pytest
import te_patches
import torch
from storages import STORAGES, addresses, every_storage, goes_on, load, map_tensors, snapshot, trained
from twin import DEVICE, Twin, assert_same, bits


def strided(value):
    """The same values with a gap after each."""
    return torch.stack([value, torch.full_like(value, float("nan"))], dim=-1)[..., 0] if value.numel() else value


SOURCES = {
    "fp32": lambda value: value,
    "fp64": lambda value: value.double(),
    "bf16": lambda value: value.bfloat16(),
    "fp16": lambda value: value.half(),
    "strided": strided,
    "host": lambda value: value.cpu(),
    "host-bf16": lambda value: value.cpu().bfloat16(),
    "host-strided": lambda value: strided(value.cpu()),
}


def check_values(storage, source):
    te_patches.apply()
    saved = map_tensors(copy.deepcopy(trained(storage, seed=1).stock.state_dict()), SOURCES[source])
    kept = copy.deepcopy(saved)
    twin = trained(storage)
    before = addresses(twin.mine)
    load(twin, saved)
    assert addresses(twin.mine) == before
    goes_on(twin)
    for key, values in kept["state"].items():
        for name, value in values.items():
            assert_same([saved["state"][key][name]], [value], "the caller's tensor")
    assert te_patches.report(twin.mine)["load"]["fresh"] == 0


@every_storage
@pytest.mark.parametrize("source", SOURCES)
def test_cpu_loaded_values_are_stocks_and_lie_where_they_were(storage, source):
    check_values(storage, source)


@pytest.mark.gpu
@every_storage
@pytest.mark.parametrize("source", SOURCES)
def test_gpu_loaded_values_are_stocks_and_lie_where_they_were(storage, source):
    check_values(storage, source)


def check_fresh(storage, shard=None):
    te_patches.apply()
    wrap = {"wrap": shard} if shard else {}
    saved = copy.deepcopy(trained(storage, seed=1, **wrap).stock.state_dict())
    twin = trained(storage, steps=0, **wrap)
    twin.fill_gradients()
    load(twin, saved)
    goes_on(twin)
    states = sum(len(values) for values in saved["state"].values())
    assert te_patches.report(twin.mine)["load"] == {"states": states, "in_place": 0, "same": 0, "fresh": states}


@every_storage
def test_cpu_a_load_before_the_first_step_makes_each_buffer_once(storage):
    check_fresh(storage)


@pytest.mark.gpu
@every_storage
def test_gpu_a_load_before_the_first_step_makes_each_buffer_once(storage):
    check_fresh(storage)


def check_sharded(storage, shard):
    from torch.distributed.tensor import DTensor

    te_patches.apply()
    saved = copy.deepcopy(trained(storage, seed=1, wrap=shard).stock.state_dict())
    twin = trained(storage, wrap=shard)
    before = addresses(twin.mine)
    load(twin, saved)
    assert addresses(twin.mine) == before
    goes_on(twin)
    for param in twin.params[0]:
        for state in twin.mine.state[param].values():
            assert isinstance(state, DTensor)
            assert (state.device_mesh, state.placements) == (param.device_mesh, param.placements)
            assert (state.shape, state.stride()) == (param.shape, param.stride())


SHARDED = pytest.mark.parametrize("storage", ["fp32", "remainder", "fp16-moments", "bf16-moments"])


@SHARDED
def test_cpu_states_of_dtensors_stay_dtensors(storage, shard):
    check_sharded(storage, shard)
    check_fresh(storage, shard)


@pytest.mark.gpu
@SHARDED
def test_gpu_states_of_dtensors_stay_dtensors(storage, shard):
    check_sharded(storage, shard)
    check_fresh(storage, shard)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["fp16-moments", "fp8-moments", "fp32", "bf16-moments"])
def test_gpu_infinities_and_nan_in_sources_load_as_stocks(storage):
    te_patches.apply()
    twin = trained(storage)
    saved = copy.deepcopy(trained(storage, seed=1).stock.state_dict())
    for at, odd in enumerate((float("nan"), float("inf"), float("-inf"), 1e-41)):
        for values in list(saved["state"].values())[2 + at : 20 : 4]:
            for name in ("exp_avg", "exp_avg_sq"):
                values[name].view(-1)[:1] = odd
    load(twin, saved)
    names = ("exp_avg", "exp_avg_sq", "master_param")
    for name in names:
        assert_same(*(twin.states(side, name) for side in (0, 1)), what=name)


@pytest.mark.gpu
@every_storage
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_gpu_tensors_larger_than_a_slot_stream_through_it(storage, pinned):
    """Slots hold 16 MiB: 4,194,304 fp32 elements. One tensor takes three of them, others share one."""
    te_patches.apply()
    shapes = [((9_000_001,), 1), ((5,), 0), ((4_194_304,), 0), ((2_000_003,), 3), ((0, 4), 0), ((70_001,), 0)]
    twins = []
    for seed in (0, 1):
        twin = Twin(STORAGES[storage], shapes=shapes, seed=seed)
        twin.fill_gradients()
        twin.step()
        twins.append(twin)
    saved = copy.deepcopy(twins[1].stock.state_dict())
    for values in saved["state"].values():
        for name, value in values.items():
            values[name] = value.cpu().pin_memory() if pinned else value.cpu()
    load(twins[0], saved)
    goes_on(twins[0], steps=1)


@every_storage
def test_a_file_is_loaded_through_its_mapping(storage, tmp_path):
    te_patches.apply()
    torch.save(trained(storage, seed=1).stock.state_dict(), tmp_path / "optimizer.pt")
    twin = trained(storage)
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True, mmap=True)
    load(twin, saved, torch.load(tmp_path / "optimizer.pt", weights_only=True))
    goes_on(twin)


@pytest.mark.gpu
@every_storage
def test_gpu_a_file_is_loaded_through_its_mapping(storage, tmp_path):
    te_patches.apply()
    torch.save(te_patches.state_dict_cpu(trained(storage, seed=1).stock), tmp_path / "optimizer.pt")
    twin = trained(storage)
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True, mmap=True)
    load(twin, saved, torch.load(tmp_path / "optimizer.pt", weights_only=True))
    goes_on(twin)


def check_cpu_dict(storage, shard=None):
    te_patches.apply()
    optimizer = trained(storage, **({"wrap": shard} if shard else {})).mine
    before = snapshot(optimizer)
    expected, found = optimizer.state_dict(), te_patches.state_dict_cpu(optimizer)
    assert found.keys() == expected.keys()
    assert found["state"].keys() == expected["state"].keys()
    for key, values in expected["state"].items():
        assert found["state"][key].keys() == values.keys()
        for name, value in values.items():
            mine = found["state"][key][name]
            local, theirs = (getattr(tensor, "_local_tensor", tensor) for tensor in (mine, value))
            assert local.device.type == "cpu"
            assert type(mine) is type(value)
            assert (mine.shape, mine.stride(), mine.dtype) == (value.shape, value.stride(), value.dtype)
            assert torch.equal(bits(local), bits(theirs.cpu())), (key, name)
    for mine, theirs in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert mine == theirs
    for values in found["state"].values():
        for value in values.values():
            getattr(value, "_local_tensor", value).zero_()
    assert_same(snapshot(optimizer), before, "a tensor shared with the dict")


@every_storage
def test_cpu_the_dict_in_host_memory_is_the_state_dict(storage):
    check_cpu_dict(storage)


@pytest.mark.gpu
@every_storage
def test_gpu_the_dict_in_host_memory_is_the_state_dict(storage):
    check_cpu_dict(storage)


@SHARDED
def test_cpu_the_dict_in_host_memory_has_dtensors(storage, shard):
    check_cpu_dict(storage, shard)


@pytest.mark.gpu
@SHARDED
def test_gpu_the_dict_in_host_memory_has_dtensors(storage, shard):
    check_cpu_dict(storage, shard)


def test_states_with_gaps_and_in_another_order_are_saved_by_index():
    te_patches.apply()
    optimizer = trained("bf16-moments").mine
    states = [state for state in optimizer.state.values() if state["exp_avg"].dim() == 2 and state["exp_avg"].numel()]
    assert len(states) > 1
    for state in states:
        state["exp_avg"] = strided(state["exp_avg"])
        state["exp_avg_sq"] = state["exp_avg_sq"].t().contiguous().t()
    expected, found = optimizer.state_dict(), te_patches.state_dict_cpu(optimizer)
    for key, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(found["state"][key][name], value), (key, name)


def check_resume(storage):
    """Scaled states are rounded anew by a save, so they are on both sides."""
    te_patches.apply()
    twin = trained(storage, steps=4)
    straight, resumed = twin.mine, trained(storage, steps=0).mine
    saved = te_patches.state_dict_cpu(straight)
    for mine, theirs in zip(
        *([p for g in o.param_groups for p in g["params"]] for o in (straight, resumed)), strict=True
    ):
        theirs.data.copy_(mine.data)
    resumed.load_state_dict(saved)
    if "fp16" in storage or "fp8" in storage:
        straight.load_state_dict(saved)
    attribute = "decoupled_grad" if straight.use_decoupled_grad else "grad"
    for step in range(3):
        torch.manual_seed(step)
        for mine, theirs in zip(
            *([p for g in o.param_groups for p in g["params"]] for o in (straight, resumed)), strict=True
        ):
            grad = torch.randn(mine.shape, device=DEVICE).to(STORAGES[storage].grad)
            setattr(mine, attribute, grad)
            setattr(theirs, attribute, grad.clone())
        straight.step()
        resumed.step()
    names = ("exp_avg", "exp_avg_sq", "master_param")
    for mine, theirs in zip(
        *([p for g in o.param_groups for p in g["params"]] for o in (straight, resumed)), strict=True
    ):
        assert torch.equal(bits(mine), bits(theirs))
        for name in names:
            if name in straight.state[mine]:
                assert torch.equal(bits(straight.state[mine][name]), bits(resumed.state[theirs][name])), name
    assert [g["step"] for g in straight.param_groups] == [g["step"] for g in resumed.param_groups] == [7, 7]


@every_storage
def test_cpu_resumed_training_is_the_training_that_never_stopped(storage):
    check_resume(storage)


@pytest.mark.gpu
@every_storage
def test_gpu_resumed_training_is_the_training_that_never_stopped(storage):
    check_resume(storage)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["remainder", "fp16-moments", "fp8-moments"])
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_gpu_a_load_adds_at_most_64_mib(storage, where):
    te_patches.apply()
    twin = Twin(STORAGES[storage], shapes=[((1 << 24,), 0)] * 16, groups=1)
    twin.fill_gradients()
    twin.step()
    saved = te_patches.state_dict_cpu(twin.mine)
    if where == "cuda":
        saved = {**saved, "state": {k: {n: v.cuda() for n, v in s.items()} for k, s in saved["state"].items()}}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    twin.mine.load_state_dict(saved)
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20
    assert torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    te_patches.state_dict_cpu(twin.mine)
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20
