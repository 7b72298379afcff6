"""`python -m te_patches verify`: a verdict that holds, and one that sees what differs."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
import te_patches
import te_release
from te_patches import _verify
from twin import DEVICE

NEWEST = te_release.chosen() == te_release.RELEASES[-1]
ROWS = list(_verify.every_option())


@pytest.mark.skipif(not NEWEST, reason="the newest release takes every option")
def test_every_option_is_compared_and_equal(capsys):
    assert _verify.report(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["options"], found["unequal"]) == ("EQUAL", len(ROWS), 0)
    assert found["elements"] > 10_000_000
    options = [outcome["options"] for outcome in found["outcomes"]]
    pairs = {(o["exp_avg"], o["exp_avg_sq"]) for o in options}
    assert len(pairs) == 16
    for name, values in (("adam_w", 2), ("bias_correction", 2), ("capturable", 2), ("master", 4), ("param", 3)):
        assert len({o[name] for o in options}) == values, name


@pytest.mark.parametrize("options", [ROWS[0], ROWS[10], ROWS[-1]], ids=str)
def test_one_set_of_options(options):
    te_patches.apply()
    outcome = _verify.compare(options, DEVICE)
    assert outcome.equal
    assert (outcome.tier, outcome.steps) == ("native", 3)


@pytest.mark.parametrize("fault", ["parameter 2", "exp_avg of parameter 3", "step"])
def test_what_differs_is_named(fault, monkeypatch, capsys):
    def wrong(step):
        stock = inspect.unwrap(step)

        def stepped(optimizer):
            stock(optimizer)
            params = optimizer.param_groups[0]["params"]
            if fault == "step":
                optimizer.param_groups[0]["step"] += 1
            else:
                tensor = params[2].data if fault == "parameter 2" else optimizer.state[params[3]]["exp_avg"]
                tensor.view(-1)[5] += 1

        return stepped

    monkeypatch.setattr(_verify, "inspect", type("", (), {"unwrap": staticmethod(wrong)}))
    monkeypatch.setattr(_verify, "every_option", lambda: iter(ROWS[:1]))
    assert not _verify.report(as_json=False)
    said = capsys.readouterr().out
    assert fault in " ".join(said.split())
    assert "NOT EQUAL: options 1" in said


def test_options_that_stock_refuses_are_named(capsys, monkeypatch):
    # Remainders belong to bf16 parameters.
    odd = replace(ROWS[0], master="int16", exp_avg="int16")
    monkeypatch.setattr(_verify, "every_option", lambda: iter([odd]))
    assert not _verify.report(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["options"], found["refused_by_stock"]) == (0, 1)


def test_an_exception_of_ours_is_a_difference(monkeypatch):
    te_patches.apply()

    def refuse(*_):
        raise ValueError("no")

    monkeypatch.setattr(te_patches._step, "_run", refuse)
    outcome = _verify.compare(ROWS[0], DEVICE)
    assert outcome.differences == ["step 1: te_patches raises ValueError: no"]
    assert not outcome.equal
