"""Quantized parameters: fp8 with delayed scaling, which the kernels write, and the others, which are quantized anew
from their masters.
"""

from __future__ import annotations

import copy
import inspect
import itertools

import pytest
import te_patches
import torch
from te_patches import _releases
from test_many import change_class, change_data, change_quantizer, change_scale_inv, keep_transpose
from twin import DEVICE, TALLY, assert_same

MODULE = _releases.import_fused_adam()
RELEASE = _releases.probe(MODULE)
SHAPES = [(16, 32), (64, 129 * 16), (8192 + 16, 16), (32, 16)]
BF16, FP16, FP32, U8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8


def kind(name):
    return getattr(_releases.fp8_dtypes(), name)


def delayed(values, name="kFloat8E4M3"):
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    scale, amax = (torch.full((1,), x, device=DEVICE) for x in (64.0, 0.25))
    quantizer = Float8Quantizer(scale=scale, amax=amax, fp8_dtype=kind(name))
    tensor = quantizer.make_empty(values.shape, dtype=BF16, device=torch.device(DEVICE))
    quantizer.update_quantized(values, tensor)
    return tensor


def current(values):
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    quantizer = Float8CurrentScalingQuantizer(fp8_dtype=kind("kFloat8E4M3"), device=torch.device(DEVICE))
    tensor = quantizer.make_empty(values.shape, dtype=BF16, device=torch.device(DEVICE))
    quantizer.update_quantized(values, tensor)
    return tensor


def blockwise(values):
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        fp8_dtype=kind("kFloat8E4M3"), rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=2
    )
    tensor = quantizer.make_empty(values.shape, dtype=BF16, device=torch.device(DEVICE))
    # Scales are padded, and nobody writes the padding.
    for scale_inv in (tensor._rowwise_scale_inv, tensor._columnwise_scale_inv):
        scale_inv.zero_()
    quantizer.update_quantized(values, tensor)
    return tensor


INSIDE = ("_data", "_scale_inv", "_transpose", "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv",
          "_columnwise_scale_inv")  # fmt: skip


def inside(param):
    """Everything that a quantized tensor, or the local one of a DTensor, and its quantizer hold."""
    param = getattr(param, "_local_tensor", param)
    found = [getattr(param, name) for name in INSIDE if getattr(param, name, None) is not None]
    quantizer = param._quantizer
    return found + [
        getattr(quantizer, name) for name in ("scale", "amax") if torch.is_tensor(getattr(quantizer, name, None))
    ]


class Pair:
    """The same parameters twice, stepped by stock and by the patches."""

    def __init__(
        self, make, grad_dtype=BF16, plain=(), shapes=SHAPES, decoupled=True, wrap=lambda tensor: tensor, **arguments
    ):
        torch.manual_seed(3)
        values = [torch.randn(shape, device=DEVICE).to(BF16) for shape in shapes]
        others = [torch.randn(33, device=DEVICE).to(dtype) for dtype in plain]
        self.params = [
            [torch.nn.Parameter(make(value)) for value in values]
            + [torch.nn.Parameter(other.clone()) for other in others]
            for _ in range(2)
        ]
        self.optimizers = [
            MODULE.FusedAdam(p, lr=1e-2, weight_decay=0.1, use_decoupled_grad=decoupled, **arguments)
            for p in self.params
        ]
        self.grad_name = "decoupled_grad" if decoupled else "grad"
        self.grad_dtype, self.wrap = grad_dtype, wrap
        self.quantized = len(values)
        self.step_of_stock = inspect.unwrap(MODULE.FusedAdam.step)
        TALLY.combinations += 1

    def step(self):
        for mine, stock in zip(*self.params, strict=True):
            grad = torch.randn(getattr(mine, "_local_tensor", mine).shape, device=DEVICE).to(self.grad_dtype)
            setattr(mine, self.grad_name, self.wrap(grad))
            setattr(stock, self.grad_name, self.wrap(grad.clone()))
        self.optimizers[0].step()
        self.step_of_stock(self.optimizers[1])
        TALLY.steps += 1
        for at, (mine, stock) in enumerate(zip(*self.params, strict=True)):
            if at < self.quantized:
                for ours, theirs in zip(inside(mine), inside(stock), strict=True):
                    assert_same([ours], [theirs], f"inside of parameter {at}")
            else:
                assert_same([mine], [stock], f"parameter {at}")
            states = [optimizer.state[p] for optimizer, p in zip(self.optimizers, (mine, stock), strict=True)]
            for name in states[0]:
                assert_same(*([state[name]] for state in states), what=name)
            scales = [o._scales.get(p, {}) for o, p in zip(self.optimizers, (mine, stock), strict=True)]
            for name in scales[0]:
                assert_same(*([scale[name]] for scale in scales), what=f"scale of {name}")

    def tiers(self):
        return {group["tier"] for group in te_patches.report(self.optimizers[0])["groups"]}


