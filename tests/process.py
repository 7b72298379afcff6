"""Code in a process of its own, with the Transformer Engine of the tests to import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from te_patches import _releases


def environment(*folders: Path) -> dict[str, str]:
    """This process's environment, with Transformer Engine and `folders` first on the path."""
    package = Path(_releases.import_fused_adam().__file__).parents[3]
    path = [str(package), *map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def run(code: str, *folders: Path) -> str:
    """What `code` prints; AssertionError with its last words if it fails."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(*folders), timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
