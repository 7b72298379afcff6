"""The twins of the parity suite serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "parity"))

import twin


@pytest.fixture(scope="session", autouse=True)
def _tally():
    yield
    twin.TALLY.write()
