"""A client's sequence of calls, run once with stock and once with patches from one seed, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import te_patches
import torch
from te_patches import _releases
from transformer_engine.pytorch.optimizers import fused_adam
from twin import DEVICE, bits

RELEASE = _releases.probe(fused_adam)

everywhere = pytest.mark.parametrize("machine", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
"""On CPU kernels, and in the gpu suite."""


class Run:
    """One of the two runs. What it notes must be what the other notes, in number, order and bits."""

    def __init__(self, patched: bool) -> None:
        self.patched = patched
        self.notes: list[tuple[str, Any]] = []
        self.generator = torch.Generator(DEVICE).manual_seed(11)

    def random(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self.generator, device=DEVICE).to(dtype)

    def params(self, *shapes: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(self.random(shape, dtype)) for shape in shapes]

    def fill(
        self,
        params: Sequence[Any],
        present: Callable[[int], bool] = lambda _: True,
        attribute: str = "grad",
        dtype: torch.dtype | None = None,
        wrap: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        """Fresh gradients; None where they are not `present`."""
        for at, param in enumerate(params):
            local = getattr(param, "_local_tensor", param)
            grad = wrap(self.random(local.shape).to(dtype or param.dtype))
            setattr(param, attribute, grad if present(at) else None)

    def note(self, optimizer: Any, *more: Any) -> None:
        """The bits of parameters, states and scales, the groups' numbers, and whatever else is given."""
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    value = value.tolist() if isinstance(value, torch.Tensor) else value
                    self.notes.append((f"group {number} {name}", value))
            for index, param in enumerate(group["params"]):
                where = f"{number}.{index}"
                self.notes.append((f"parameter {where}", bits(param).cpu().clone()))
                states = optimizer.state.get(param, {})
                self.notes += [(f"{name} {where}", bits(state).cpu().clone()) for name, state in states.items()]
                scales = optimizer._scales.get(param, {})
                # torch's maximum of -0.0 and 0.0 is -0.0 on the CPU: zeros have scale 0.0 here.
                self.notes += [(f"scale of {name} {where}", (scale + 0.0).cpu()) for name, scale in scales.items()]
        self.notes += [("value", value) for value in more]

    def step(self, optimizer: Any, params: Sequence[Any], **gradients: Any) -> None:
        """A step with fresh gradients (as `fill` makes them), noted."""
        self.fill(params, **gradients)
        optimizer.step()
        self.note(optimizer)

    def attempt(self, action: Callable[[], Any]) -> bool:
        """Notes the type of what `action` raises; whether it raised nothing."""
        try:
            action()
        except Exception as error:
            self.notes.append(("raised", type(error)))
            return False
        self.notes.append(("raised", None))
        return True

    def off(self) -> None:
        te_patches.revert()

    def on(self) -> None:
        if self.patched:
            te_patches.apply()


def compare(sequence: Callable[[Run], Any]) -> None:
    """Runs `sequence` with stock, then with patches, and compares their notes. The optimizer that it returns must have
    been stepped natively in all groups at last.
    """
    runs = []
    for patched in (False, True):
        te_patches.revert()
        run = Run(patched)
        run.on()
        assert te_patches.report()["applied"] == patched
        optimizer = sequence(run)
        if patched:
            tiers = {group["tier"] for group in te_patches.report(optimizer)["groups"]}
            assert tiers == {"native"}
        runs.append(run)
    stock, mine = runs
    assert [name for name, _ in mine.notes] == [name for name, _ in stock.notes]
    for (name, ours), (_, theirs) in zip(mine.notes, stock.notes, strict=True):
        if isinstance(ours, torch.Tensor):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
            assert torch.equal(ours, theirs), f"{name}: {int((ours != theirs).sum())} elements differ"
        else:
            assert ours == theirs, name
    firsts: dict[str, torch.Tensor] = {}
    moved = any(
        isinstance(value, torch.Tensor) and not torch.equal(firsts.setdefault(name, value), value)
        for name, value in mine.notes
        if name.startswith("parameter")
    )
    assert moved, "nothing was trained"


def states(optimizer: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every slot of every state, to be replaced at will."""
    for slots in optimizer.state.values():
        for name in list(slots):
            yield slots, name
