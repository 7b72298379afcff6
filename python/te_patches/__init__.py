"""Transformer Engine's FusedAdam at the speed of the GPU's memory, safe on every shard, and cheap to resume.

Call `te_patches.apply()` once at startup, before the optimizer is built. Importing this package and applying it create
no CUDA context.
"""

from importlib.metadata import version as _version

from te_patches._patching import apply, revert
from te_patches._report import report
from te_patches._save import state_dict_cpu

apply_patches = apply
apply_te_patches = apply
"""For scripts written for `nemo_automodel.shared.te_patches`."""

__version__ = _version("te_patches")
__all__ = ["apply", "apply_patches", "apply_te_patches", "report", "revert", "state_dict_cpu"]
