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
@pytest.mark.skipif(not RELEASE.strict_parity, reason="this release gives DTensors no sharded states")
@pytest.mark.parametrize("kernels", ["native", "te"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gpu_sharded_modules_equal_stock(mesh, name, kernels):
    te_patches.apply(kernels=kernels)
    mine = run(mesh, OPTIONS[name], 20)
    expected = "native" if kernels == "native" else "replay"
    assert te_patches.report(mine)["groups"][0]["tier"] == expected


@pytest.mark.skipif(not RELEASE.strict_parity, reason="this release gives DTensors no sharded states")
@pytest.mark.parametrize("kernels", ["native", "te"])
@pytest.mark.parametrize("name", OPTIONS)
def test_cpu_sharded_modules_equal_stock(mesh, name, kernels):
    te_patches.apply(kernels=kernels)
    mine = run(mesh, OPTIONS[name], 5)
    expected = "native" if kernels == "native" else "replay"
    assert te_patches.report(mine)["groups"][0]["tier"] == expected


@pytest.mark.skipif(RELEASE.strict_parity, reason="this release keeps DTensor states sharded")
def test_cpu_states_that_lost_their_sharding_are_left_to_stock(shard):
    """2.10 and 2.11 give a DTensor parameter plain states of the global shape; 2.13 and 2.8 give DTensors."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    te_patches.apply()
    param = torch.nn.Parameter(shard(torch.randn(4, 3)))
    optimizer = FusedAdam([param])
    param.grad = shard(torch.randn(4, 3))
    optimizer.step()
    plain = type(optimizer.state[param]["exp_avg"]) is torch.Tensor
    assert te_patches.report(optimizer)["groups"][0]["tier"] == ("stock" if plain else "native")
