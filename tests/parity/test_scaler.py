"""torch's GradScaler where the host decides: not capturable. (Capturable optimizers get it as an argument:
test_capturable.py.)
"""

from __future__ import annotations

import inspect

import pytest
import te_patches
import torch
from options import Combination
from twin import DEVICE, Twin, drive_overflows

FP32 = Combination(torch.float32, torch.float32, "none", torch.float32)
FP16 = Combination(torch.float32, torch.float32, "none", torch.float16)
FP8 = Combination(torch.float32, torch.float32, "none", torch.uint8, exp_avg_sq=torch.float16)


def overflowing(combination):
    """Overflow at the first and at later steps, several groups: skipped steps count as stock's do."""
    te_patches.apply()
    # GradScaler looks at `.grad` only.
    shapes = [((size,), offset) for size, offset in ((3, 1), (85, 0), (2047, 3), (2049, 0), (8256, 0), (65543, 0))]
    twin = Twin(combination, shapes=shapes, groups=3, extra={"use_decoupled_grad": False})
    scalers = [torch.amp.GradScaler(DEVICE, init_scale=1024.0) for _ in twin.optimizers]
    for scaler in scalers:
        scaler.scale(torch.ones(1, device=DEVICE))
    stock_class = type("Stock", (type(twin.stock),), {"step": inspect.unwrap(type(twin.stock).step)})
    twin.stock.__class__ = stock_class

    def step():
        for scaler, optimizer in zip(scalers, twin.optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        if twin.mine.state:
            twin.compare()

    drive_overflows(twin, step)
    assert [group["step"] for group in twin.mine.param_groups] == [3, 3, 3]
    assert {group["tier"] for group in te_patches.report(twin.mine)["groups"]} == {"native"}


@pytest.mark.parametrize("combination", [FP32, FP16], ids=str)
def test_cpu_the_scaler_skips_steps_as_with_stock(combination):
    overflowing(combination)


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("combination", [FP32, FP16, FP8], ids=str)
def test_gpu_the_scaler_skips_steps_as_with_stock(combination):
    overflowing(combination)
