"""The tables of cases and of patterns name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(("folder", "start", "count"), [("cases", "| B", 30), ("clients", "| ", 33 + 21)])
def test_every_test_that_a_table_names_exists(folder, start, count):
    table = (HERE.parent / folder / "README.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith(start)]
    assert len(rows) == count
    sources = {path: path.read_text() for path in HERE.parent.rglob("test_*.py")}
    everything = "\n".join(sources.values())
    for row in rows:
        names = re.findall(r"\b(test_\w+)\b(?!\.py)", row)
        files = re.findall(r"(\w+/test_\w+\.py)", row)
        for name in names:
            assert f"def {name}(" in everything, name
        for file in files:
            assert (HERE.parent / file).exists(), file
