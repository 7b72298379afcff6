"""Two FusedAdams from one seed, one stepped by stock and one by te_patches, compared as bits after every step."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from options import Combination

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUARD = 64
"""Elements on either side of every parameter and gradient that nothing may touch."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers; the local shard of a DTensor, the data of an fp8 tensor."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    tensor = getattr(tensor, "_data", tensor).detach()
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@dataclass
class Tally:
    """What a run compared; written to $PARITY_SUMMARY at the end."""

    combinations: int = 0
    steps: int = 0
    elements: int = 0
    mismatches: int = 0

    def write(self) -> None:
        """One file per process: several may run at once."""
        if folder := os.environ.get("PARITY_SUMMARY"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(vars(self)))


TALLY = Tally()


def assert_same(mine: Sequence[torch.Tensor], stock: Sequence[torch.Tensor], what: str) -> None:
    """All bits of all tensors are equal."""
    assert [(t.dtype, t.shape) for t in mine] == [(t.dtype, t.shape) for t in stock], what
    sides = [[bits(tensor).flatten() for tensor in tensors] for tensors in (mine, stock)]
    TALLY.elements += sum(tensor.numel() for tensor in sides[0])
    if len({tensor.dtype for tensor in sides[0]}) == 1 and torch.equal(torch.cat(sides[0]), torch.cat(sides[1])):
        return
    for at, (ours, theirs) in enumerate(zip(*sides, strict=True)):
        places = (ours != theirs).nonzero().flatten()
        TALLY.mismatches += places.numel()
        if places.numel():
            first = int(places[0])
            raise AssertionError(
                f"{what} {at} of shape {tuple(mine[at].shape)}: {places.numel()} elements differ, "
                f"first at {first}: {ours[first]:#x} instead of {theirs[first]:#x}"
            )


def without_hidden_nan(values: Any, remainders: Any) -> tuple[Any, Any]:
    """Both sides' bf16 parameters and remainders with zeros where the fp32 value is NaN on both. Stock hides that NaN
    from the parameter (it stores -0.0); ours must show it.
    """
    plain: tuple[list[Any], list[Any]] = ([], [])
    low: tuple[list[Any], list[Any]] = ([], [])
    for mine, stock, mine_low, stock_low in zip(*values, *remainders, strict=True):
        pairs = [(bits(mine), bits(mine_low)), (bits(stock), bits(stock_low))]
        nan = []
        for high, rest in pairs:
            merged = ((high.int() - (rest < 0).int()) << 16) | (rest.int() & 0xFFFF)
            nan.append(torch.isnan(merged.view(torch.float32)))
        assert torch.equal(*nan), "NaN in different places"
        assert torch.equal(torch.isnan(mine.detach()), nan[0]), "a NaN is hidden"
        for side, (high, rest) in enumerate(pairs):
            plain[side].append(high.masked_fill(nan[0], 0))
            low[side].append(rest.masked_fill(nan[0], 0))
    return plain, low


