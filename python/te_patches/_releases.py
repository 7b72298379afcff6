"""What the installed Transformer Engine does, found by probing its Python files, never by version strings: container
builds carry back-ports. No probe needs a GPU or creates a CUDA context.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

_MODULE = "transformer_engine.pytorch.optimizers.fused_adam"


@dataclass(frozen=True)
class Release:
    """Answers about one installed Transformer Engine."""

    version: str
    filters_empty: bool
    """Its applier drops columns without elements (2.18 and later)."""
    scales_empty: bool
    """Its scaling of fp16 and fp8 states takes shards without elements (no release yet)."""
    counts_empty_groups: bool
    """A group without parameters advances its counter (2.19 and later)."""
    strict_parity: bool
    """States of DTensor parameters are DTensors, and a DTensor beside a plain tensor is refused (2.14 and later)."""
    shards_states: bool
    """States of DTensor parameters are DTensors of local tensors, of quantized ones plain (2.14 and later)."""
    bf16_moments_in_kernel: bool
    """Its kernels read and write bf16 moments (2.13 and later)."""
    quantizes_from_master: bool
    """It updates the fp32 masters of quantized parameters and quantizes them anew (2.14 and later)."""
    delayed_scaling_apart: bool
    """Only parameters with delayed scaling take its FP8 kernel, not those with current scaling (2.16 and later)."""


def import_fused_adam() -> ModuleType:
    """Transformer Engine's module of FusedAdam. ImportError, saying what to install, where it is missing or broken."""
    try:
        return importlib.import_module(_MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        # The last two: a library that cannot be loaded, and Transformer Engine's own word for a package without any.
        raise ImportError(
            f"te_patches needs Transformer Engine, but {_MODULE} cannot be imported ({error}). Install it with "
            "pip install --no-build-isolation 'transformer-engine[pytorch]'; on a machine without a GPU, "
            "pip install --no-deps transformer-engine and call te_patches.cpu.enable() first."
        ) from error


def import_fused_sgd() -> ModuleType:
    """Transformer Engine's module of FusedSGD, which comes with that of FusedAdam."""
    return importlib.import_module("transformer_engine.pytorch.optimizers.fused_sgd")


def fp8_dtypes() -> Any:
    """The enum of dtypes that fp8 tensors and kernels take: Python's own from 2.17, before that the compiled part's."""
    module = import_fused_adam()
    return module.DType if hasattr(module, "DType") else module.tex.DType


def names(function: Any) -> set[str]:
    """Every name that a function's code and the code nested in it use; survives wrapping and reformatting."""
    found: set[str] = set()
    pending: list[CodeType] = [inspect.unwrap(function).__code__]
    while pending:
        code = pending.pop()
        found.update(code.co_names, code.co_varnames, code.co_cellvars)
        pending.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return found


@functools.cache
def probe(fused_adam: ModuleType) -> Release:
    """Answers for the Transformer Engine that `fused_adam` belongs to."""
    optimizer = fused_adam.FusedAdam
    applier = importlib.import_module("transformer_engine.pytorch.optimizers.multi_tensor_apply").multi_tensor_applier
    return Release(
        version=_version(),
        filters_empty=_filters_empty(applier),
        scales_empty=_scales_empty(optimizer),
        counts_empty_groups=_counts_empty_groups(optimizer),
        strict_parity="from_local" in names(optimizer.state_dict),
        shards_states="from_local" in names(optimizer._initialize_state),
        bf16_moments_in_kernel="skip_unscale" in inspect.signature(optimizer.get_unscaled_state).parameters,
        quantizes_from_master="quantize_" in names(optimizer.step),
        delayed_scaling_apart="Float8Quantizer" in names(optimizer.step),
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for distribution in ("transformer-engine", "transformer_engine_torch"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown"


def _filters_empty(applier: Any) -> bool:
    import torch

    seen: list[int] = []

    def operation(_chunk: int, _flag: Any, lists: list[list[Any]], *_: Any) -> None:
        seen.append(len(lists[0]))

    empty, full = torch.empty(0), torch.ones(1)
    applier(operation, None, [[empty, full], [empty, full]])
    return seen == [1]


def _scales_empty(optimizer: Any) -> bool:
    import torch

    half = torch.float16
    stub = SimpleNamespace(name_to_dtype_map={"state": half}, dtype_to_range_map={half: torch.ones(1)})
    try:
        inspect.unwrap(optimizer._apply_scale)(stub, "state", torch.empty(0), torch.empty(0, dtype=half), torch.ones(1))
    except RuntimeError:
        return False
    return True


def _counts_empty_groups(optimizer: Any) -> bool:
    import torch

    group: dict[str, Any] = {"params": [], "lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    group["bias_correction"] = True
    flag = torch.zeros(1, dtype=torch.int32)
    stub = SimpleNamespace(param_groups=[group], capturable=False, _dummy_overflow_buf=flag, state={})
    inspect.unwrap(optimizer.step)(stub)
    return "step" in group
