"""What is here, what is missing, and the command that mends it: `python -m te_patches doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from te_patches import _core, _nvrtc, _patching, _releases, _settings

_OLDEST = (8, 0)
"""Compute capability from which the native kernels run."""
_ARCHITECTURES = (80, 90, 100, 120)


@dataclass
class Finding:
    """One thing looked at. `state`: "ok"; "missing", which keeps native steps away; "note", which does not."""

    what: str
    state: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Looks at this process's machine. Creates a CUDA context where there is a GPU; patches nothing."""
    findings = [Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    findings.append(_environment())
    if importlib.util.find_spec("torch") is None:
        return [*findings, Finding("torch", "missing", "not installed", "pip install torch")]
    findings += [_torch(), *_gpu(), _compiler(), _cache(), *_transformer_engine()]
    for name, module in (("NeMo Automodel", "nemo_automodel"), ("Megatron", "megatron")):
        there = importlib.util.find_spec(module) is not None
        findings.append(Finding(name, "ok" if there else "note", "installed" if there else "not installed"))
    return findings


def _environment() -> Finding:
    try:
        return Finding("TE_PATCHES", "ok", _settings.choose_kernels(None))
    except ValueError as error:
        return Finding("TE_PATCHES", "missing", str(error), "unset TE_PATCHES")


def _torch() -> Finding:
    import torch

    found = f"{torch.__version__}, built for CUDA {torch.version.cuda or 'none'}"
    way = _core.tensors_read_by()
    if way == "records":
        return Finding("torch", "ok", found)
    found += f"; its tensors are read in full at every step ({way}), which takes longer"
    return Finding("torch", "note", found, "pip install -U torch te_patches")


def _gpu() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        return [Finding("GPU", "note", f"{why}: CPU kernels only", "check nvidia-smi and the driver")]
    driver = torch._C._cuda_getDriverVersion()
    findings = [Finding("CUDA driver", "ok", f"{driver // 1000}.{driver % 1000 // 10}")]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}"
        if (major, minor) >= _OLDEST:
            findings.append(Finding(f"GPU {index}", "ok", found))
        else:
            remedy = "Transformer Engine's own kernels are used on it"
            findings.append(Finding(f"GPU {index}", "missing", f"{found}, older than sm_80", remedy))
    return findings


def _compiler() -> Finding:
    """Compiles one kernel for the GPUs that are here, or else for every architecture. Older NVRTCs lack newer ones."""
    _nvrtc.preload()
    variant = _core.kernel_variants()[0]
    here = _architectures()
    able, errors = [], []
    for arch in sorted(here) or _ARCHITECTURES:
        try:
            _core.compile_kernel(variant, arch, False)
            able.append(f"sm_{arch}")
        except RuntimeError as error:
            errors.append(f"not for sm_{arch}: {str(error).splitlines()[0]}")
    found = "; ".join([f"compiles for {', '.join(able)}"] * bool(able) + errors)
    if not errors:
        return Finding("NVRTC", "ok", found)
    major = _cuda_major()
    remedy = f"pip install -U nvidia-cuda-nvrtc{'' if major == '13' else '-cu' + major}"
    return Finding("NVRTC", "missing" if here or not able else "note", found, remedy)


def _architectures() -> set[int]:
    """Of the GPUs here that the native kernels run on."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = {torch.cuda.get_device_capability(index) for index in range(count)}
    return {10 * major + minor for major, minor in found if (major, minor) >= _OLDEST}


def _cuda_major() -> str:
    import torch

    return (torch.version.cuda or "13").split(".")[0]


def _cache() -> Finding:
    folder = _core.kernel_cache()
    if folder is None:
        return Finding("kernel cache", "note", "no folder: kernels are compiled anew", "set TE_PATCHES_CACHE")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(
            "kernel cache", "note", f"{folder}: {error.strerror}; kernels are compiled anew", "set TE_PATCHES_CACHE"
        )
    count = sum(1 for name in os.listdir(folder) if name.endswith(".cubin"))
    return Finding("kernel cache", "ok", f"{folder}, {count} kernels")


def _transformer_engine() -> list[Finding]:
    try:
        module = _releases.import_fused_adam()
    except ImportError as error:
        found = f"cannot be imported: {error.__cause__}"
        return [Finding("Transformer Engine", "missing", found, str(error).split("Install it with ")[-1])]
    findings = [Finding("Transformer Engine", "ok", _releases.probe(module).version)]
    try:
        patches = _patching.verdicts(module)
    except RuntimeError as error:
        return [*findings, Finding("patches", "missing", str(error), "call te_patches.apply() first")]
    return findings + [
        Finding(patch.target.rpartition("fused_adam.")[2], "ok", f"{patch.state}: {patch.why}") for patch in patches
    ]


def report(as_json: bool) -> bool:
    """Prints what was found; whether native steps are possible."""
    findings = examine()
    if as_json:
        import json

        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        table = Table("what", "state", "found", "remedy")
        for finding in findings:
            table.add_row(*vars(finding).values())
        Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)
    return all(finding.state != "missing" for finding in findings)
