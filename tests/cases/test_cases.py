"""Inputs that broke other fused Adams in public, tried on this one. README.md beside this file lists all of them and
where each is tested; here are those that no other test has word for word.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import subprocess
import sys

import numpy as np
import pytest
import te_patches
import torch
from te_patches import _releases, cpu
from transformer_engine.pytorch.optimizers import FusedAdam, fused_adam
from twin import DEVICE, assert_same, bits

RELEASE = _releases.probe(fused_adam)
BF16, FP16, FP32, U8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8


class Pair:
    """The same parameters twice, stepped by the patches and by stock."""

    def __init__(self, tensors, **options):
        self.params = [[torch.nn.Parameter(t.clone()) for t in tensors] for _ in range(2)]
        self.optimizers = [FusedAdam(params, **options) for params in self.params]
        self.stock = {name: inspect.unwrap(getattr(FusedAdam, name)) for name in ("step", "load_state_dict")}
        self.attribute = "decoupled_grad" if options.get("use_decoupled_grad") else "grad"

    def both(self, action):
        for params, optimizer in zip(self.params, self.optimizers, strict=True):
            action(params, optimizer)

    def fill(self, present=None, dtype=None):
        for at in range(len(self.params[0])):
            shape, kind = self.params[0][at].shape, dtype or self.params[0][at].dtype
            value = torch.randn(shape, device=DEVICE).to(kind) if present is None or present[at] else None
            for params in self.params:
                setattr(params[at], self.attribute, value if value is None else value.clone())

    def step(self, present=None, dtype=None):
        self.fill(present, dtype)
        self.optimizers[0].step()
        self.stock["step"](self.optimizers[1])
        self.compare()

    def load(self, saved):
        self.optimizers[0].load_state_dict(saved)
        self.stock["load_state_dict"](self.optimizers[1], copy.deepcopy(saved))

    def compare(self):
        assert_same(*self.params, what="parameter")
        for mine, theirs in zip(*self.params, strict=True):
            states = [o.state.get(p, {}) for o, p in zip(self.optimizers, (mine, theirs), strict=True)]
            assert states[0].keys() == states[1].keys()
            for name in states[0]:
                assert_same([states[0][name]], [states[1][name]], name)
        for groups in zip(*(o.param_groups for o in self.optimizers), strict=True):
            assert groups[0].get("step") == groups[1].get("step")


def randn(*shape, dtype=FP32):
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("moved", ["all", "moments", "master", "dicts"])
def test_states_moved_away_and_back_are_found_where_they_are(moved):
    """B01"""
    te_patches.apply()
    pair = Pair([randn(1024, 33, dtype=BF16) for _ in range(4)], master_weights=True)
    for _ in range(3):
        pair.step()
    names = {"all": ("exp_avg", "exp_avg_sq", "master_param"), "moments": ("exp_avg", "exp_avg_sq")}
    names |= {"master": ("master_param",), "dicts": ()}

    def move(_, optimizer):
        for param, states in list(optimizer.state.items()):
            for name in names[moved]:
                states[name] = states[name].clone().cpu()
            optimizer.state[param] = dict(states)

    pair.both(move)
    junk = torch.full((1 << 20,), float("nan"), device=DEVICE)

    def back(_, optimizer):
        for states in optimizer.state.values():
            for name in names[moved]:
                states[name] = states[name].clone().to(DEVICE)

    pair.both(back)
    for _ in range(2):
        pair.step()
    assert bool(junk.isnan().all())


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
def test_a_scaler_passes_itself_and_closures_are_served():
    """B05"""
    te_patches.apply()
    param = torch.nn.Parameter(randn(64, dtype=FP16))
    optimizer = FusedAdam([param], capturable=True)
    assert list(inspect.signature(optimizer.step).parameters) == ["closure", "grad_scaler"]
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**16)
    scaler.scale(torch.ones(1, device=DEVICE))
    for planted in (True, False):
        before, scale = param.detach().clone(), scaler.get_scale()
        param.grad = torch.ones_like(param)
        if planted:
            param.grad[3] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, param) == planted
        assert (scaler.get_scale() < scale) == planted
    seen = []

    def closure():
        seen.append(torch.is_grad_enabled())
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3.0
    assert seen == [True]


@pytest.mark.parametrize(("into", "of"), [(True, False), (False, True)])
def test_remainders_and_masters_are_told_apart_through_files_too(into, of, tmp_path):
    """B08"""
    import torch.distributed.checkpoint as dcp

    te_patches.apply()
    optimizers = []
    for remainders in (of, into):
        param = torch.nn.Parameter(randn(4096, dtype=BF16))
        optimizer = FusedAdam([param], master_weights=True, store_param_remainders=remainders)
        param.grad = torch.ones_like(param)
        optimizer.step()
        optimizers.append((param, optimizer))
    (_, source), (param, target) = optimizers
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"state": copy.deepcopy(source.state_dict()["state"][0])}, checkpoint_id=tmp_path, no_dist=True)
    loaded = {"state": {name: torch.empty_like(v) for name, v in source.state_dict()["state"][0].items()}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    before = [bits(state).clone() for state in target.state[param].values()]
    saved = {**target.state_dict(), "state": {0: loaded["state"]}}
    with pytest.raises(AssertionError, match="store_param_remainders"):
        target.load_state_dict(saved)
    assert_same([bits(state) for state in target.state[param].values()], before, "state")


@pytest.mark.parametrize(
    "options",
    [{}, {"exp_avg_dtype": FP16}, {"exp_avg_dtype": BF16}, {"master_weights": True, "master_weight_dtype": FP16}],
    ids=["fp32", "fp16", "bf16", "fp16 master"],
)
@pytest.mark.parametrize("source", [FP32, torch.float64])
def test_moments_take_no_detour_through_the_parameters_dtype(options, source):
    """B09"""
    te_patches.apply()
    pair = Pair([randn(4096, dtype=BF16)], **options)
    pair.step()
    saved = copy.deepcopy(pair.optimizers[0].state_dict())
    states = saved["state"][0]
    states["exp_avg"].fill_(1 + 2**-12)
    states["exp_avg_sq"].fill_(1e-12)
    saved["state"][0] = {name: value.to(source).cpu() for name, value in states.items()}
    pair.load(saved)
    pair.compare()
    if not options:
        assert float(pair.optimizers[0].state[pair.params[0][0]]["exp_avg"][7]) == 1 + 2**-12
    pair.step()


def test_entries_that_are_missing_empty_or_none_leave_nothing_stale():
    """B10"""
    te_patches.apply()
    pair = Pair([randn(100) for _ in range(3)])
    for _ in range(5):
        pair.step()
    saved = copy.deepcopy(pair.optimizers[0].state_dict())
    del saved["state"][1]
    saved["state"][2] = {}
    saved["state"][0]["exp_avg"] = None
    pair.load(saved)
    states = [pair.optimizers[0].state.get(p, {}) for p in pair.params[0]]
    assert [sorted(state) for state in states] == [["exp_avg_sq"], [], []]
    # Both fail alike at the entry that is incomplete, and go on without it.
    for optimizer, step in zip(pair.optimizers, (pair.optimizers[0].step, None), strict=True):
        pair.fill()
        with pytest.raises(KeyError, match="exp_avg"):
            step() if step else pair.stock["step"](optimizer)
        optimizer.param_groups[0]["step"] = 5
        optimizer.state.clear()
    for _ in range(2):
        pair.step()


@pytest.mark.parametrize("shape", [(1,), (), (128, 256)])
def test_shapes_that_would_broadcast_are_refused_and_loaded_betas_count(shape):
    """B11"""
    te_patches.apply()
    pair = Pair([randn(256, 128)], betas=(0.8, 0.95))
    pair.step()
    saved = copy.deepcopy(pair.optimizers[0].state_dict())
    bad = copy.deepcopy(saved)
    bad["state"][0]["exp_avg"] = torch.zeros(shape, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"exp_avg of parameter 0 of group 0.*another shape"):
        pair.optimizers[0].load_state_dict(bad)
    pair.both(lambda _, optimizer: optimizer.param_groups[0].update(betas=(0.9, 0.999)))
    pair.load(saved)
    assert pair.optimizers[0].param_groups[0]["betas"] == (0.8, 0.95)
    pair.step()


def test_only_the_live_groups_count_after_a_load():
    """B13"""
    te_patches.apply()
    pair = Pair([randn(50) for _ in range(2)])
    pair.step()
    kept = [optimizer.param_groups[0] for optimizer in pair.optimizers]
    pair.load(copy.deepcopy(pair.optimizers[0].state_dict()))
    for group, optimizer in zip(kept, pair.optimizers, strict=True):
        assert optimizer.param_groups[0] is not group
        group["lr"] = 9.0
        optimizer.param_groups[0]["lr"] = 1e-5
    before = pair.params[0][0].detach().clone()
    pair.step()
    assert float((pair.params[0][0].detach() - before).abs().max()) < 1e-3
    pair.both(lambda _, o: o.param_groups.__setitem__(0, dict(o.param_groups[0], lr=1e-2)))
    pair.step()
    pair.both(lambda _, o: o.param_groups.reverse())
    pair.step()


def test_every_hyperparameter_is_read_at_every_step():
    """B14"""
    te_patches.apply()
    pair = Pair([randn(300), randn(70)])
    rng = np.random.default_rng(3)
    moving = [torch.tensor(0.1) for _ in range(2)]
    for step in range(20):
        values = rng.uniform(size=4)
        rate = [float(values[0]), np.float32(values[0]), moving][step % 3]
        for tensor in moving:
            tensor.fill_(values[0])

        def change(_, optimizer, step=step, rate=rate, values=values):
            group = optimizer.param_groups[0]
            side = pair.optimizers.index(optimizer)
            group["lr"] = rate[side] if isinstance(rate, list) else rate
            group["weight_decay"], group["eps"] = float(values[1]), float(values[2]) * 1e-6
            group["betas"] = (0.5 + values[3] / 4, 0.9 + values[2] / 20)
            group["bias_correction"] = step % 4 != 1
            optimizer.adam_w_mode = int(step % 5 != 2)

        pair.both(change)
        pair.step()


def test_gradients_that_come_and_go_advance_one_counter():
    """B23"""
    te_patches.apply()
    pair = Pair([randn(40, dtype=BF16), randn(40), randn(40, dtype=BF16)], master_weights=True)
    for presence in ("111", "101", "000", "010", "111", "101"):
        absent = [p.detach().clone() for p in pair.params[0]]
        pair.step([bit == "1" for bit in presence])
        for bit, param, before in zip(presence, pair.params[0], absent, strict=True):
            assert bit == "1" or torch.equal(param, before)
    assert pair.optimizers[0].param_groups[0]["step"] == 6
    plans = te_patches.report(pair.optimizers[0])["groups"][0]["plans"]
    for step in range(200):
        pair.step([step % 2 == 0, True, step % 2 == 1])
    assert te_patches.report(pair.optimizers[0])["groups"][0]["plans"] <= plans + 1


@pytest.mark.parametrize("low", [0x7FFF, 0x8000, 0x8001, 0xFFFF, 0])
def test_remainders_at_the_rounding_edge_are_stocks_and_those_of_whole_masters(low):
    """B37"""
    te_patches.apply()
    count = 1 << 16
    high = torch.randint(0x3C00, 0x4100, (count,), dtype=torch.int32)
    sign = torch.randint(0, 2, (count,), dtype=torch.int32) << 31
    masters = ((high << 16) | low | sign).view(FP32).to(DEVICE)
    odd = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 3e38], device=DEVICE)
    masters[: len(odd)] = odd
    signed = masters.view(torch.int32)
    rest = signed.to(torch.int16)
    rounded = ((signed >> 16) + (rest < 0).int()).to(torch.int16).view(BF16)
    options = {"master_weights": True, "store_param_remainders": True, "lr": 1e-3}
    pair = Pair([rounded], **options)
    whole = FusedAdam([torch.nn.Parameter(rounded.clone())], master_weights=True, lr=1e-3)
    (param,) = whole.param_groups[0]["params"]
    pair.both(lambda params, o: (o.initialize_state(params[0], True), o.state[params[0]]["master_param"].copy_(rest)))
    whole.initialize_state(param, False)
    whole.state[param]["master_param"].copy_(masters)
    for _ in range(100 if low == 0x8000 else 10):
        pair.step()
        param.grad = pair.params[0][0].grad.clone()
        whole.step()
        mine = pair.params[0][0]
        merged = (
            mine.detach().view(torch.int16).int() - (pair.optimizers[0].state[mine]["master_param"] < 0).int()
        ) << 16
        merged |= pair.optimizers[0].state[mine]["master_param"].int() & 0xFFFF
        assert torch.equal(merged, whole.state[param]["master_param"].view(torch.int32))


@pytest.mark.parametrize("capturable", [False, True])
def test_groups_added_and_removed_in_mid_training(capturable):
    """B42"""
    te_patches.apply()
    options = {"capturable": capturable}
    pair = Pair([randn(33)], **options)
    for _ in range(3):
        pair.step()
    extra = randn(20, dtype=BF16)
    rate = torch.tensor(1e-3, device=DEVICE) if capturable else 1e-3

    def add(params, optimizer):
        params.append(torch.nn.Parameter(extra.clone()))
        optimizer.add_param_group({"params": [params[1]], "lr": rate})

    pair.both(add)
    for _ in range(3):
        pair.step()
    assert [int(group["step"]) for group in pair.optimizers[0].param_groups] == [6, 3]
    removed = pair.params[0][0].detach().clone()
    pair.both(lambda _, optimizer: optimizer.param_groups.pop(0))
    pair.step()
    assert torch.equal(pair.params[0][0], removed)


def test_a_reloaded_module_is_patched_anew_and_the_old_class_goes_on():
    """B44"""
    te_patches.apply()
    old = fused_adam.FusedAdam
    param = torch.nn.Parameter(randn(9))
    optimizer = old([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    te_patches.revert()
    kept = dict(vars(fused_adam))
    try:
        module = importlib.reload(fused_adam)
        if cpu.enabled():
            cpu._build_on_cpu(module.FusedAdam)
        te_patches.apply()
        assert module.FusedAdam is not old
        fresh = module.FusedAdam([torch.nn.Parameter(randn(9))])
        assert te_patches.report(fresh)["reached"]
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == 2
        te_patches.revert()
    finally:
        vars(fused_adam).update(kept)


def test_importing_creates_no_context_and_survives_a_fork():
    """B45"""
    code = """
import os, torch, te_patches
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    assert not torch.cuda.is_initialized()
    os._exit(0 if te_patches.report()["applied"] is False else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