def run(pair, steps):
    for _ in range(steps):
        pair.step()
    assert pair.tiers() == {"native"}


MOMENTS = [(FP32, FP32), (FP16, FP16), (U8, FP16), (BF16, FP32)]
CASES = [
    ({"exp_avg_dtype": m, "exp_avg_sq_dtype": v, "master_weights": True, "master_weight_dtype": w, "adam_w_mode": a}, g)
    for (m, v), w, a, g in itertools.product(MOMENTS, (FP32, FP16), (True, False), (BF16, FP32))
]


def words(case):
    options, grad = case
    return "-".join(str(word).removeprefix("torch.") for word in (*options.values(), grad))


needs_fp8_init = pytest.mark.skipif(
    "empty_like" not in _releases.names(MODULE.FusedAdam._initialize_state),
    reason="this release gives quantized parameters quantized states",
)

cpu_fp8_params = pytest.mark.skipif(
    not RELEASE.quantizes_from_master, reason="this release asks the GPU when it takes fp8 parameters apart"
)


@cpu_fp8_params
@pytest.mark.parametrize("name", ["kFloat8E4M3", "kFloat8E5M2"])
@pytest.mark.parametrize("case", CASES[::3], ids=words)
def test_cpu_fp8_parameters_with_delayed_scaling_equal_stock(case, name):
    te_patches.apply(kernels="native")
    run(Pair(lambda values: delayed(values, name), case[1], **case[0]), 3)


@needs_fp8_init
@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("name", ["kFloat8E4M3", "kFloat8E5M2"])
@pytest.mark.parametrize("case", CASES, ids=words)
def test_gpu_fp8_parameters_with_delayed_scaling_equal_stock(case, name):
    te_patches.apply(kernels="native")
    run(Pair(lambda values: delayed(values, name), case[1], **case[0]), 10)


@pytest.mark.gpu
@pytest.mark.skipif(not RELEASE.quantizes_from_master, reason="this release does not update such parameters")
@pytest.mark.parametrize("make", [current, blockwise])
@pytest.mark.parametrize("case", CASES, ids=words)
def test_gpu_other_quantized_parameters_equal_stock(case, make):
    if make is current and not RELEASE.delayed_scaling_apart:
        pytest.skip("this release gives them to its FP8 kernel")
    te_patches.apply(kernels="native")
    run(Pair(make, case[1], **case[0]), 10)


@needs_fp8_init
@pytest.mark.gpu
@pytest.mark.parametrize("plain", [(BF16,), (FP32,), (BF16, FP32)], ids=str)
def test_gpu_fp8_beside_plain_parameters_equal_stock(plain):
    te_patches.apply(kernels="native")
    run(Pair(delayed, BF16, plain, master_weights=True), 5)


def seeded_and_given_new_quantizers():
    """Masters are set before the first step (as examples of FSDP2 with fp8 parameters do), and quantizers and their
    scales are other objects at every step (as recipes that change their scaling do).
    """
    te_patches.apply(kernels="native")
    pair = Pair(lambda values: delayed(values, "kFloat8E4M3"), FP32, master_weights=True)
    torch.manual_seed(4)
    masters = [torch.randn(shape, device=DEVICE) for shape in SHAPES]
    for params, optimizer in zip(pair.params, pair.optimizers, strict=True):
        for param, master in zip(params, masters, strict=True):
            optimizer.initialize_state(param, False)
            optimizer.set_scaled_state(param, "master_param", master.clone())
    for step in range(3):
        pair.step()
        for params in pair.params:
            for param in params:
                quantizer = copy.copy(param._quantizer)
                quantizer.scale = quantizer.scale * (step + 2)
                quantizer.amax = torch.zeros_like(quantizer.amax)
                param._quantizer = quantizer
    pair.step()
    assert pair.tiers() == {"native"}


