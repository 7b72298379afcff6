"""NeMo Automodel's recipe: its own configuration, optimizer builder and scheduler (0.7.0 from the package index), and
torch's distributed checkpoint as its checkpointer calls it.
"""

from __future__ import annotations

import importlib
import inspect

import pytest
import te_release
import torch
import torch.distributed.checkpoint as dcp
from client import compare
from torch.distributed.checkpoint import state_dict as torch_state_dict
from transformer_engine.pytorch.optimizers import FusedAdam
from twin import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def nemo(monkeypatch):
    """NeMo's module of optimizers and schedulers."""
    monkeypatch.syspath_prepend(str(te_release.fetch("0.7.0", "nemo-automodel")))
    return importlib.import_module("nemo_automodel.components.optim.optimizer")


def build(run, nemo):
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 3))
    model = model.to(device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(run.random(param.shape))
    config = nemo.FusedAdamConfig(lr=1e-2, betas=[0.9, 0.95], master_weight_dtype="torch.float32")
    (optimizer,) = config.build(model)
    scheduler = nemo.OptimizerParamScheduler(
        optimizer=optimizer,
        init_lr=1e-3,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=2,
        lr_decay_steps=10,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=10,
        wd_incr_style="linear",
    )
    return model, optimizer, scheduler


def train(run, model, optimizer, scheduler, steps):
    for _ in range(steps):
        run.fill(list(model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(1)
        run.note(optimizer)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_automodel_trains_saves_and_resumes_also_from_stocks_checkpoint(nemo, tmp_path, cpu_offload):
    options = torch_state_dict.StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=cpu_offload)

    def optimizer_state(model, optimizer):
        return {"optimizer": torch_state_dict.get_optimizer_state_dict(model, optimizer, options=options)}

    def sequence(run):
        model, optimizer, scheduler = build(run, nemo)
        train(run, model, optimizer, scheduler, 2)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        own = tmp_path / ("patched" if run.patched else "stock")
        dcp.save(optimizer_state(model, optimizer), checkpoint_id=own, no_dist=True)
        # The stock run comes first: the patched one reads what it wrote, and what it wrote itself.
        for folder in (tmp_path / "stock", own):
            model, optimizer, scheduler = build(run, nemo)
            model.load_state_dict(weights)
            state = optimizer_state(model, optimizer)
            dcp.load(state, checkpoint_id=folder, no_dist=True)
            torch_state_dict.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
            run.note(optimizer)
            train(run, model, optimizer, scheduler, 3)
        return optimizer

    compare(sequence)


def test_automodel_sees_the_class_and_signature_it_looks_for(nemo):
    import te_patches

    te_patches.apply()
    assert nemo._is_te_fused_adam(FusedAdam)
    assert not nemo._factory_accepts_foreach(FusedAdam)
    assert list(inspect.signature(FusedAdam.step).parameters) == ["self", "closure", "grad_scaler"]
