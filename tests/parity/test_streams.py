"""The step runs on torch's current stream, from any thread."""

from __future__ import annotations

import threading
import warnings

import pytest
import te_patches
import torch
from options import Combination
from twin import Twin, assert_same

REMAINDER = Combination(torch.bfloat16, torch.bfloat16, "remainder", torch.float32)


@pytest.mark.gpu
def test_gpu_a_side_stream_orders_gradients_step_and_readers():
    te_patches.apply()
    twin = Twin(REMAINDER, shapes=[((1 << 22,), 0)] * 4, groups=1)
    twin.fill_gradients()
    twin.step()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(5):
            for at, params in enumerate(zip(*twin.params, strict=True)):
                torch.cuda._sleep(1_000_000)
                fresh = torch.randn(params[0].shape, device="cuda").bfloat16()
                for side_index, param in enumerate(params):
                    param.decoupled_grad = fresh.clone()
                    twin.gradients[side_index][at] = param.decoupled_grad
            # Neither step synchronises: each must wait for the gradients by its stream alone.
            twin.mine.step()
            twin.stock_step(twin.stock)
            twin.compare()


@pytest.mark.gpu
def test_gpu_two_optimizers_step_from_two_threads_on_two_streams():
    te_patches.apply()
    twins = [Twin(REMAINDER, seed=seed) for seed in (1, 2)]
    errors = []

    def train(twin):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    twin.fill_gradients()
                    twin.step()
        except BaseException as error:
            errors.append(error)

    for twin in twins:
        twin.fill_gradients()
        twin.step()
    torch.cuda.synchronize()
    threads = [threading.Thread(target=train, args=(twin,)) for twin in twins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.gpu
def test_gpu_a_step_does_not_synchronise():
    te_patches.apply()
    twin = Twin(REMAINDER)
    twin.fill_gradients()
    twin.step()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch warns that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        twin.mine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    twin.stock_step(twin.stock)
    assert_same(twin.plain[0], twin.plain[1], "parameter")
