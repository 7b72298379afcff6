"""Transformer Engine's own Python FusedAdam on a machine with neither a GPU nor Transformer Engine's compiled part.

For tests, demos and debugging. Transformer Engine's Python files come from its small pure-Python wheel
(`pip install --no-deps transformer-engine pydantic`); their compiled part, `transformer_engine_torch`, is stood in for
by this project's CPU kernels. Nothing else of Transformer Engine works here: what needs the compiled part raises
NotImplementedError by name.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from te_patches import _core, _cpu_quantize

_MARK = "_te_patches_stand_in"

# Packages whose __init__ loads the compiled part, or what needs it: their submodules are real, they are empty.
_PACKAGES = ("", ".common", ".pytorch", ".debug", ".debug.pytorch", ".pytorch.ops")


def enabled() -> bool:
    """Whether the stand-in for the compiled part is in place."""
    return hasattr(sys.modules.get("transformer_engine_torch"), _MARK)


def enable() -> None:
    """Makes `transformer_engine.pytorch.optimizers.FusedAdam` importable, on CPU tensors.

    Its "cuda" buffers are made on the CPU. Calling it again does nothing. RuntimeError if the real Transformer Engine
    is already imported; ImportError, saying what to install, if its Python files are missing.
    """
    if enabled():
        return
    if "transformer_engine_torch" in sys.modules or "transformer_engine" in sys.modules:
        raise RuntimeError(
            "te_patches.cpu.enable() stands in for Transformer Engine, but Transformer Engine is already imported; "
            "call it first, or leave it out on machines with a GPU"
        )
    root = _find_package()
    before = set(sys.modules)
    try:
        sys.modules["transformer_engine_torch"] = _native(root)
        for name in _PACKAGES:
            _stand_in_package(root, name)
        # Up to 2.9 the version helper lives in the __init__ that is not run.
        sys.modules["transformer_engine.pytorch"].torch_version = _torch_version  # type: ignore[attr-defined]
        fused_adam = importlib.import_module("transformer_engine.pytorch.optimizers.fused_adam")
    except BaseException:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
                del sys.modules[name]
        raise
    _build_on_cpu(fused_adam.FusedAdam)
    _quantize_on_cpu()


def _find_package() -> Path:
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "te_patches.cpu needs Transformer Engine's Python files: pip install --no-deps transformer-engine pydantic"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _stand_in_package(root: Path, name: str) -> None:
    folder = root.joinpath(*name.split(".")[1:])
    if not folder.is_dir():
        return
    package = _StandIn("transformer_engine" + name)
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    parent, _, child = package.__name__.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)


def _torch_version() -> tuple[int, ...]:
    import torch

    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3])


class _StandIn(ModuleType):
    """A module whose missing names are classes (capitalised) or functions that say what is missing when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value: Any = _numbers(name) if name[0].isupper() else _missing(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Numbers(type):
    """A class that has an integer for every name, in the order of asking: an enum of the compiled part."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        number = len(vars(cls))
        setattr(cls, name, number)
        return number


def _numbers(name: str) -> type:
    return _Numbers(name, (), {})


def _missing(name: str) -> Any:
    def function(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} is part of Transformer Engine's compiled library, which is not here")

    function.__name__ = name.rpartition(".")[2]
    return function


def _native(root: Path) -> ModuleType:
    """The stand-in for the compiled part."""
    native = _StandIn("transformer_engine_torch")
    parts = {
        _MARK: True,
        "DType": enum.IntEnum("DType", _dtype_names(root), start=0),
        "multi_tensor_adam": functools.partial(_adam, False),
        "multi_tensor_adam_param_remainder": functools.partial(_adam, True),
        "multi_tensor_adam_fp8": _adam_fp8,
        "create_empty_quantized_tensor": _cpu_quantize.create_empty_quantized_tensor,
        "quantize": _cpu_quantize.quantize,
        "dequantize": _cpu_quantize.dequantize,
        "multi_tensor_adam_capturable": functools.partial(_adam_capturable, 4),
        "multi_tensor_adam_capturable_master": functools.partial(_adam_capturable, 5),
    }
    for name, part in parts.items():
        setattr(native, name, part)
    return native


def _dtype_names(root: Path) -> list[str]:
    """Names of the compiled enum DType: releases from 2.17 repeat them in Python and check that they agree."""
    constants = ast.parse((root / "pytorch" / "constants.py").read_text())
    for node in constants.body:
        if isinstance(node, ast.ClassDef) and node.name == "DType":
            members = [target for item in node.body if isinstance(item, ast.Assign) for target in item.targets]
            return [target.id for target in members if isinstance(target, ast.Name)]
    integers = ["kByte", "kInt16", "kInt32", "kInt64"]
    return [*integers, "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat8E8M0", "kFloat4E2M1"]


def _check(lists: list[list[Any]], expected: int, chunk_size: int) -> None:
    """What the compiled part checks before it starts."""
    if chunk_size <= 0:
        raise RuntimeError(f"Expected a positive chunk size, got {chunk_size}")
    if len(lists) not in ((4, 5) if expected == 0 else (expected,)):
        raise RuntimeError(f"Expected {expected or '4 or 5'} tensor lists, but found {len(lists)}")
    if not lists[0]:
        raise RuntimeError("The compiled part reads the first tensor of the first list; it must not be empty")
    for role, tensors in zip(("gradient", "parameter", "exp_avg", "exp_avg_sq", "master"), lists, strict=False):
        if len(tensors) != len(lists[0]):
            raise RuntimeError(f"Expected all tensor lists to be of the same length, but the list of {role}s is not")
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            raise RuntimeError(f"Expected all {role} tensors of a call to have one dtype")


def _sized(lists: list[list[Any]]) -> list[list[Any]]:
    """Sizes come from the gradients: 2.10 and 2.11 pass states of a DTensor's global shape beside its local shard."""

    def fit(tensor: Any, grad: Any) -> Any:
        larger = tensor.numel() > grad.numel()
        return tensor.detach().view(-1)[: grad.numel()].view(grad.shape) if larger else tensor

    return [[fit(tensor, grad) for tensor, grad in zip(tensors, lists[0], strict=True)] for tensors in lists]


def _adam(remainder: bool, chunk_size: int, noop_flag: Any, lists: list[list[Any]], *arguments: Any) -> None:
    _check(lists, 5 if remainder else 0, chunk_size)
    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay = arguments
    scalars = (float(lr), beta1, beta2, eps, int(step), mode, bias_correction, weight_decay)
    master = "remainder" if remainder else "none" if len(lists) == 4 else "float32"
    _core.multi_tensor_adam(_sized(lists), *scalars, master)


def _adam_fp8(chunk_size: int, noop_flag: Any, lists: list[list[Any]], *arguments: Any) -> None:
    import torch

    _check(lists, 8, chunk_size)
    grads, params, exp_avg, exp_avg_sq, masters, scales, amaxes, scale_invs = lists
    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, fp8 = arguments
    dtype = torch.float8_e4m3fn if fp8.name == "kFloat8E4M3" else torch.float8_e5m2
    entries = [
        (param.view(dtype), scale, scale_inv, amax)
        for param, scale, scale_inv, amax in zip(params, scales, scale_invs, amaxes, strict=True)
    ]
    scalars = (float(lr), beta1, beta2, eps, int(step), mode, bias_correction, weight_decay)
    _core.multi_tensor_adam([grads, entries, exp_avg, exp_avg_sq, masters], *scalars, "float32")


def _adam_capturable(expected: int, chunk_size: int, noop_flag: Any, lists: list[list[Any]], *arguments: Any) -> None:
    _check(lists, expected, chunk_size)
    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, inv_scale = arguments
    scalars = (lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    _core.multi_tensor_adam_capturable(_sized(lists), *scalars, inv_scale, noop_flag)


def _build_on_cpu(optimizer: Any) -> None:
    """Makes the constructor's own CUDA buffers on the CPU, by what torch is asked for and not by editing source."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    build = optimizer.__init__

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with OnCpu():
            build(self, *args, **kwargs)

    optimizer.__init__ = __init__


def _quantize_on_cpu() -> None:
    """fp8 tensors are made on the GPU unless they are told where; here there is none."""
    import torch
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    def make_empty(self: Any, shape: Any, *, dtype: Any = torch.float32, **_: Any) -> Any:
        return _cpu_quantize.create_empty_quantized_tensor(self, shape, dtype, torch.device("cpu"), False)

    Float8Quantizer.make_empty = make_empty