@cpu_fp8_params
def test_cpu_fp8_parameters_seeded_and_given_new_quantizers_equal_stock():
    seeded_and_given_new_quantizers()


@pytest.mark.gpu
@needs_fp8_init
def test_gpu_fp8_parameters_seeded_and_given_new_quantizers_equal_stock():
    seeded_and_given_new_quantizers()


@cpu_fp8_params
def test_cpu_fp8_beside_plain_parameters_equal_stock():
    te_patches.apply(kernels="native")
    run(Pair(delayed, BF16, (BF16, FP32), master_weights=True), 3)


def refused(match, **arguments):
    te_patches.apply()
    values = torch.randn(16, 32, device=DEVICE).to(BF16)
    param = torch.nn.Parameter(delayed(values))
    optimizer = MODULE.FusedAdam([param], use_decoupled_grad=True, **arguments)
    param.decoupled_grad = torch.ones_like(values)
    before = param._data.clone()
    with pytest.raises(RuntimeError, match=match):
        optimizer.step()
    assert torch.equal(param._data, before)
    assert not optimizer.state
    assert "step" not in optimizer.param_groups[0]


def change_dtype(param):
    """The same bytes, read as the other fp8 dtype from then on."""
    other = kind("kFloat8E5M2")
    param._quantizer = param._quantizer.copy()
    param._fp8_dtype = param._quantizer.dtype = other


# And how many of twenty parameters are read in full from then on.
CHANGES = {
    change_data: 0,
    change_scale_inv: 0,
    change_quantizer: 0,
    change_dtype: 0,
    change_class: 1,
    keep_transpose: 0,
}
# Others than Python's own enum makes a new object of a dtype for each tensor, and such a tensor is read in full.
own_enum = pytest.mark.skipif(not hasattr(MODULE, "DType"), reason="this release's dtypes are not objects of their own")


def inside_is_read_at_every_step(change, decoupled, wrap):
    te_patches.apply(kernels="native")
    make = lambda values: wrap(delayed(values))  # noqa: E731
    pair = Pair(make, shapes=[(32, 16)] * 20, decoupled=decoupled, wrap=wrap, master_weights=True)
    for step in range(6):
        pair.step()
        recalled = te_patches.report(pair.optimizers[0])["groups"][0]["recalled"]
        # Gradients may be of kinds that differ in bits that torch never wrote, and were not met before.
        least, most = (0 if step in (0, 3) else 5), 20 - (CHANGES[change] if step > 2 else 0 if step else 20)
        assert least <= recalled <= most
        if step == 2:
            # Stock writes all fp8 parameters of a group as one dtype.
            changed = slice(None) if change is change_dtype else slice(7, 8)
            for param in (param for params in pair.params for param in params[changed]):
                change(getattr(param, "_local_tensor", param))
    assert pair.tiers() == {"native"}


WRAPPED = pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "dtensor"])


@own_enum
@cpu_fp8_params
@WRAPPED
@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_cpu_the_inside_of_an_fp8_parameter_is_read_at_every_step(change, decoupled, wrapped, shard):
    inside_is_read_at_every_step(change, decoupled, shard if wrapped else lambda tensor: tensor)


@pytest.mark.gpu
@own_enum
@needs_fp8_init
@WRAPPED
@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_gpu_the_inside_of_an_fp8_parameter_is_read_at_every_step(change, decoupled, wrapped, shard):
    inside_is_read_at_every_step(change, decoupled, shard if wrapped else lambda tensor: tensor)


@cpu_fp8_params
def test_cpu_a_gradient_of_another_shape_is_refused_before_anything_changes():
    te_patches.apply()
    values = torch.randn(16, 32, device=DEVICE).to(BF16)
    param = torch.nn.Parameter(delayed(values))
    optimizer = MODULE.FusedAdam([param], use_decoupled_grad=True, master_weights=True)
    param.decoupled_grad = torch.ones_like(values)
    optimizer.step()
    before = param._data.clone()
    param.decoupled_grad = torch.ones(32, 16, dtype=BF16)
    with pytest.raises(RuntimeError, match=r"the gradient of parameter 0 of group 0 .* has another shape"):
        optimizer.step()
    assert torch.equal(param._data, before)
    assert optimizer.param_groups[0]["step"] == 1


