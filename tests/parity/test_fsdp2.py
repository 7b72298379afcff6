"""Modules sharded by FSDP2: DTensors with uneven and empty shards, as training scripts have them."""

from __future__ import annotations

import inspect

import pytest
import te_patches
import torch
from te_patches import _releases
from twin import DEVICE, assert_same, bits

RELEASE = _releases.probe(_releases.import_fused_adam())
OPTIONS = {
    "bf16-remainder": {"master_weights": True, "store_param_remainders": True},
    "bf16-master": {"master_weights": True},
    "bf16-moments": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16, "master_weights": True},
}


def build(mesh):
    """First dimensions of 128 (two rows a rank), 70 (an uneven last rank) and 3 (most ranks hold nothing)."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(11)
    model = torch.nn.Sequential(
        torch.nn.Linear(33, 128), torch.nn.Linear(128, 70), torch.nn.LayerNorm(70), torch.nn.Linear(70, 3)
    )
    model = model.to(device=DEVICE, dtype=torch.bfloat16)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fill(models, generator):
    from torch.distributed.tensor import DTensor

    for params in zip(*(model.parameters() for model in models), strict=True):
        local = params[0]._local_tensor
        values = torch.randn(local.shape, generator=generator, device=DEVICE).to(local.dtype)
        for param in params:
            grad = DTensor.from_local(
                values.clone(),
                param.device_mesh,
                param.placements,
                shape=param.shape,
                stride=param.stride(),
                run_check=False,
            )
            param.grad = grad


def run(mesh, options, steps):
    from transformer_engine.pytorch.optimizers import FusedAdam

    models = [build(mesh), build(mesh)]
    mine, stock = (FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1, **options) for model in models)
    stock_step = inspect.unwrap(FusedAdam.step)
    generator = torch.Generator(DEVICE).manual_seed(3)
    empty = [param for param in models[0].parameters() if param._local_tensor.numel() == 0]
    assert empty, "no rank holds an empty shard: the case is not what it says"
    for _ in range(steps):
        fill(models, generator)
        mine.step()
        stock_step(stock)
        assert_same([*models[0].parameters()], [*models[1].parameters()], "parameter")
        for p, q in zip(mine.state, stock.state, strict=True):
            assert mine.state[p].keys() == stock.state[q].keys()
            assert_same([*mine.state[p].values()], [*stock.state[q].values()], "state")
        assert mine.param_groups[0]["step"] == stock.param_groups[0]["step"]
    moved = [param for param in models[0].parameters() if param._local_tensor.numel()]
    assert all(bits(mine.state[param]["exp_avg"]).any() for param in moved)
    return mine


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["native", "te"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gpu_sharded_modules_equal_stock(mesh, name, kernels):
    te_patches.apply(kernels=kernels)
    mine = run(mesh, OPTIONS[name], 20)
    expected = "native" if kernels == "native" else "replay"
    assert te_patches.report(mine)["groups"][0]["tier"] == expected


@pytest.mark.parametrize("kernels", ["native", "te"])
@pytest.mark.parametrize("name", OPTIONS)
def test_cpu_sharded_modules_equal_stock(mesh, name, kernels):
    te_patches.apply(kernels=kernels)
    mine = run(mesh, OPTIONS[name], 5)
    expected = "native" if kernels == "native" else "replay"
    assert te_patches.report(mine)["groups"][0]["tier"] == expected


STATES = {
    "fp32 master": {"master_weights": True},
    "remainder": {"master_weights": True, "store_param_remainders": True},
    "fp16": {
        "master_weights": True,
        "master_weight_dtype": torch.float16,
        "exp_avg_dtype": torch.float16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
}


def stepped(param, optimizer, seed):
    torch.manual_seed(seed)
    shard = type(param.data).from_local
    grad = torch.randn_like(param._local_tensor)
    param.grad = shard(grad, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())
    optimizer.step()


def make(mesh, rows, **options):
    """A parameter of 65 rows over 64 ranks, two of which this rank holds unless `rows` says otherwise."""
    from torch.distributed.tensor import DTensor, Shard
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(5)
    local = torch.randn(rows, 6, device=DEVICE).to(torch.bfloat16)
    param = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], shape=(65, 6), stride=(6, 1)))
    return param, FusedAdam([param], lr=1e-2, **options)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("rows", [2, 0])
def test_cpu_states_are_sharded_like_their_parameter_on_every_release(mesh, name, rows):
    """2.10 and 2.11 would allocate plain tensors of the global shape, and fail with masters."""
    te_patches.apply(kernels="native")
    param, optimizer = make(mesh, rows, **STATES[name])
    stepped(param, optimizer, 1)
    for state in optimizer.state[param].values():
        assert (state.device_mesh, state.placements) == (param.device_mesh, param.placements)
        assert (state.shape, state.stride()) == (param.shape, param.stride())
        assert state._local_tensor.shape == param._local_tensor.shape
    saved = optimizer.state_dict()
    assert {type(value) for value in saved["state"][0].values()} == {type(param.data)}
    assert {value.shape for value in saved["state"][0].values()} == {param.shape}
    again, resumed = make(mesh, rows, **STATES[name])
    again.data._local_tensor.copy_(param._local_tensor)
    resumed.load_state_dict(saved)
    for _ in range(2):
        stepped(param, optimizer, 2)
        stepped(again, resumed, 2)
    assert_same([again], [param], "parameter")
    assert_same([*resumed.state[again].values()], [*optimizer.state[param].values()], "state")


def test_cpu_a_checkpoint_of_global_shapes_still_loads(mesh):
    """What 2.10 and 2.11 saved: plain tensors of the global shape, of which the first elements were used."""
    if RELEASE.shards_states:
        pytest.skip("this release never saved such states")
    te_patches.apply(kernels="native")
    param, optimizer = make(mesh, 2)
    stepped(param, optimizer, 1)
    saved = optimizer.state_dict()
    for name, value in saved["state"][0].items():
        whole = torch.full((65, 6), float("nan"))
        whole.view(-1)[:12] = value._local_tensor.view(-1)
        saved["state"][0][name] = whole
    before = [state._local_tensor.clone() for state in optimizer.state[param].values()]
    optimizer.load_state_dict(saved)
    assert_same([state._local_tensor for state in optimizer.state[param].values()], before, "state")
    stepped(param, optimizer, 2)
