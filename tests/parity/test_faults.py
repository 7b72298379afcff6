"""Faults of the machine and of the process: kernels that may not be used, memory that runs out, forks, memory pools."""

from __future__ import annotations

import gc
import os
import resource
import warnings
from types import SimpleNamespace

import pytest
import te_patches
import te_release
import torch
from options import Combination
from process import run
from te_patches import _core, _proof, _releases
from twin import Twin, assert_same, bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEWEST = pytest.mark.skipif(
    te_release.chosen() != te_release.RELEASES[-1], reason="the comparison is the same for every release"
)
REMAINDER = Combination(BF16, BF16, "remainder", FP32)
SCALED = Combination(BF16, BF16, "float32", FP16)
# Stock takes neither empty nor 0-dim parameters with scaled states.
SHAPES = [((2049,), 0), ((33, 64), 1), ((7,), 2)]


def test_cpu_a_forked_child_steps_with_threads_of_its_own():
    """The parent's threads do not exist in the child: work handed to them would never end."""
    out = run("""
import os, signal, torch, te_patches.cpu
te_patches.cpu.enable()
from transformer_engine.pytorch.optimizers import FusedAdam
torch.set_num_threads(1)
te_patches.apply()
params = [torch.nn.Parameter(torch.ones(size)) for size in [100_000] + [3] * 300]
optimizer = FusedAdam(params)
for param in params:
    param.grad = torch.ones_like(param)
for _ in range(3):
    optimizer.step()
assert te_patches.report(optimizer)["groups"][0]["recalled"] == 301
child = os.fork()
if child == 0:
    signal.alarm(60)
else:
    assert os.waitpid(child, 0)[1] == 0
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
recalled = te_patches.report(optimizer)["groups"][0]["recalled"]
print(optimizer.param_groups[0]["step"], recalled, *(float(param[2]).hex() for param in params[:2]), flush=True)
os._exit(0)
""")
    lines = out.split("\n")[:2]
    assert lines[0] == lines[1]
    assert lines[0].startswith("4 301 ")


def test_cpu_a_machine_without_nvrtc_is_told_what_is_missing():
    """Only torch's import, or this project's, brings the library where it is found."""
    out = run("""
import importlib.util, pathlib, sys
folder = pathlib.Path(importlib.util.find_spec("te_patches").origin).parent
spec = importlib.util.spec_from_file_location("te_patches._core", next(folder.glob("_core*.so")))
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
assert "torch" not in sys.modules
try:
    core.compile_kernel(core.kernel_variants()[0], 90, False)
except RuntimeError as error:
    print(error)
else:
    print("the library nvidia-cuda-nvrtc is the system's")
""")
    assert "nvidia-cuda-nvrtc" in out


MASTER = {"master_weights": True}
F16 = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
PROOFS = [
    ("bfloat16 bfloat16 float32 float32 remainder host", MASTER | {"store_param_remainders": True}),
    ("float32 bfloat16 bfloat16 bfloat16 float32 host", MASTER | {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}),
    ("bfloat16 float8_e5m2 float32 float32 float32 host", MASTER),
    ("bfloat16 bfloat16 float16 float16 float32 host", MASTER | F16),
    (
        "float32 float32 float16 bfloat16 idle-float16 host",
        MASTER | F16 | {"exp_avg_sq_dtype": BF16, "master_weight_dtype": torch.float16},
    ),
    ("bfloat16 bfloat16 float32 float32 float32 capturable", MASTER | {"capturable": True}),
]


@NEWEST
@pytest.mark.parametrize(("names", "options"), PROOFS, ids=[names.replace(" ", "-") for names, _ in PROOFS])
def test_cpu_the_proof_finds_one_bit(names, options, monkeypatch):
    """On CPU tensors the same code compares the same kernels; a bit that one of them gets wrong is found."""
    names = tuple(name.replace("-", " ") for name in names.split())
    if "float16" in names:
        # Without those sizes that have NaN, whose bits a CPU computes otherwise.
        monkeypatch.setattr(_proof, "_SIZES", (1, 7, 65541))
    module = _releases.import_fused_adam()
    optimizer, release = module.FusedAdam([torch.nn.Parameter(torch.ones(3))], **options), _releases.probe(module)

    def compare():
        with torch.no_grad():
            return _proof._compare(optimizer, torch.device("cpu"), names, release)

    assert compare() is None
    name = "multi_tensor_adam_capturable" if names[5] == "capturable" else "multi_tensor_adam"
    kernel, calls = getattr(_core, name), []

    def wrong(lists, *arguments):
        kernel(lists, *arguments)
        calls.append(arguments)
        if len(calls) == 4:
            tensor = lists[3][-1]
            (tensor[0] if isinstance(tensor, tuple) else tensor).view(torch.uint8)[-1] ^= 1

    # The stand-in for the compiled part has the right ones.
    monkeypatch.setattr(_proof, "_core", SimpleNamespace(**{**vars(_core), name: wrong}))
    assert compare() == f"1 of {_proof._SIZES[-1]} elements differ in step 2, mode 0"


