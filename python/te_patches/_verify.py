"""Whether patched steps give the installed Transformer Engine's bits on this machine: `python -m te_patches verify`.

Each set of options is built twice from one seed, stepped by stock and by te_patches with the same fresh gradients, and
everything that a step writes is compared as bits: parameters, moments, masters or remainders, scales, counters.
"""

from __future__ import annotations

import datetime
import inspect
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

import te_patches
import te_patches.cpu
from te_patches import _releases
from te_patches._bits import bits

_SIZES = (1, 7, 2049, 65536 + 5, 0)
_STEPS = 3


@dataclass(frozen=True)
class Options:
    """One way to build a FusedAdam. Storages by torch's names; uint8 is Transformer Engine's word for fp8."""

    param: str
    grad: str
    master: str
    exp_avg: str
    exp_avg_sq: str
    adam_w: bool = True
    bias_correction: bool = True
    capturable: bool = False

    def arguments(self) -> dict[str, Any]:
        """For FusedAdam's constructor."""
        import torch

        return {
            "lr": 1e-2,
            "weight_decay": 0.1,
            "adam_w_mode": self.adam_w,
            "bias_correction": self.bias_correction,
            "capturable": self.capturable,
            "master_weights": self.master != "none",
            "store_param_remainders": self.master == "int16",
            "master_weight_dtype": torch.float16 if self.master == "float16" else torch.float32,
            "exp_avg_dtype": getattr(torch, self.exp_avg),
            "exp_avg_sq_dtype": getattr(torch, self.exp_avg_sq),
            "use_decoupled_grad": self.grad != self.param,
        }


@dataclass
class Outcome:
    """What the comparison of one set of options came to."""

    options: Options
    tier: str = ""
    steps: int = 0
    elements: int = 0
    differences: list[str] = field(default_factory=list)
    refused: str = ""
    """What stock said, if it does not take these options."""

    @property
    def equal(self) -> bool:
        return not self.differences and (bool(self.refused) or self.tier == "native")


def every_option() -> Iterator[Options]:
    """Every storage of parameters, masters and moments, the other options spread over them."""
    masters = [("float32", "none"), ("float16", "none"), ("bfloat16", "none")]
    masters += [("float16", "float32"), ("bfloat16", "float32"), ("bfloat16", "int16"), ("bfloat16", "float16")]
    moments = ("float32", "bfloat16", "float16", "uint8")
    rows = [(param, master, moment, moment) for (param, master), moment in itertools.product(masters, moments[:2])]
    rows += [("bfloat16", "float32", *pair) for pair in itertools.product(moments, moments)]
    for at, (param, master, exp_avg, exp_avg_sq) in enumerate(dict.fromkeys(rows)):
        grad = "float32" if at % 3 == 2 else param
        yield Options(param, grad, master, exp_avg, exp_avg_sq, adam_w=at % 4 != 3, bias_correction=at % 5 != 4)
    for param, master in (("float32", "none"), ("float16", "float32"), ("bfloat16", "float32")):
        yield Options(param, param, master, "float32", "float32", capturable=True)


def compare(options: Options, device: str) -> Outcome:
    """Takes the steps and compares. What te_patches raises and stock does not is a difference."""
    import torch

    fused_adam = _releases.import_fused_adam().FusedAdam
    stock = inspect.unwrap(fused_adam.step)
    generator = torch.Generator().manual_seed(11)

    def draw(dtype: str) -> list[Any]:
        values = [torch.randn(size, generator=generator).mul(0.3) for size in _SIZES]
        # Transformer Engine's scaling takes no state without elements.
        scaled = {options.exp_avg, options.exp_avg_sq, options.master} & {"float16", "uint8"}
        return [v.to(device=device, dtype=getattr(torch, dtype)) for v in values if v.numel() or not scaled]

    outcome = Outcome(options)
    values = draw(options.param)
    sides = [[torch.nn.Parameter(value.clone()) for value in values] for _ in range(2)]
    try:
        theirs, mine = (fused_adam(params, **options.arguments()) for params in sides)
    except (RuntimeError, TypeError, ValueError) as error:
        outcome.refused = f"{type(error).__name__}: {error}"
        return outcome
    for _ in range(_STEPS):
        for params, grad in zip(zip(*sides, strict=True), draw(options.grad), strict=True):
            for param in params:
                setattr(param, "decoupled_grad" if options.grad != options.param else "grad", grad.clone())
        try:
            stock(theirs)
        except (RuntimeError, TypeError, ValueError) as error:
            outcome.refused = f"{type(error).__name__}: {error}"
            return outcome
        outcome.steps += 1
        try:
            mine.step()
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            outcome.differences.append(f"step {outcome.steps}: te_patches raises {type(error).__name__}: {error}")
            return outcome
        outcome.tier = te_patches.report(mine)["groups"][0]["tier"]
        written = [_written(optimizer, params) for optimizer, params in zip((theirs, mine), sides, strict=True)]
        for (what, expected), (_, tensor) in zip(*written, strict=True):
            outcome.elements += tensor.numel()
            different = int((bits(tensor) != bits(expected)).sum())
            if different:
                outcome.differences.append(
                    f"step {outcome.steps}, {what}: {different} of {tensor.numel()} elements differ"
                )
    return outcome


