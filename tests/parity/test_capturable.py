"""Capturable mode: CUDA graphs, gradient scaling, counters, learning rates in tensors."""

from __future__ import annotations

import pytest
import te_patches
import torch
from options import Combination
from te_patches import _releases
from twin import DEVICE, Twin, assert_same, drive_overflows

BF16 = Combination(torch.bfloat16, torch.bfloat16, "float32", torch.float32, capturable=True)
FP16 = Combination(torch.float16, torch.float16, "none", torch.float32, capturable=True, bias_correction=False)
# torch's scaler has no kernel for bf16 gradients.
FP16_MASTER = Combination(torch.float16, torch.float16, "float32", torch.float32, capturable=True)
FP32 = Combination(torch.float32, torch.float32, "none", torch.float32, capturable=True)


def scaled(twin, scale):
    twin.scaler = [torch.amp.GradScaler(DEVICE, init_scale=scale) for _ in twin.optimizers]
    for scaler in twin.scaler:
        scaler.scale(torch.ones(1, device=DEVICE))


def overflowing(combination):
    """Overflow at the first and at later steps, several groups: stock's counters, flags and skipped updates."""
    te_patches.apply()
    # GradScaler looks at `.grad` only.
    twin = Twin(combination, groups=3, extra={"use_decoupled_grad": False})
    scaled(twin, 1024.0)

    def step():
        twin.step()
        for scaler in twin.scaler:
            scaler.update()

    drive_overflows(twin, step)
    assert {g["tier"] for g in te_patches.report(twin.mine)["groups"]} == {"native"}


@pytest.mark.parametrize("combination", [BF16, FP32], ids=str)
def test_cpu_overflow_skips_the_update_and_counts_as_stock(combination):
    overflowing(combination)


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("combination", [FP16_MASTER, FP16, FP32], ids=str)
def test_gpu_overflow_skips_the_update_and_counts_as_stock(combination):
    overflowing(combination)


@pytest.mark.gpu
@pytest.mark.parametrize("combination", [BF16, FP16, FP32], ids=str)
def test_gpu_graph_replays_equal_eager_stock(combination):
    te_patches.apply()
    twin = Twin(combination)
    for _ in range(2):
        twin.fill_gradients()
        twin.step()
    twin.fill_gradients()
    attribute = "decoupled_grad" if combination.decoupled else "grad"
    graph = torch.cuda.CUDAGraph()
    # Warmed up above; the capture itself updates nothing.
    with torch.cuda.graph(graph):
        twin.mine.step()
    for replay in range(6):
        for at, params in enumerate(zip(*twin.params, strict=True)):
            fresh = torch.randn(params[0].shape, device=DEVICE).to(combination.grad)
            for side, param in enumerate(params):
                getattr(param, attribute).copy_(fresh)
                twin.gradients[side][at] = getattr(param, attribute)
        for optimizer in twin.optimizers:
            for group in optimizer.param_groups:
                group["lr"].fill_(1e-2 / (replay + 1))
        graph.replay()
        twin.stock_step(twin.stock)
        twin.compare()
        # Later eager work must not disturb what the graph holds.
        junk = [torch.full((1000,), float("nan"), device=DEVICE) for _ in range(100)]
        del junk
    twin.fill_gradients()
    twin.step()


@pytest.mark.gpu
def test_gpu_a_capture_before_any_eager_step_of_ours_is_right():
    """States exist, but this kernel was not compared with stock yet: a capture must neither fail nor differ."""
    moments = torch.bfloat16 if _releases.probe(_releases.import_fused_adam()).bf16_moments_in_kernel else torch.float32
    combination = Combination(torch.bfloat16, torch.bfloat16, "float32", moments, capturable=True)
    twin = Twin(combination)
    twin.fill_gradients()
    for optimizer in twin.optimizers:
        twin.stock_step(optimizer)
    te_patches.apply()
    twin.fill_gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twin.mine.step()
    for _ in range(3):
        graph.replay()
        twin.stock_step(twin.stock)
        twin.compare()


def test_cpu_a_learning_rate_that_is_no_tensor_is_refused(optimizer_class):
    te_patches.apply()
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizer_class([param], capturable=True)
    param.grad = torch.ones(3)
    optimizer.step()
    before = param.detach().clone(), optimizer.param_groups[0]["step"].clone()
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(TypeError, match="learning rate of group 0 as a tensor"):
        optimizer.step()
    assert torch.equal(param, before[0])
    assert torch.equal(optimizer.param_groups[0]["step"], before[1])


@pytest.mark.gpu
def test_gpu_a_learning_rate_on_the_cpu_is_moved(optimizer_class):
    """torch.distributed.checkpoint puts a CPU tensor there for one step; stock would hand its address to the device."""
    te_patches.apply()
    params = [torch.nn.Parameter(torch.ones(100, device="cuda")) for _ in range(2)]
    optimizers = [optimizer_class([p], lr=0.1, capturable=True) for p in params]
    optimizers[0].param_groups[0]["lr"] = torch.tensor(0.1)
    for optimizer, param in zip(optimizers, params, strict=True):
        param.grad = torch.full((100,), 0.5, device="cuda")
        optimizer.step()
    assert_same([params[0]], [params[1]], "parameter")


def test_cpu_an_int_counter_becomes_a_tensor_as_in_stock(optimizer_class):
    counters = []
    for patched in (False, True):
        if patched:
            te_patches.apply()
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = optimizer_class([param], capturable=True)
        optimizer.param_groups[0]["step"] = 7
        param.grad = torch.ones(3)
        optimizer.step()
        counters.append((optimizer.param_groups[0]["step"], param.detach().clone()))
    assert torch.equal(counters[0][0], counters[1][0])
    assert counters[0][0].dtype == counters[1][0].dtype == torch.int32
    assert torch.equal(counters[0][1], counters[1][1])