@cpu_fp8_params
def test_cpu_an_fp8_parameter_without_a_master_is_refused():
    """Stock never updates it and says nothing."""
    refused("without master_weights does not support Float8Tensor", master_weights=False)


@cpu_fp8_params
def test_cpu_an_fp8_parameter_in_capturable_mode_is_refused():
    refused("does not support FP8 model weights with capturable=True", master_weights=True, capturable=True)


@pytest.mark.gpu
def test_gpu_an_fp8_parameter_without_a_master_is_refused():
    refused("without master_weights does not support Float8Tensor", master_weights=False)


def block_scaled(name, values, quantized):
    """An MXFP8Tensor or NVFP4Tensor around `values`, made without the GPU that has them: it knows its values, and keeps
    what it is quantized from.
    """
    from transformer_engine.pytorch import tensor

    base = getattr(tensor, name, None)
    if base is None or not RELEASE.quantizes_from_master:
        pytest.skip(f"this release has no {name}, or takes none")

    codes = {"fp4_dtype" if "FP4" in name else "fp8_dtype": kind("kFloat4E2M1" if "FP4" in name else "kFloat8E4M3")}
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax_rowwise")
    inside = {word: torch.zeros(16, dtype=U8, device=DEVICE) for word in (*names, "amax_columnwise")}
    inside |= {"quantizer": None, "with_gemm_swizzled_scales": False, **codes}
    inside["rowwise_data"] = torch.zeros(
        len(values), values.shape[1] // (2 if "FP4" in name else 1), dtype=U8, device=DEVICE
    )
    accepted = inspect.signature(base.__new__).parameters
    inside = {word: value for word, value in inside.items() if word in accepted}
    try:
        param = torch.nn.Parameter(base(values.shape, BF16, device=torch.device(DEVICE), **inside))
    except RuntimeError as error:
        if "NVIDIA driver" not in str(error):
            raise
        pytest.skip("this release wraps quantized tensors on a GPU only")
    param.dequantize = lambda *, dtype=None: values.to(dtype or BF16)
    param.quantize_ = lambda value, **_: quantized.append(value.detach().clone())
    return param


def check_block_scaled(name, master, moment):
    te_patches.apply(kernels="native")
    torch.manual_seed(1)
    arguments = {"master_weights": True, "master_weight_dtype": master, "use_decoupled_grad": True}
    arguments |= {"exp_avg_dtype": moment, "exp_avg_sq_dtype": moment, "lr": 1e-2, "weight_decay": 0.1}
    values = [torch.randn(32, 64, device=DEVICE).to(BF16) for _ in range(2)]
    sides = []
    for _ in range(2):
        quantized: list[torch.Tensor] = []
        params = [block_scaled(name, value, quantized) for value in values]
        params.append(torch.nn.Parameter(torch.ones(33, device=DEVICE, dtype=FP32)))
        sides.append((MODULE.FusedAdam(params, **arguments), params, quantized))
    for _ in range(3):
        grads = [torch.randn(32, 64, device=DEVICE).to(BF16) for _ in values]
        grads.append(torch.randn(33, device=DEVICE))
        for _, params, _ in sides:
            for param, grad in zip(params, grads, strict=True):
                param.decoupled_grad = grad.clone()
        sides[0][0].step()
        inspect.unwrap(MODULE.FusedAdam.step)(sides[1][0])
        assert_same(sides[0][2], sides[1][2], "value quantized")
        for key in ("exp_avg", "exp_avg_sq", "master_param"):
            assert_same(*([side[0].state[p][key] for p in side[1]] for side in sides), what=key)
        assert_same([sides[0][1][2]], [sides[1][1][2]], "parameter")
    assert len(sides[0][2]) == 6
    assert {group["tier"] for group in te_patches.report(sides[0][0])["groups"]} == {"native"}


BLOCKS = [*itertools.product(["MXFP8Tensor", "NVFP4Tensor"], [FP32, FP16], [FP32, BF16, FP16])]


@pytest.mark.parametrize(("name", "master", "moment"), BLOCKS)
def test_cpu_block_scaled_parameters_step_through_their_masters_as_in_stock(name, master, moment):
    check_block_scaled(name, master, moment)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "master", "moment"), BLOCKS)
def test_gpu_block_scaled_parameters_step_through_their_masters_as_in_stock(name, master, moment):
    check_block_scaled(name, master, moment)
