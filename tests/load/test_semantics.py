"""Loading behaves as stock's does in everything but where the values lie: groups, hooks, missing and extra entries."""

from __future__ import annotations

import copy
import inspect
import logging

import pytest
import te_patches
import torch
from storages import addresses, assert_unchanged, goes_on, load, snapshot, trained
from twin import DEVICE, assert_same, bits

BOTH = pytest.mark.parametrize("storage", ["remainder", "fp16-moments"])


def saved_of(storage):
    return copy.deepcopy(trained(storage, seed=1).stock.state_dict())


def same_groups(twin):
    mine, stock = ([{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in twin.optimizers)
    assert mine == stock
    assert [list(g) for g in twin.mine.param_groups] == [list(g) for g in twin.stock.param_groups]


@BOTH
def test_hyperparameters_and_steps_of_groups_are_the_checkpoints(storage):
    te_patches.apply()
    saved = saved_of(storage)
    saved["param_groups"][0] |= {"lr": 0.25, "betas": [0.5, 0.75], "step": 40, "initial_lr": 1.0, "name": "decay"}
    del saved["param_groups"][1]["step"]
    twin = trained(storage)
    kept = twin.mine.param_groups
    load(twin, saved)
    same_groups(twin)
    assert twin.mine.param_groups is not kept
    saved["param_groups"][0]["betas"][0] = 0.9
    assert twin.mine.param_groups[0]["betas"][0] == 0.5
    for _ in range(2):
        twin.fill_gradients()
        twin.step()
    assert [group["step"] for group in twin.mine.param_groups] == [42, 2]


@BOTH
def test_parameters_that_the_checkpoint_lacks_start_anew(storage):
    te_patches.apply()
    saved = saved_of(storage)
    for key in (0, 4, 8):
        del saved["state"][key]
    saved["state"][2] = {}
    twin = trained(storage)
    load(twin, saved)
    assert len(twin.mine.state) == len(twin.stock.state)
    twin.fill_gradients()
    twin.step()
    goes_on(twin)


@BOTH
def test_none_is_skipped_and_foreign_keys_are_kept(storage):
    te_patches.apply()
    saved = saved_of(storage)
    saved["state"][3] = dict.fromkeys(saved["state"][3])
    saved["state"]["not a parameter"] = {"note": 1}
    twin = trained(storage)
    load(twin, saved)
    for optimizer in twin.optimizers:
        assert optimizer.state.pop("not a parameter") == {"note": 1}
    assert [len(twin.optimizers[side].state[twin.params[side][1]]) for side in (0, 1)]
    twin.fill_gradients()
    twin.step()


def test_a_checkpoint_without_masters_fails_at_the_next_step_as_stock_does():
    te_patches.apply()
    saved = saved_of("bf16-master")
    for values in saved["state"].values():
        del values["master_param"]
    twin = trained("bf16-master")
    load(twin, saved)
    twin.fill_gradients()
    for step in (twin.mine.step, lambda: twin.stock_step(twin.stock)):
        with pytest.raises(KeyError, match="master_param"):
            step()


@BOTH
def test_names_as_ids_load_like_numbers(storage):
    te_patches.apply()
    saved = saved_of(storage)
    saved["state"] = {f"layer.{key}": values for key, values in saved["state"].items()}
    for group in saved["param_groups"]:
        group["params"] = [f"layer.{key}" for key in group["params"]]
    twin = trained(storage)
    load(twin, saved)
    goes_on(twin)


@BOTH
def test_hooks_run_in_torchs_order_and_once(storage):
    te_patches.apply()
    twin = trained(storage)
    calls: list[list[str]] = [[], []]
    for side, optimizer in enumerate(twin.optimizers):

        def first(_, saved, side=side):
            calls[side].append("pre 1")
            return {**saved, "param_groups": [{**group, "lr": 0.125} for group in saved["param_groups"]]}

        def second(_, saved, side=side):
            calls[side].append(f"pre 2 lr {saved['param_groups'][0]['lr']}, {len(saved['state'])} states")

        def after(optimizer, side=side):
            calls[side].append(f"post lr {optimizer.param_groups[0]['lr']}, {len(optimizer.state)} states")

        optimizer.register_load_state_dict_pre_hook(first)
        optimizer.register_load_state_dict_pre_hook(second)
        optimizer.register_load_state_dict_post_hook(after)
    load(twin, saved_of(storage))
    assert calls[0] == calls[1]
    assert len(calls[0]) == 3
    same_groups(twin)
    goes_on(twin)


def test_a_post_hook_sees_what_was_loaded():
    """Stock calls it before the states are there, so that it sees copies in the parameter's dtype."""
    te_patches.apply()
    twin = trained("remainder")
    seen = []
    twin.mine.register_load_state_dict_post_hook(
        lambda optimizer: seen.append({n: s.dtype for n, s in optimizer.state[twin.params[0][0]].items()})
    )
    twin.mine.load_state_dict(twin.mine.state_dict())
    assert seen == [{"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "master_param": torch.int16}]


def test_states_of_a_dict_that_a_hook_returns_are_not_read_as_in_stock():
    te_patches.apply()
    twin = trained("fp32")
    other = saved_of("fp32")
    for values in other["state"].values():
        values["exp_avg"] = values["exp_avg"] * 2
    for optimizer in twin.optimizers:
        optimizer.register_load_state_dict_pre_hook(lambda *_: copy.deepcopy(other))
    load(twin, saved_of("fp32"))
    goes_on(twin)


def test_subclasses_write_states_their_own_way(optimizer_class):
    te_patches.apply()
    seen = []

    class Mine(optimizer_class):
        def set_scaled_state(self, param, state_name, unscaled_state):
            seen.append(state_name)
            super().set_scaled_state(param, state_name, unscaled_state)

        def load_state_dict(self, state_dict):
            seen.append("load")
            super().load_state_dict(state_dict)

    for options in ({}, {"exp_avg_dtype": torch.float16, "master_weights": True}):
        seen.clear()
        params = [torch.nn.Parameter(torch.randn(9, device=DEVICE).bfloat16()) for _ in range(2)]
        optimizer = Mine(params, **options)
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        kept = copy.deepcopy(saved)
        seen.clear()
        optimizer.load_state_dict(saved)
        names = list(saved["state"][0])
        assert seen == ["load", *names, *names]
        assert_same(
            [saved["state"][k][n] for k in (0, 1) for n in names],
            [kept["state"][k][n] for k in (0, 1) for n in names],
            "the caller's tensor",
        )
        with pytest.raises(RuntimeError, match="another shape"):
            optimizer.load_state_dict({**saved, "state": {0: {"exp_avg": torch.zeros(2)}}})
        optimizer.step()


def test_instances_that_write_states_their_own_way_are_heeded():
    te_patches.apply()
    twin = trained("fp32")
    seen = []
    original = twin.mine.set_scaled_state
    twin.mine.set_scaled_state = lambda *arguments: (seen.append(arguments[1]), original(*arguments))
    twin.mine.load_state_dict(copy.deepcopy(twin.mine.state_dict()))
    del twin.mine.set_scaled_state
    assert len(seen) == 2 * len(twin.params[0])
    goes_on(twin)


@BOTH
def test_an_optimizer_copied_or_pickled_fails_as_stock_does(storage):
    te_patches.apply()
    twin = trained(storage)
    saved = twin.mine.state_dict()
    lost = copy.deepcopy(twin.mine)
    with pytest.raises(AttributeError):
        lost.load_state_dict(saved)
    goes_on(twin)


def test_masters_that_the_optimizer_does_not_use_are_kept_and_never_written_into_parameters():
    """Megatron's hybrid optimizer puts the parameter itself into the state as a master."""
    te_patches.apply()
    twin = trained("fp32")
    for side, optimizer in enumerate(twin.optimizers):
        for param in twin.params[side]:
            optimizer.state[param]["master_param"] = param.data
    saved = copy.deepcopy(twin.stock.state_dict())
    for values in saved["state"].values():
        values["master_param"] += 1
    before = [p.detach().clone() for p in twin.params[0]]
    load(twin, saved)
    assert_same(twin.params[0], before, "parameter")
    for optimizer, params in zip(twin.optimizers, twin.params, strict=True):
        for param in params:
            optimizer.state[param].pop("master_param")
    goes_on(twin)


def check_capturable(optimizer_class):
    te_patches.apply()
    params = [torch.nn.Parameter(torch.randn(9, device=DEVICE)) for _ in range(2)]
    optimizer = optimizer_class(params, lr=0.5, capturable=True)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    saved = te_patches.state_dict_cpu(optimizer)
    assert saved["param_groups"][0]["lr"].device.type == "cpu"
    for change in (lambda group: group, lambda group: group | {"lr": 0.25, "step": 7}):
        group = change(dict(saved["param_groups"][0]))
        optimizer.load_state_dict({**saved, "param_groups": [group]})
        loaded = optimizer.param_groups[0]
        for name, dtype in (("lr", torch.float32), ("step", torch.int32)):
            assert (loaded[name].device.type, loaded[name].dtype) == (DEVICE, dtype)
            assert float(loaded[name]) == float(group[name])
        optimizer.step()
        assert int(optimizer.param_groups[0]["step"]) == int(group["step"]) + 1


def test_cpu_capturable_optimizers_keep_rate_and_step_on_the_device(optimizer_class):
    check_capturable(optimizer_class)


@pytest.mark.gpu
def test_gpu_capturable_optimizers_keep_rate_and_step_on_the_device(optimizer_class):
    check_capturable(optimizer_class)


def test_progress_is_shown_on_stderr_if_asked(capsys, monkeypatch):
    from te_patches import _load, _settings

    with _load.shown(1 << 20, True) as advance:
        advance(1 << 19)
        advance(1 << 19)
    assert "optimizer states" in capsys.readouterr().err
    for total, wanted in ((0, True), (1 << 20, False)):
        with _load.shown(total, wanted) as advance:
            assert advance is None
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TE_PATCHES_PROGRESS", "1")
    assert _settings.choose_progress(None)
    assert not _settings.choose_progress(False)
    monkeypatch.setenv("TE_PATCHES_PROGRESS", "yes")
    with pytest.raises(ValueError, match="TE_PATCHES_PROGRESS='yes'"):
        te_patches.apply()


@pytest.mark.gpu
def test_gpu_progress_counts_the_bytes_of_host_memory(capsys):
    te_patches.apply(progress=True)
    twin = trained("remainder")
    saved = te_patches.state_dict_cpu(trained("remainder", seed=1).stock)
    capsys.readouterr()
    load(twin, saved)
    assert "optimizer states" in capsys.readouterr().err
    goes_on(twin)


def test_the_switch_is_off_after_revert():
    te_patches.apply()
    twin = trained("remainder")
    before = addresses(twin.mine)
    te_patches.revert()
    assert not hasattr(type(twin.mine).load_state_dict, "__wrapped__")
    twin.mine.load_state_dict(copy.deepcopy(twin.stock.state_dict()))
    assert addresses(twin.mine).keys() == before.keys()
    assert addresses(twin.mine) != before


# --- checkpoints of torch.optim ---------------------------------------------------------------------------------------


def torch_checkpoint(params, kind=torch.optim.AdamW, steps=3, **options):
    clones = [torch.nn.Parameter(p.detach().clone().float()) for p in params]
    optimizer = kind(clones, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **options)
    for _ in range(steps):
        for param in clones:
            param.grad = torch.randn_like(param)
        optimizer.step()
    return optimizer.state_dict()


MASTERS = {
    "none": {},
    "remainder": {"master_weights": True, "store_param_remainders": True},
    "master": {"master_weights": True},
    "fp16": {"master_weights": True, "master_weight_dtype": torch.float16, "exp_avg_dtype": torch.float16},
}


@pytest.mark.parametrize("options", MASTERS.values(), ids=list(MASTERS))
def test_a_checkpoint_of_torchs_adamw_is_converted(optimizer_class, options, caplog):
    te_patches.apply()
    params = [torch.nn.Parameter(torch.randn(33, 5, device=DEVICE).bfloat16()) for _ in range(3)]
    saved = torch_checkpoint(params)
    optimizer, expected = (
        optimizer_class([torch.nn.Parameter(p.detach().clone()) for p in params], **options) for _ in "ab"
    )
    with caplog.at_level(logging.INFO, logger="te_patches"):
        optimizer.load_state_dict(saved)
    assert sum("torch.optim" in record.message for record in caplog.records) == 1
    # By hand: the same moments, the step of the group, masters made of the parameters.
    by_hand = expected.param_groups[0]["params"]
    for index, param in enumerate(by_hand):
        expected.initialize_state(param, bool(options.get("store_param_remainders")))
        for name in ("exp_avg", "exp_avg_sq"):
            expected.set_scaled_state(param, name, saved["state"][index][name].clone())
    group = saved["param_groups"][0]
    expected.param_groups[0] |= {"step": 3, "lr": group["lr"], "betas": group["betas"], "weight_decay": 0.1}
    for mine, theirs in zip(optimizer.param_groups[0]["params"], by_hand, strict=True):
        for name, state in expected.state[theirs].items():
            assert torch.equal(bits(optimizer.state[mine][name]), bits(state)), name
        mine.grad = torch.randn_like(mine)
        theirs.grad = mine.grad.clone()
    optimizer.step()
    expected.step()
    assert optimizer.param_groups[0]["step"] == 4
    assert not {"amsgrad", "foreach", "fused"} & optimizer.param_groups[0].keys()
    assert_same(optimizer.param_groups[0]["params"], by_hand, "parameter")


def test_checkpoints_of_torchs_that_mean_something_else_are_refused(optimizer_class):
    te_patches.apply()
    params = [torch.nn.Parameter(torch.randn(9, device=DEVICE)) for _ in range(2)]
    optimizer = optimizer_class(params, weight_decay=0.1)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    before = snapshot(optimizer)
    uneven = torch_checkpoint(params)
    uneven["state"][1]["step"] += 1
    old = torch_checkpoint(params)
    old["param_groups"][0].pop("decoupled_weight_decay")
    for saved, words in (
        (torch_checkpoint(params, amsgrad=True), "amsgrad"),
        (torch_checkpoint(params, maximize=True), "maximize"),
        (torch_checkpoint(params, torch.optim.Adam), "decoupled"),
        (old, "decoupled"),
        (uneven, "different steps"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(saved)
    assert_unchanged(optimizer, before)


def test_the_patch_keeps_the_methods_name_and_signature(optimizer_class):
    stock = optimizer_class.load_state_dict
    te_patches.apply()
    patched = optimizer_class.load_state_dict
    assert patched is not stock
    assert inspect.signature(patched) == inspect.signature(stock)
    assert (patched.__name__, patched.__qualname__, patched.__module__) == (
        stock.__name__,
        stock.__qualname__,
        stock.__module__,
    )
