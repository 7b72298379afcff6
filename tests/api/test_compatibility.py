"""The committed table is what the release at hand shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import te_release

ROOT = Path(__file__).parent.parent.parent


def test_the_documents_column_is_this_releases():
    release = te_release.chosen()
    command = [sys.executable, str(ROOT / "tests" / "compatibility.py"), release]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert set(found["tiers"].values()) == {"equal"}
    rows = [re.split(r" *\| *", line)[1:-1] for line in (ROOT / "docs" / "compatibility.md").read_text().splitlines()]
    column = next(row for row in rows if release in row).index(release)
    shown = {row[0].strip("`"): row[column] for row in rows if len(row) > column}
    for name, state in found["patches"].items():
        assert shown[name] == state, name
    for tier, state in found["tiers"].items():
        assert shown[f"tier {tier}"] == state
