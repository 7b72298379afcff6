"""fp16 and fp8 states and fp16 masters: stored scaled, found and written in two passes."""

from __future__ import annotations

import inspect

import options
import pytest
import te_patches
import te_release
import torch
from te_patches import _releases
from twin import DEVICE, RAGGED, Twin, bits

RELEASE = _releases.probe(_releases.import_fused_adam())
CASES = options.scaled(RELEASE)


def _cpu_fp8() -> bool:
    """Whether this release makes fp8 tensors without a GPU."""
    from transformer_engine.pytorch.tensor.float8_tensor import QuantizedTensor

    return "device" in inspect.signature(QuantizedTensor.__new__).parameters


def _cpu_fp8_views() -> bool:
    """Whether an fp8 tensor can be wrapped, as in a DTensor, without a GPU: up to 2.15 its views ask for one."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    tensor = Float8Quantizer(torch.ones(1), torch.zeros(1), _releases.fp8_dtypes().kFloat8E4M3).make_empty((2,))
    try:
        tensor.view_as(tensor)
    except RuntimeError:
        return False
    return True


def _cpu_cases() -> list[options.Combination]:
    # The kernels are the same for every release; what differs is how it makes and scales its states.
    every = 4 if te_release.chosen() == te_release.RELEASES[-1] else 11
    plain = DEVICE != "cpu" or _cpu_fp8()
    sharded = DEVICE != "cpu" or (plain and _cpu_fp8_views())

    def taken(row: options.Combination) -> bool:
        fp8 = torch.uint8 in (row.exp_avg, row.exp_avg_sq)
        return not fp8 or (sharded if row.sharded else plain)

    return [row for row in CASES[::every] if taken(row)]


CPU_CASES = _cpu_cases()
needs_cpu_fp8 = pytest.mark.skipif(not _cpu_fp8(), reason="this release makes fp8 tensors on a GPU only")
# Around vectors, chunks and tails; a shard without elements among them.
SHAPES = [RAGGED[at] for at in (0, 2, 3, 4, 5, 8, 9, 10, 12)]
FP16 = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
FP8 = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}


def run(combination, shard, steps, **kwargs):
    twin = Twin(combination, wrap=shard if combination.sharded else lambda tensor: tensor, shapes=SHAPES, **kwargs)
    for step in range(steps):
        twin.fill_gradients(lambda at, step=step: step < 2 or (at + step) % 3 != 0)
        twin.step()
    return twin


def tiers(optimizer):
    return {group["tier"] for group in te_patches.report(optimizer)["groups"]}


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("combination", CASES, ids=str)
def test_gpu_scaled_states_equal_stock(combination, shard):
    te_patches.apply(kernels="native")
    assert tiers(run(combination, shard, 10).mine) == {"native"}


# A chunk is 4,096 elements, and is updated 512 chunks after its magnitudes were found: tensors above and below that,
# one behind the other, and more than are updated at once.
AROUND_THE_LAG = [
    [3 << 20, 1, 5 << 20, 7, 4096, 2 << 20, (2 << 20) + 1, 4097],
    [11, (6 << 20) + 5],
    [4096] * 700 + [(1 << 20) + 3] * 3 + [1] * 300,
    [(2 << 20) - 4096, 4095],
]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", AROUND_THE_LAG, ids=lambda sizes: f"{len(sizes)}-tensors")
@pytest.mark.parametrize("combination", CASES[3::37], ids=str)
def test_gpu_tensors_larger_and_smaller_than_the_lag_equal_stock(combination, sizes):
    te_patches.apply(kernels="native")
    twin = Twin(combination, shapes=[((size,), 0) for size in sizes])
    for step in range(3):
        twin.fill_gradients(lambda at, step=step: step == 0 or at % 4 != step)
        twin.step()
    assert tiers(twin.mine) == {"native"}


@pytest.mark.parametrize("combination", CPU_CASES, ids=str)
def test_cpu_scaled_states_equal_stock(combination, shard):
    te_patches.apply(kernels="native")
    assert tiers(run(combination, shard, 4).mine) == {"native"}


@pytest.mark.gpu
@pytest.mark.parametrize("combination", CASES[::9], ids=str)
def test_gpu_infinities_and_nan_in_scaled_states_equal_stock(combination, shard):
    te_patches.apply()
    run(combination, shard, 4, special=True)


def test_cpu_the_lower_tier_of_scaled_states_is_stock(optimizer_class):
    te_patches.apply(kernels="te")
    param = torch.nn.Parameter(torch.ones(5, device=DEVICE))
    optimizer = optimizer_class([param], **FP16)
    param.grad = torch.ones(5, device=DEVICE)
    optimizer.step()
    assert tiers(optimizer) == {"stock"}


def train(optimizer_class, gradients, patched, **arguments):
    te_patches.revert()
    if patched:
        te_patches.apply(kernels="native")
    param = torch.nn.Parameter(torch.linspace(-2, 2, 4099, device=DEVICE))
    optimizer = optimizer_class([param], lr=0.1, **arguments)
    step = optimizer.step if patched else lambda: inspect.unwrap(type(optimizer).step)(optimizer)
    for gradient in gradients:
        param.grad = gradient.clone()
        step()
    return param.detach(), optimizer, param


def zero_gradients(optimizer_class):
    """All-zero gradients: stock's fp8 scale becomes infinite and everything NaN."""
    gradients = [torch.zeros(4099, device=DEVICE), torch.linspace(1, 3, 4099, device=DEVICE)]
    stock, *_ = train(optimizer_class, gradients, False, **FP8)
    assert bool(torch.isnan(stock).all()), "stock was mended: the deviation can go"
    mine, optimizer, param = train(optimizer_class, gradients, True, **FP8)
    plain, *_ = train(optimizer_class, gradients, True)
    assert bool(torch.isfinite(mine).all())
    torch.testing.assert_close(mine, plain, rtol=0.05, atol=0.02)
    state = optimizer.state[param]["exp_avg"]
    assert bool(torch.isfinite(state._quantizer.scale))


