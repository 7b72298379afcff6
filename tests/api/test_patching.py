"""apply, revert, report: idempotent, reversible, at peace with hooks, schedulers and early importers."""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
import threading
import warnings

import pytest
import te_patches
import torch
from te_patches import _hooks, _patching
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformer_engine.pytorch.optimizers import FusedAdam as EarlyImport
from transformer_engine.pytorch.optimizers import fused_adam


def build(**options):
    param = torch.nn.Parameter(torch.ones(5))
    return param, EarlyImport([param], lr=0.1, **options)


def step(param, optimizer, count=1):
    for _ in range(count):
        param.grad = torch.full_like(param, 0.5)
        optimizer.step()


def tier(optimizer):
    return [group["tier"] for group in te_patches.report(optimizer)["groups"]]


def test_the_three_names_are_one_function():
    assert te_patches.apply is te_patches.apply_patches is te_patches.apply_te_patches


def test_apply_is_idempotent_and_revert_restores_the_same_objects():
    before = dict(vars(EarlyImport)), fused_adam.multi_tensor_applier
    te_patches.apply()
    patched = vars(EarlyImport)["step"]
    te_patches.apply()
    assert vars(EarlyImport)["step"] is patched
    assert patched is not before[0]["step"]
    te_patches.revert()
    assert dict(vars(EarlyImport)) == before[0]
    assert fused_adam.multi_tensor_applier is before[1]
    te_patches.revert()


def test_a_class_imported_before_apply_is_reached_and_a_subclass_too():
    class Subclass(EarlyImport):
        pass

    te_patches.apply()
    for cls in (EarlyImport, Subclass):
        param = torch.nn.Parameter(torch.ones(5))
        optimizer = cls([param])
        step(param, optimizer)
        assert tier(optimizer) == ["native"]


def test_the_signature_and_the_names_of_step_are_kept():
    original = inspect.signature(EarlyImport.step)
    te_patches.apply()
    assert inspect.signature(EarlyImport.step) == original
    assert list(inspect.signature(EarlyImport.step).parameters) == ["self", "closure", "grad_scaler"]
    assert EarlyImport.step.__qualname__ == "FusedAdam.step"
    assert EarlyImport.step.__module__ == fused_adam.__name__


@pytest.mark.parametrize("kernels", ["native", "te"])
@pytest.mark.parametrize("built", ["before apply", "after apply"])
def test_hooks_run_once_each_around_the_update(kernels, built):
    if built == "before apply":
        param, optimizer = build()
    te_patches.apply(kernels=kernels)
    te_patches.apply(kernels=kernels)
    if built == "after apply":
        param, optimizer = build()
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", param.detach().clone())))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", param.detach().clone())))
    start = param.detach().clone()
    step(param, optimizer)
    assert [name for name, _ in seen] == ["pre", "post"]
    assert torch.equal(seen[0][1], start)
    assert torch.equal(seen[1][1], param)
    assert not torch.equal(start, param)
    te_patches.revert()
    step(param, optimizer)
    assert [name for name, _ in seen] == ["pre", "post", "pre", "post"]


def test_a_pre_hook_may_change_the_arguments():
    te_patches.apply()
    param, optimizer = build()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        return torch.tensor(3.0)

    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o, closure), {}))
    param.grad = torch.ones(5)
    assert optimizer.step() == 3.0
    assert calls == [True]


def test_torchs_hooks_are_entered_only_where_somebody_listens(monkeypatch):
    entered = []
    by_torch = torch.optim.Optimizer.profile_hook_step

    def counting(step):
        @functools.wraps(step)
        def counted(*args, **kwargs):
            entered.append(1)
            return step(*args, **kwargs)

        return by_torch(counted)

    monkeypatch.setattr(torch.optim.Optimizer, "profile_hook_step", staticmethod(counting))
    te_patches.apply()
    param, optimizer = build()
    seen = []
    hooks = [
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
    ]
    step(param, optimizer)
    assert not entered
    for register in hooks:
        handle = register(lambda o, args, kwargs: seen.append(o))
        step(param, optimizer)
        handle.remove()
        step(param, optimizer)
    assert seen == [optimizer] * 4
    assert len(entered) == 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        step(param, optimizer)
    assert len(entered) == 5
    assert tier(optimizer) == ["native"]
    assert optimizer.param_groups[0]["step"] == 10


