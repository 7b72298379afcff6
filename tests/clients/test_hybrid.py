"""Inner optimizers that somebody else drives: Megatron's hybrid device optimizer, and dummy steps that make states."""

from __future__ import annotations

import contextlib

import pytest
import torch
from client import compare, everywhere, states
from torch.distributed.checkpoint import state_dict as torch_state_dict
from transformer_engine.pytorch.optimizers import FusedAdam
from twin import DEVICE

SHAPES = ((33, 8), (7,), (4097,))


def side_stream():
    return torch.cuda.stream(torch.cuda.Stream()) if DEVICE == "cuda" else contextlib.nullcontext()


@everywhere
def test_a_hybrid_optimizer_rebinds_groups_and_adds_masters_of_its_own(machine):
    """New group dicts with keys of its own before every step, gradients made on another stream, copies made by a hook
    after the step, and a `master_param` that is the parameter itself, or a copy of it in host memory.
    """

    def sequence(run):
        originals = run.params(*SHAPES)
        clones = [param.detach().clone().float() for param in originals]
        optimizer = FusedAdam(clones, lr=1e-2)
        optimizer.register_step_post_hook(
            lambda *_: [param.data.copy_(clone) for param, clone in zip(originals, clones, strict=True)]
        )
        for step in range(6):
            optimizer.param_groups = [
                {**group, "fused": True, "cpu_optimizer_cls": torch.optim.AdamW} for group in optimizer.param_groups
            ]
            with side_stream():
                run.fill(clones, lambda at, step=step: (at + step) % 3 != 0)
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
            optimizer.step()
            run.note(optimizer, *(param.detach().float().cpu().tolist() for param in originals))
            for clone in clones:
                alien = clone if step % 2 else clone.detach().cpu().clone()
                optimizer.state[clone]["master_param"] = alien
        for slots, name in states(optimizer):
            slots[name] = slots[name].to(DEVICE, copy=True)
        run.step(optimizer, clones)
        return optimizer

    compare(sequence)


@everywhere
@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["AdamW", "L2"])
@pytest.mark.parametrize("by", ["torch", "Megatron-FSDP"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_dummy_step_makes_states_and_nothing_else(machine, by, adam_w_mode):
    """Rate and decay 0, gradients 0 or missing; then real gradients of another dtype through the other attribute."""

    def sequence(run):
        model = torch.nn.ParameterList(run.params(*SHAPES))
        params = list(model)
        optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1, master_weights=True, adam_w_mode=adam_w_mode)
        before = [param.detach().clone() for param in params]
        if by == "torch":
            torch_state_dict.get_optimizer_state_dict(model, optimizer)
        else:
            for at, param in enumerate(params):
                param.grad = None if at == 1 else torch.zeros_like(param)
            kept = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["weight_decay"] = 0.0
            optimizer.step()
            for group, (group["lr"], group["weight_decay"]) in zip(optimizer.param_groups, kept, strict=True):
                group["step"] = 0
            optimizer.zero_grad()
        run.note(optimizer)
        assert all(torch.equal(ours, value) for ours, value in zip(params, before, strict=True))
        assert len(optimizer.state) == len(params)
        optimizer.use_decoupled_grad = True
        for _ in range(3):
            run.step(optimizer, params, attribute="decoupled_grad", dtype=torch.float32)
        return optimizer

    compare(sequence)
