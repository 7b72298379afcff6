"""Transformer Engine's Python files, release by release, from its pure-Python wheels on the package index.

python tests/te_release.py 2.20.2 2.11.0    fetches them into .cache/te/
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASES = ("2.8.0", "2.11.0", "2.13.0", "2.15.0", "2.17.1", "2.18.0", "2.19.0", "2.20.2")
CACHE = Path(__file__).parent.parent / ".cache" / "te"


def chosen() -> str:
    """The release that this run tests: $TE_RELEASE, or the newest."""
    return os.environ.get("TE_RELEASE", RELEASES[-1])


def fetch(release: str, distribution: str = "transformer-engine") -> Path:
    """Folder of a release's Python files, downloaded at first use."""
    folder = CACHE / (release if distribution == "transformer-engine" else f"{distribution}-{release}")
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", scratch, f"{distribution}=={release}"], check=True)
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(unpacked)
        try:
            unpacked.rename(folder)
        except OSError:
            # Another process was first.
            if not folder.is_dir():
                raise
    return folder


if __name__ == "__main__":
    for name in sys.argv[1:] or RELEASES:
        print(fetch(name))