def test_an_execution_trace_sees_the_step(tmp_path):
    te_patches.apply()
    param, optimizer = build()
    trace = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    trace.start()
    step(param, optimizer)
    trace.stop()
    trace.unregister_callback()
    nodes = json.loads((tmp_path / "trace.json").read_text())["nodes"]
    assert [node["name"] for node in nodes].count("Optimizer.step#FusedAdam.step") == 1


def test_a_torch_that_does_not_tell_who_listens_gets_its_own_hooks(monkeypatch):
    monkeypatch.setattr(_hooks.ctypes, "PyDLL", lambda path: object())
    te_patches.apply()
    param, optimizer = build()
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(param.detach().clone()))
    step(param, optimizer)
    assert torch.equal(seen[0], param)
    assert tier(optimizer) == ["native"]


def test_one_profiler_range_per_step():
    te_patches.apply()
    param, optimizer = build()
    step(param, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        step(param, optimizer)
    names = [event.name for event in profile.events()]
    assert names.count("Optimizer.step#FusedAdam.step") == 1
    (kernel,) = te_patches.report(optimizer)["groups"][0]["kernels"]
    ours = [name for name in names if name.startswith("te_patches")]
    assert ours == ["te_patches: group 0: read", f"te_patches: group 0: {kernel.removesuffix(' (cpu)')}"]


def test_a_range_that_cannot_be_opened_is_no_reason_not_to_step(monkeypatch):
    te_patches.apply()
    param, optimizer = build()
    step(param, optimizer)
    failures = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: failures.append(raised.exc_value))
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    monkeypatch.setattr(torch._C._profiler, "_RecordFunctionFast", lambda name: None)
    step(param, optimizer)
    monkeypatch.undo()
    assert [type(failure) for failure in failures] == [AttributeError] * 2
    assert optimizer.param_groups[0]["step"] == 2


def test_closures_run_once_before_the_gradients_are_read():
    te_patches.apply()
    param, optimizer = build()
    seen = []

    def closure():
        seen.append(1)
        param.grad = torch.ones(5)
        return torch.tensor(3.0)

    for arguments in ((closure,), ()):
        before = param.detach().clone()
        result = optimizer.step(*arguments) if arguments else optimizer.step(closure=closure)
        assert result == 3.0
        assert not torch.equal(before, param)
    assert seen == [1, 1]


@pytest.mark.parametrize("order", ["scheduler first", "apply first", "reverted"])
def test_schedulers_and_patches_in_any_order(order):
    expected, stock = build()
    schedule = torch.optim.lr_scheduler.LambdaLR(stock, lambda epoch: 1 / (epoch + 1))
    for _ in range(3):
        step(expected, stock)
        schedule.step()
    param, optimizer = build()
    if order != "scheduler first":
        te_patches.apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))
        if order == "scheduler first":
            te_patches.apply()
        if order == "reverted":
            te_patches.revert()
        for _ in range(3):
            step(param, optimizer)
            schedule.step()
    assert torch.equal(param, expected)
    assert optimizer.param_groups[0]["step"] == 3
    # A scheduler built first has pinned stock's step: not counted as patched.
    assert tier(optimizer) == (["native"] if order == "apply first" else [])
    report = te_patches.report(optimizer)
    assert report["reached"] == (order == "apply first")
    assert ("before schedulers are built" in report["remedy"]) == (order == "scheduler first")


def test_revert_declines_when_another_library_patched_on_top():
    te_patches.apply()
    ours = EarlyImport.step

    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    EarlyImport.step = theirs
    try:
        with pytest.raises(RuntimeError, match=r"replaced since by .*theirs"):
            te_patches.revert()
        param, optimizer = build()
        step(param, optimizer)
        assert tier(optimizer) == ["native"]
    finally:
        EarlyImport.step = ours
    te_patches.revert()


def test_apply_declines_when_another_library_patched_first():
    original = vars(EarlyImport)["step"]

    def theirs(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    EarlyImport.step = theirs
    try:
        with pytest.raises(RuntimeError, match=r"theirs before te_patches.apply\(\)"):
            te_patches.apply()
        assert vars(EarlyImport)["step"] is theirs
        assert not te_patches.report()["applied"]
    finally:
        EarlyImport.step = original


def test_a_failure_half_way_leaves_everything_as_it_was(monkeypatch):
    before = vars(EarlyImport)["step"], fused_adam.multi_tensor_applier

    def fail(*_):
        raise RuntimeError("injected")

    monkeypatch.setattr(_patching, "_patch_appliers", fail)
    with pytest.raises(RuntimeError, match="injected"):
        te_patches.apply()
    assert (vars(EarlyImport)["step"], fused_adam.multi_tensor_applier) == before
    assert not te_patches.report()["applied"]


def test_applying_from_many_threads_patches_once():
    barrier = threading.Barrier(8)
    seen = []

    def work():
        barrier.wait()
        te_patches.apply()
        seen.append(vars(EarlyImport)["step"])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, seen))) == 1
    assert not hasattr(inspect.unwrap(EarlyImport.step), "__wrapped__")