def _written(optimizer: Any, params: list[Any]) -> list[tuple[str, Any]]:
    """Everything that a step may write, by name."""
    import torch

    found = [("step", torch.as_tensor(optimizer.param_groups[0]["step"]).cpu())]
    for at, param in enumerate(params):
        found.append((f"parameter {at}", param.detach()))
        for name, state in optimizer.state[param].items():
            found.append((f"{name} of parameter {at}", getattr(state, "_data", state)))
            if hasattr(state, "_scale_inv"):
                found.append((f"scale_inv of {name} of parameter {at}", state._scale_inv))
        for name, scale in optimizer._scales.get(param, {}).items():
            found.append((f"scale of {name} of parameter {at}", scale))
    return found


def report(as_json: bool) -> bool:
    """Compares all options and prints the verdict; whether all gave stock's bits natively."""
    import torch

    begin = time.monotonic()
    gpu = torch.cuda.is_available()
    if not gpu:
        te_patches.cpu.enable()
    te_patches.apply(kernels="auto")
    progress = Console(stderr=True, markup=False)
    rows = list(every_option())
    outcomes = [compare(o, "cuda" if gpu else "cpu") for o in track(rows, "comparing", console=progress)]
    about = {
        "gpu": torch.cuda.get_device_name() if gpu else "none: this project's CPU kernels on both sides",
        "transformer_engine": _releases.probe(_releases.import_fused_adam()).version,
        "torch": torch.__version__,
        "te_patches": te_patches.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begin, 1),
    }
    taken = [outcome for outcome in outcomes if not outcome.refused]
    counts = {
        "options": len(taken),
        "refused_by_stock": len(outcomes) - len(taken),
        "steps": sum(outcome.steps for outcome in taken),
        "elements": sum(outcome.elements for outcome in taken),
        "unequal": sum(not outcome.equal for outcome in taken),
    }
    right = bool(taken) and counts["unequal"] == 0
    verdict = "EQUAL" if right else "NOT EQUAL"
    if as_json:
        print(json.dumps({"verdict": verdict, **counts, **about, "outcomes": [asdict(o) for o in outcomes]}, indent=1))
        return right
    table = Table("parameter", "gradient", "master", "exp_avg", "exp_avg_sq", "mode", "tier", "elements", "outcome")
    for outcome in outcomes:
        o = outcome.options
        words = ["AdamW" if o.adam_w else "L2"] + ["no bias correction"] * (not o.bias_correction)
        mode = ", ".join(words + ["capturable"] * o.capturable)
        what = "equal" if outcome.equal else "; ".join(outcome.differences[:2]) or f"served by {outcome.tier}"
        what = f"stock refuses: {outcome.refused:.60}" if outcome.refused else what
        numbers = (outcome.tier, f"{outcome.elements:,}", what)
        table.add_row(o.param, o.grad, o.master, o.exp_avg, o.exp_avg_sq, mode, *numbers)
    console = Console(width=None if sys.stdout.isatty() else 170, markup=False)
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    console.print(f"{verdict}: " + ", ".join(f"{name} {value:,}" for name, value in counts.items()))
    return right
