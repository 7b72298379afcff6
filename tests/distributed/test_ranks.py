"""FSDP2 on several ranks: stock, patched, and patched resumed on as many and on half as many, equal in all bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from process import environment
from te_patches import _releases

RELEASE = _releases.probe(_releases.import_fused_adam())
SCRIPT = Path(__file__).with_name("fsdp2_train.py")
STEPS, SAVED = 50, 25


def run(out: Path, ranks: int, *arguments: object) -> dict[str, Any]:
    """One training run; its digest."""
    variables = {**environment(), "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, str(SCRIPT), "--out", str(out), "--steps", str(STEPS), *map(str, arguments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def check(tmp_path, storage, ranks):
    if storage == "fp16-moments" and not RELEASE.shards_states:
        pytest.skip("stock cannot make scaled states of DTensors before 2.14")
    common = ("--storage", storage, "--save-at", SAVED, "--checkpoint")
    stock = run(tmp_path / "stock.json", ranks, *common, tmp_path / "stock")
    mine = run(tmp_path / "mine.json", ranks, "--patched", *common, tmp_path / "mine")
    assert mine["losses"] == stock["losses"]
    assert len(set(mine["losses"])) > STEPS // 2
    assert mine["state"] == stock["state"]
    assert mine["state"]["steps"] == [STEPS]
    assert set(mine["tiers"]) == {"native"}
    assert mine["empty_shards"] > 0 or ranks == 1
    for again in sorted({ranks, max(1, ranks // 2)}):
        resume = ("--patched", "--storage", storage, "--resume-at", SAVED, "--checkpoint", tmp_path / "mine")
        resumed = run(tmp_path / f"resumed-{again}.json", again, *resume)
        if storage == "remainder" or again == ranks:
            assert resumed["losses"] == mine["losses"][SAVED:]
            assert resumed["state"] == mine["state"]
        else:
            # fp16 states have a scale per shard: other shards round them otherwise.
            losses = [[float.fromhex(loss) for loss in row] for row in (resumed["losses"], mine["losses"][SAVED:])]
            assert losses[0][0] == losses[1][0]
            assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.parametrize(("storage", "ranks"), [("remainder", 4), ("fp16-moments", 2)])
def test_cpu_ranks_train_save_and_resume_as_stock_does(tmp_path, storage, ranks):
    check(tmp_path, storage, ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["remainder", "fp16-moments"])
def test_gpu_all_devices_train_save_and_resume_as_stock_does(tmp_path, storage):
    check(tmp_path, storage, torch.cuda.device_count())