def test_live_optimizers_go_on_after_revert_and_apply():
    expected, stock = build()
    step(expected, stock, 4)
    te_patches.apply()
    param, optimizer = build()
    step(param, optimizer)
    te_patches.revert()
    step(param, optimizer)
    te_patches.apply()
    step(param, optimizer, 2)
    assert torch.equal(param, expected)
    assert te_patches.report(optimizer)["groups"][0]["steps"] == 3


def test_the_environment_chooses_and_misspelt_words_are_refused(monkeypatch):
    monkeypatch.setenv("TE_PATCHES", "te")
    te_patches.apply()
    param, optimizer = build()
    step(param, optimizer)
    assert tier(optimizer) == ["replay"]
    te_patches.apply(kernels="native")
    step(param, optimizer)
    assert tier(optimizer) == ["native"]
    te_patches.revert()
    monkeypatch.setenv("TE_PATCHES", "off")
    te_patches.apply(kernels="native")
    assert not te_patches.report()["applied"]
    monkeypatch.setenv("TE_PATCHES", "natve")
    with pytest.raises(ValueError, match=r"'natve'.*auto, native, te, off"):
        te_patches.apply()
    monkeypatch.delenv("TE_PATCHES")
    with pytest.raises(ValueError, match="'fast'"):
        te_patches.apply(kernels="fast")


def test_the_report_names_patches_tiers_and_counters():
    te_patches.apply()
    bf16 = torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
    fp32 = torch.nn.Parameter(torch.ones(3))
    optimizer = EarlyImport([{"params": [bf16]}, {"params": [fp32]}, {"params": []}], master_weights=True)
    assert te_patches.report(optimizer)["groups"] == []
    for _ in range(2):
        bf16.grad, fp32.grad = torch.ones_like(bf16), torch.ones_like(fp32)
        optimizer.step()
    report = te_patches.report(optimizer)
    assert report["applied"]
    assert report["kernels"] == "auto"
    assert report["patches"][0]["target"].endswith("FusedAdam.step")
    first, second, third = report["groups"]
    assert (first["tensors"], first["elements"], first["steps"], first["launches"], first["plans"]) == (1, 7, 2, 2, 1)
    assert first["kernels"] == ["adam: bfloat16 parameter, bfloat16 gradient, float32 moments, float32 master (cpu)"]
    assert second["kernels"] == ["adam: float32 parameter, float32 gradient, float32 moments, no master (cpu)"]
    assert third["reason"] == "no parameters"
    printed = str(report)
    for word in ("applied", "FusedAdam.load_state_dict", "float32 master (cpu)", "no parameters"):
        assert word in printed
    assert "last load" not in printed
    optimizer.load_state_dict(optimizer.state_dict())
    assert "last load, states: " in str(te_patches.report(optimizer))


def test_the_first_step_says_once_which_tiers_serve(caplog):
    te_patches.apply()
    param = torch.nn.Parameter(torch.ones(7))
    optimizer = EarlyImport([{"params": [param]}, {"params": []}])
    param.grad = torch.ones(7)
    with caplog.at_level("INFO", logger="te_patches"):
        for _ in range(2):
            optimizer.step()
    lines = [record.message for record in caplog.records if "first step" in record.message]
    expected = "first step of an optimizer: groups 1 x native, 1 x native (no parameters); 1 tensors in native plans"
    assert lines == [expected]


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment or None)


def test_without_transformer_engine_the_error_says_what_to_install():
    result = run("import te_patches; te_patches.apply()")
    assert result.returncode == 1
    assert "ImportError" in result.stderr
    assert "pip install --no-build-isolation 'transformer-engine[pytorch]'" in result.stderr


def test_importing_neither_starts_cuda_nor_imports_distributed_parts():
    code = (
        "import sys, te_patches, torch;"
        "assert not torch.cuda.is_initialized();"
        "assert 'torch.distributed.tensor' not in sys.modules, 'DTensor was imported'"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
