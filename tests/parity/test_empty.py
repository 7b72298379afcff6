"""Zero-element shards: filtered as whole columns, refused where only the gradient is empty, counted all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
import te_patches
import torch
from options import Combination
from te_patches import _releases
from twin import Twin

RELEASE = _releases.probe(_releases.import_fused_adam())
PLACES = {
    "first": [0, 64, 33],
    "last": [64, 33, 0],
    "slot 30 of 33": [64] * 29 + [0] + [64] * 3,
    "slot 36 of 80": [64] * 35 + [0] + [64] * 44,
    "mixed": [1, 1, 0, 1, 0],
    "all": [0, 0],
}
CASES = [
    Combination(torch.bfloat16, torch.bfloat16, "remainder", torch.float32),
    Combination(torch.bfloat16, torch.bfloat16, "float32", torch.float32),
    Combination(torch.float32, torch.float32, "none", torch.float32),
    Combination(torch.float32, torch.float32, "none", torch.float32, capturable=True),
]


def check(sizes, combination, kernels):
    # Stock's own step goes through the patched applier here, which keeps it from crashing on old releases.
    te_patches.apply(kernels=kernels)
    twin = Twin(combination, shapes=[((size,), 0) for size in sizes], groups=1)
    for step in range(1, 4):
        twin.fill_gradients()
        twin.step()
        assert twin.mine.param_groups[0]["step"] == step


@pytest.mark.parametrize("kernels", ["native", "te"])
@pytest.mark.parametrize("combination", CASES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_cpu_empty_shards_are_left_out_and_the_others_updated(place, combination, kernels):
    check(PLACES[place], combination, kernels)


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("kernels", ["native", "te"])
@pytest.mark.parametrize("combination", CASES, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_gpu_empty_shards_are_left_out_and_the_others_updated(place, combination, kernels):
    check(PLACES[place], combination, kernels)


@pytest.mark.parametrize("kernels", ["native", "te", "auto"])
def test_cpu_an_empty_gradient_for_a_nonempty_parameter_is_refused(optimizer_class, kernels):
    te_patches.apply(kernels=kernels)
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = optimizer_class([param], use_decoupled_grad=True)
    param.decoupled_grad = torch.empty(0)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 .*shape \[4\]"):
        optimizer.step()
    assert not optimizer.state
    assert "step" not in optimizer.param_groups[0]


def test_cpu_groups_without_parameters_count_as_the_release_does(optimizer_class):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    counted = []
    for patched in (False, True):
        if patched:
            te_patches.apply()
        optimizer = optimizer_class([{"params": params}, {"params": []}])
        for _ in range(3):
            for param in params:
                param.grad = torch.ones(3)
            optimizer.step()
        counted.append([group.get("step") for group in optimizer.param_groups])
    assert counted[0] == counted[1]
    assert counted[1][1] == (3 if RELEASE.counts_empty_groups else None)


STOCK = """
import sys, torch
import transformer_engine.pytorch
from transformer_engine.pytorch.optimizers import FusedAdam
if sys.argv[1] == "patched":
    import te_patches
    te_patches.apply(kernels=sys.argv[2])
sizes = {"3202": [64] * 35 + [0] + [64] * 44, "3207": [64, 33, 0]}[sys.argv[3]]
params = [torch.nn.Parameter(torch.ones(size, device="cuda")) for size in sizes]
optimizer = FusedAdam(params, lr=0.1)
for param in params:
    param.grad = torch.ones_like(param)
optimizer.step()
torch.cuda.synchronize()
assert all((param < 1).all() for param in params), "not updated"
"""


@pytest.mark.gpu
@pytest.mark.core
@pytest.mark.parametrize("issue", ["3202", "3207"])
def test_gpu_stock_faults_on_empty_tensors_are_gone_with_the_patches(issue):
    """NVIDIA/TransformerEngine issues 3202 (corrupted launch) and 3207 (updates dropped), in processes of their own."""

    def status(*words):
        return subprocess.run([sys.executable, "-c", STOCK, *words], capture_output=True, text=True).returncode

    stock = status("stock", "-", issue)
    assert (stock == 0) == RELEASE.filters_empty, "stock no longer behaves as this release is known to"
    assert status("patched", "native", issue) == 0
    assert status("patched", "te", issue) == 0