@pytest.mark.gpu
def test_gpu_a_kernel_that_was_shown_to_differ_is_not_used():
    te_patches.apply()
    twin = Twin(REMAINDER)
    names = ("bfloat16", "bfloat16", "float32", "float32", "remainder", "host")

    def step():
        twin.fill_gradients()
        twin.step()
        return {group["tier"] for group in te_patches.report(twin.mine)["groups"]}

    assert step() == {"native"}
    _core.record_proof(0, names, "injected")
    try:
        assert step() == {"replay"}
        reasons = {group["reason"] for group in te_patches.report(twin.mine)["groups"]}
        assert any("injected" in reason for reason in reasons)
        te_patches.apply(kernels="native")
        before = [bits(p).clone() for p in twin.params[0]]
        with pytest.raises(RuntimeError, match="injected"):
            twin.mine.step()
        assert_same([bits(p) for p in twin.params[0]], before, "parameter")
    finally:
        _core.record_proof(0, names, None)
    assert step() == {"native"}


@pytest.mark.gpu
def test_gpu_memory_that_runs_out_while_planning_leaves_everything_as_it_was(monkeypatch):
    """Scaled states need scratch memory; it is taken before any counter moves."""
    te_patches.apply()
    twin = Twin(SCALED, shapes=SHAPES)
    for _ in range(2):
        twin.fill_gradients()
        twin.step()
    twin.fill_gradients()
    before = [bits(p).clone() for p in twin.params[0]], [group["step"] for group in twin.mine.param_groups]
    empty = torch.empty

    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        twin.mine.step()
    monkeypatch.setattr(torch, "empty", empty)
    assert_same([bits(p) for p in twin.params[0]], before[0], "parameter")
    assert [group["step"] for group in twin.mine.param_groups] == before[1]
    twin.step()


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("combination", [REMAINDER, SCALED], ids=str)
def test_gpu_two_thousand_steps_hold_no_more_memory_than_the_first(combination):
    """On the device and on the host, with fresh gradients at other addresses at every step."""
    te_patches.apply()
    twin = Twin(combination, shapes=[((2049,), at % 3) for at in range(20)], groups=2)

    def train(steps):
        for at in range(steps):
            twin.fill_gradients(lambda index, at=at: (index + at) % 7 != 0)
            twin.mine.step()
        twin.fill_gradients(lambda _: False)
        torch.cuda.synchronize()
        gc.collect()
        free, _ = torch.cuda.mem_get_info()
        return torch.cuda.memory_allocated(), free, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    train(100)
    before, after = train(100), train(2000)
    assert after[0] == before[0]
    assert after[1] >= before[1] - (2 << 20), "memory that torch's allocator does not know is kept"
    assert after[2] - before[2] < 2048, "a KiB a step of host memory is kept"


@pytest.mark.gpu
@pytest.mark.parametrize("combination", [REMAINDER, SCALED], ids=str)
def test_gpu_steps_inside_a_memory_pool_equal_those_outside(combination):
    """torch.cuda.MemPool: states, scratch and gradients are made in a pool of the caller's."""
    te_patches.apply()
    twin = Twin(combination, shapes=SHAPES)
    pool = torch.cuda.MemPool()
    for _ in range(3):
        with torch.cuda.use_mem_pool(pool):
            twin.fill_gradients()
            twin.mine.step()
        twin.stock_step(twin.stock)
        twin.compare()
    twin.fill_gradients()
    twin.step()
    torch.cuda.synchronize()
    del twin, pool
    gc.collect()


@pytest.mark.gpu
def test_gpu_a_forked_child_that_ends_leaves_the_parents_kernels_alone():
    te_patches.apply()
    twin = Twin(REMAINDER)
    twin.fill_gradients()
    twin.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        # What data loaders do: look around, touch no device, and end.
        te_patches.report(twin.mine)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(2):
        twin.fill_gradients()
        twin.step()
