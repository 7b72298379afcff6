"""Every block of Python in docs/guides.md runs, each in a process of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import te_release
from process import run

ROOT = Path(__file__).parents[1]
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "guides.md").read_text(), flags=re.M)[1:]
BLOCKS = [
    pytest.param(block, id=section.splitlines()[0])
    for section in SECTIONS
    for block in re.findall(r"```python\n(.*?)```", section, flags=re.S)
]
ON_CPU = "import te_patches.cpu; te_patches.cpu.enable()\n"


def test_every_section_has_its_example():
    assert len(BLOCKS) == len(SECTIONS) == 6


@pytest.mark.parametrize("block", BLOCKS)
def test_cpu_guides_run(block):
    if block.startswith("# on a GPU"):
        pytest.skip("says that it needs a GPU")
    folders = [te_release.fetch("0.7.0", "nemo-automodel")] if "nemo" in block else []
    run(ON_CPU + block, *folders)


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_gpu_guides_run(block):
    if block.startswith("# with nemo-automodel"):
        pytest.skip("needs the package index")
    run(block)
