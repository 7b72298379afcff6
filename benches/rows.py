"""What the benchmarks share: rows with where, with what and how they were measured, written as they come."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from te_patches import _bench


def options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say where rows go and what they are of."""
    command = click.option("--out", type=click.Path(path_type=Path), help="JSON file for the rows")(command)
    return click.option("--commit", "revision", help="of the code measured, where there is no git")(command)


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return shown.stdout.strip() or "unknown"


class Rows(list[dict[str, Any]]):
    """The rows of one run."""

    def __init__(self, revision: str | None, out: Path | None) -> None:
        super().__init__()
        self.about = _bench.setting() | {"commit": revision or commit()}
        self.out = out

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row and writes the file anew, so that a run that is cut short leaves what it measured."""
        self.append(row | self.about)
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self, indent=1) + "\n")
