"""The tally of what was compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import twin


@pytest.fixture(scope="session", autouse=True)
def _tally():
    yield
    twin.TALLY.write()
