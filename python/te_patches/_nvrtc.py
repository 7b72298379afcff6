"""Makes NVRTC, which comes with torch's CUDA builds, findable by the native core, which opens it by name."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path


@functools.cache
def preload() -> None:
    """Opens NVRTC of torch's CUDA version from the packages beside torch; else the system's will be looked for."""
    import torch

    if torch.version.cuda is None:
        return
    major = torch.version.cuda.split(".")[0]
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    # NVRTC opens its builtins by name as well.
    for pattern in (f"libnvrtc-builtins.so.{major}*", f"libnvrtc.so.{major}"):
        found = [library for root in roots for library in sorted(root.glob(f"*/lib/{pattern}"))]
        if found:
            ctypes.CDLL(str(found[0]))
