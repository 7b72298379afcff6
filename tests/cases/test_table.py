"""The table names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_table_names_exists():
    table = (HERE / "README.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| B")]
    assert len(rows) == 30
    sources = {path: path.read_text() for path in HERE.parent.rglob("test_*.py")}
    everything = "\n".join(sources.values())
    for row in rows:
        names = re.findall(r"\b(test_\w+)\b(?!\.py)", row)
        files = re.findall(r"(\w+/test_\w+\.py)", row)
        assert names or files, row
        for name in names:
            assert f"def {name}(" in everything, name
        for file in files:
            assert (HERE.parent / file).exists(), file
