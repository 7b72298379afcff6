"""`python -m te_patches bench`: figures of both sides, and words for what could not be measured."""

from __future__ import annotations

import json

import pytest
import te_patches
import te_release
import torch
from click.testing import CliRunner
from te_patches import _bench
from te_patches.__main__ import main

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    te_release.chosen() != te_release.RELEASES[-1], reason="the measuring is the same for every release"
)


def bench(*arguments):
    done = CliRunner().invoke(main, ["bench", "--tensors", "5", "--elements", "64", "--steps", "2", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_both_sides_of_a_case_are_measured():
    code, out, _ = bench("--case", "plain-bf16-remainder", "--json")
    assert code == 0
    rows = json.loads(out)
    assert [(row["case"], row["tier"]) for row in rows] == [("plain-bf16-remainder", t) for t in ("stock", "native")]
    for row in rows:
        assert 0 < row["host_ms"] <= row["step_ms"]
        assert row["kernel_ms"] > 0
        # 26 bytes an element at the rate of this run.
        assert row["floor_ms"] == pytest.approx(26 * 5 * 64 / row["copy_gbs"] / 1e6)
    assert not te_patches.report()["applied"]


@pytest.mark.skipif(CUDA, reason="a GPU captures graphs")
def test_what_could_not_be_measured_is_named():
    code, out, err = bench("--case", "plain-bf16-capturable-graph", "--case", "plain-bf16-remainder")
    assert code == 1
    assert "plain-bf16-capturable-graph, native: not measured, graphs need a GPU" in " ".join(err.split())
    assert "plain-bf16-remainder" in out


def test_cases_that_do_not_exist_are_refused():
    code, _, err = bench("--case", "plain-bf17")
    assert code == 2
    assert "plain-bf17; there are" in err
    assert "plain-bf16-remainder" in err


def test_a_tier_that_is_not_reached_is_not_measured_under_its_name(monkeypatch):
    monkeypatch.setattr(_bench, "TIERS", {"stock": _bench.stock, "native": _bench.patched("replay")})
    monkeypatch.setitem(_bench.CASES, "fp16", (torch.bfloat16, False, _bench.MASTER | _bench.FP16_MOMENTS, 20, None))
    code, _, err = bench("--case", "fp16")
    assert code == 1
    assert "served by stock" in err