@needs_cpu_fp8
def test_cpu_fp8_states_survive_zero_gradients(optimizer_class):
    zero_gradients(optimizer_class)


@pytest.mark.gpu
@pytest.mark.core
def test_gpu_fp8_states_survive_zero_gradients(optimizer_class):
    zero_gradients(optimizer_class)


def tiny_gradients(optimizer_class, arguments):
    """Squares of 1e-18 are fp32 numbers, but the reciprocal of their factor is not."""
    gradients = [torch.full((4099,), 1e-18, device=DEVICE)] * 2
    mine, optimizer, param = train(optimizer_class, gradients, True, **arguments)
    plain, reference, other = train(optimizer_class, gradients, True)
    stored = optimizer.get_unscaled_state(param, "exp_avg_sq")
    torch.testing.assert_close(stored, reference.state[other]["exp_avg_sq"], rtol=0.07, atol=0)
    assert bool(torch.isfinite(mine).all())
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)


@needs_cpu_fp8
@pytest.mark.parametrize("arguments", [FP16, FP8], ids=["fp16", "fp8"])
def test_cpu_scaled_states_hold_very_small_numbers(optimizer_class, arguments):
    tiny_gradients(optimizer_class, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [FP16, FP8], ids=["fp16", "fp8"])
def test_gpu_scaled_states_hold_very_small_numbers(optimizer_class, arguments):
    tiny_gradients(optimizer_class, arguments)


@needs_cpu_fp8
@pytest.mark.parametrize("arguments", [FP16, FP8, {"master_weights": True, "master_weight_dtype": torch.float16}])
def test_cpu_shards_without_elements_have_nothing_to_scale(optimizer_class, arguments):
    """Stock: torch.aminmax raises. Stock's own step is mended as well, for the groups that it serves."""
    for kernels in ("native", "te"):
        te_patches.apply(kernels=kernels)
        params = [torch.nn.Parameter(torch.ones(n, device=DEVICE, dtype=torch.bfloat16)) for n in (0, 7, 0)]
        optimizer = optimizer_class(params, lr=0.1, **arguments)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert bool((params[1] < 1).all())
        te_patches.revert()


def nan_in_a_remainder():
    combination = options.Combination(torch.bfloat16, torch.bfloat16, "remainder", torch.float32)
    te_patches.apply()
    twin = Twin(combination, shapes=[((4097,), 0)], groups=1, special=True)
    twin.fill_gradients()
    for gradients in twin.gradients:
        gradients[0].fill_(0.5)[7] = float("nan")
    for _ in range(2):
        twin.step()
    assert torch.isnan(twin.plain[0][0]).nonzero().tolist() == [[7]]
    return bits(twin.plain[1][0])[7]


def test_cpu_nan_shows_in_a_parameter_with_a_remainder():
    nan_in_a_remainder()


@pytest.mark.gpu
@pytest.mark.core
def test_gpu_nan_shows_in_a_parameter_with_a_remainder():
    """Stock stores NaN as -0.0 there."""
    assert int(nan_in_a_remainder()) == -0x8000


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_cpu_a_missing_scale_is_named_before_anything_changes(optimizer_class, name):
    te_patches.apply()
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = optimizer_class([param], **FP16)
    param.grad = torch.ones(5)
    optimizer.step()
    before = param.detach().clone()
    del optimizer._scales[param][name]
    with pytest.raises(KeyError, match=f"{name}: the scale of this state of parameter 0 of group 0"):
        optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.param_groups[0]["step"] == 1


def test_cpu_parameters_of_no_dimension_are_stepped_like_those_of_one(optimizer_class):
    """Stock's factors have a dimension more than such a state, and cannot be multiplied into it."""
    te_patches.apply()
    params = [torch.nn.Parameter(torch.full(shape, 2.0)) for shape in ((), (1,))]
    for param in params:
        optimizer = optimizer_class([param], lr=0.1, **FP16)
        for _ in range(3):
            param.grad = torch.full_like(param, 0.7)
            optimizer.step()
    assert torch.equal(params[0].view(1), params[1])
    assert float(params[0].detach()) < 2