def guarded(values: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A copy in the middle of a poisoned buffer, `offset` elements past alignment; the guards are kept on it."""
    buffer = torch.full((values.numel() + 2 * GUARD + offset,), float("nan"), device=values.device).to(values.dtype)
    inside = buffer[GUARD + offset : GUARD + offset + values.numel()]
    inside.copy_(values.flatten())
    view = inside.view(values.shape)
    view.guards = (buffer[: GUARD + offset], buffer[GUARD + offset + values.numel() :])  # type: ignore[attr-defined]
    return view


def assert_guards(tensors: Sequence[Any]) -> None:
    """Nothing was written around the tensors."""
    for tensor in tensors:
        for guard in getattr(tensor, "guards", ()):
            assert bool(torch.isnan(guard).all()), "a guard zone was written"


def random_like(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator, special: bool) -> torch.Tensor:
    """Normal values over sixteen binary orders of magnitude; `special` adds NaN, infinities, zeros and subnormals."""
    count = 1
    for size in shape:
        count *= size
    device = generator.device
    mantissa = torch.randn(count, generator=generator, device=device)
    values = torch.ldexp(mantissa, torch.randint(-12, 5, (count,), generator=generator, device=device))
    if special and count > 8:
        odd = torch.tensor(
            [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-39, -1e-41, 3e38, 1e-20], device=device
        )
        places = torch.randint(0, count, (max(1, count // 50),), generator=generator, device=device)
        values[places] = odd[torch.randint(0, len(odd), places.shape, generator=generator, device=device)]
    return values.to(dtype).view(tuple(shape))


def drive_overflows(twin: Twin, step: Callable[[], None]) -> None:
    """Steps with overflow at the first and at later ones; no update may happen in those, and one in all others."""
    for overflow in (1, 0, 1, 0, 0, 1):
        twin.fill_gradients(scale=64.0)
        if overflow:
            for gradients in twin.gradients:
                gradients[3].view(-1)[2] = float("inf")
        before = [p.clone() for p in twin.plain[0]]
        step()
        unchanged = all(torch.equal(p, q) for p, q in zip(before, twin.plain[0], strict=True))
        assert unchanged == bool(overflow)


RAGGED: tuple[tuple[tuple[int, ...], int], ...] = (
    ((1,), 0),
    ((), 0),
    ((3,), 1),
    ((17, 5), 0),
    ((0, 8), 0),
    ((2047,), 3),
    ((2049,), 0),
    ((4095,), 2),
    ((4096,), 0),
    ((4097,), 1),
    ((64, 129), 0),
    ((8191,), 5),
    ((65536 + 7,), 0),
)
"""(shape, elements past alignment) around every boundary of vectors, chunks and launches."""


@dataclass
class Twin:
    """Parameters twice, their optimizers, and the gradients of the current step."""

    combination: Combination
    shapes: Sequence[tuple[tuple[int, ...], int]] = RAGGED
    wrap: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    special: bool = False
    seed: int = 0
    groups: int = 2
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from transformer_engine.pytorch.optimizers import FusedAdam

        self.generator = torch.Generator(device=DEVICE).manual_seed(self.seed)
        self.plain: list[list[torch.Tensor]] = [[], []]
        self.params: list[list[torch.nn.Parameter]] = [[], []]
        for shape, offset in self.shapes:
            values = random_like(shape, self.combination.param, self.generator, False)
            for side in (0, 1):
                local = guarded(values, offset)
                self.plain[side].append(local)
                self.params[side].append(torch.nn.Parameter(self.wrap(local)))
        arguments = self.combination.arguments() | self.extra
        self.optimizers = []
        for params in self.params:
            groups: list[dict[str, Any]] = [{"params": params[at :: self.groups]} for at in range(self.groups)]
            for at, group in enumerate(groups[1:], start=1):
                group["weight_decay"] = arguments["weight_decay"] / (at + 1)
            self.optimizers.append(FusedAdam(groups, **arguments))
        self.mine, self.stock = self.optimizers
        self.stock_step = inspect.unwrap(FusedAdam.step)
        self.scaler: list[Any] = [None, None]
        TALLY.combinations += 1

    def fill_gradients(self, present: Callable[[int], bool] = lambda _: True, scale: float = 1.0) -> None:
        """Fresh gradients, the same on both sides."""
        attribute = "decoupled_grad" if self.mine.use_decoupled_grad else "grad"
        self.gradients: list[list[torch.Tensor]] = [[], []]
        for at, (shape, offset) in enumerate(self.shapes):
            if not present(at):
                for params in self.params:
                    setattr(params[at], attribute, None)
                continue
            values = random_like(shape, torch.float32, self.generator, self.special) * scale
            values = values.to(self.combination.grad)
            for side, params in enumerate(self.params):
                grad = guarded(values, (offset + 1) % 4 if at % 2 else 0)
                self.gradients[side].append(grad)
                setattr(params[at], attribute, self.wrap(grad))

    def step(self) -> None:
        """One step of each, then the comparison."""
        self.mine.step(grad_scaler=self.scaler[0])
        self.stock_step(self.stock, None, self.scaler[1])
        self.compare()

    def states(self, side: int, name: str) -> list[torch.Tensor]:
        """One side's states of one name."""
        state = self.optimizers[side].state
        return [state[p][name] for p in self.params[side] if name in state[p]]

    def scales(self, side: int) -> list[torch.Tensor]:
        """All that scales one side's states: factors, and what the quantizers of fp8 states hold."""
        optimizer = self.optimizers[side]
        found = [scale for p in self.params[side] for scale in optimizer._scales.get(p, {}).values()]
        for name in ("exp_avg", "exp_avg_sq"):
            for state in self.states(side, name):
                state = getattr(state, "_local_tensor", state)
                if hasattr(state, "_quantizer") and state.numel():
                    found += [state._scale_inv, state._quantizer.scale, state._quantizer.amax]
        return found

    def compare(self) -> None:
        """All bits that a step may write, and those that it may not."""
        TALLY.steps += 1
        values = self.plain
        masters = [self.states(side, "master_param") for side in (0, 1)]
        if self.special and self.combination.master == "remainder":
            values, masters = without_hidden_nan(values, masters)
        assert_same(*values, what="parameter")
        assert_same(*masters, what="master_param")
        assert_same(self.gradients[0], self.gradients[1], "gradient")
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same(*(self.states(side, name) for side in (0, 1)), what=name)
        assert_same(*(self.scales(side) for side in (0, 1)), what="scale")
        for mine, stock in zip(self.mine.param_groups, self.stock.param_groups, strict=True):
            assert mine.keys() == stock.keys()
            assert mine["step"] == stock["step"], "step"
            assert type(mine["step"]) is type(stock["step"])
        assert self.mine._dummy_overflow_buf == self.stock._dummy_overflow_buf
        assert self.mine.state.keys() == set(self.params[0])
        if TALLY.steps % 5 == 0:
            for side in (0, 1):
                assert_guards([*self.plain[side], *self.gradients[side]])
