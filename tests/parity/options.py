"""The option matrix, generated: every combination that Transformer Engine accepts and the native kernels serve."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from te_patches import _releases

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Combination:
    """One way to build and drive a FusedAdam."""

    param: torch.dtype
    grad: torch.dtype
    master: str  # "none", "float32", "float16", "remainder"
    exp_avg: torch.dtype
    adam_w: bool = True
    bias_correction: bool = True
    weight_decay: float = 0.1
    sharded: bool = False
    capturable: bool = False
    exp_avg_sq: torch.dtype | None = None
    """As exp_avg unless given."""

    @property
    def decoupled(self) -> bool:
        """torch takes no `.grad` of another dtype; half of the others go through `.decoupled_grad` too."""
        return self.grad != self.param or self.bias_correction

    def arguments(self) -> dict[str, Any]:
        """For FusedAdam's constructor."""
        return {
            "lr": 1e-2,
            "betas": (0.9, 0.95),
            "weight_decay": self.weight_decay,
            "bias_correction": self.bias_correction,
            "adam_w_mode": self.adam_w,
            "master_weights": self.master != "none",
            "store_param_remainders": self.master == "remainder",
            "master_weight_dtype": torch.float16 if self.master == "float16" else torch.float32,
            "exp_avg_dtype": self.exp_avg,
            "exp_avg_sq_dtype": self.exp_avg_sq or self.exp_avg,
            "use_decoupled_grad": self.decoupled,
            "capturable": self.capturable,
        }

    def __str__(self) -> str:
        short = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "fp8"}
        words = [short[self.param], f"g.{short[self.grad]}", f"m.{short[self.exp_avg]}"]
        words += [f"v.{short[self.exp_avg_sq]}"] if self.exp_avg_sq else []
        words += [self.master]
        words += ["adamw" if self.adam_w else "l2", f"wd{self.weight_decay}"]
        words += [word for word, on in (("bias", self.bias_correction), ("dtensor", self.sharded)) if on]
        return "-".join([*words, *(["capturable"] if self.capturable else [])])


def storage_types() -> list[tuple[torch.dtype, torch.dtype, str, torch.dtype]]:
    """(parameter, gradient, master, moments) of every kernel."""
    rows = []
    for param, grad, moment in itertools.product(FLOATS, FLOATS, (torch.float32, torch.bfloat16)):
        masters = ["none", "float32"] + (["remainder"] if param == torch.bfloat16 else [])
        rows += [(param, grad, master, moment) for master in masters]
    return rows


def combinations(release: _releases.Release) -> list[Combination]:
    """All that a release takes: capturable where the dtypes allow it."""
    rows = []
    # Releases from 2.20 take capturable gradients of another dtype; they are those that slice their lists.
    mixed = hasattr(_releases.import_fused_adam(), "_MAX_TENSORS_PER_MULTI_TENSOR_ADAM_CALL")
    for types in storage_types():
        for adam_w, bias, decay in itertools.product((True, False), (True, False), (0.0, 0.1)):
            for sharded in (False, True):
                rows.append(Combination(*types, adam_w, bias, decay, sharded))
            param, grad, master, moment = types
            taken = master != "remainder" and (moment == torch.float32 or release.bf16_moments_in_kernel)
            if taken and (grad == param or mixed):
                rows.append(Combination(*types, adam_w, bias, decay, capturable=True))
    return rows


def few(release: _releases.Release) -> list[Combination]:
    """Each kernel once, the other options spread over them."""
    kernels: dict[Any, list[Combination]] = {}
    for row in combinations(release):
        kernels.setdefault((row.param, row.grad, row.master, row.exp_avg, row.capturable), []).append(row)
    # A stride coprime to the number of options visits all of them.
    return [rows[5 * at % len(rows)] for at, rows in enumerate(kernels.values())]


def scaled(release: _releases.Release) -> list[Combination]:
    """Every pair of moment storages, and fp16 masters, that stock serves through fp32 copies. Modes are spread."""
    storages = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
    in_place = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
    rows = []
    for param, exp_avg, exp_avg_sq in itertools.product(FLOATS, storages, storages):
        masters = ["none", "float32", "float16"] + (["remainder"] if param == torch.bfloat16 else [])
        for master, grad in itertools.product(masters, (param, torch.float32)):
            if (exp_avg, exp_avg_sq) in in_place and master != "float16":
                continue
            at = len(rows)
            sharded = at % 3 == 1
            modes = (at % 2 == 0, at // 2 % 2 == 0, 0.1 if at // 4 % 2 else 0.0, sharded)
            rows.append(Combination(param, grad, master, exp_avg, *modes, exp_avg_sq=exp_avg_sq))
    return list(dict.fromkeys(rows))
