"""The README's code runs, its commands are CI's, and its figures are the committed results."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import te_patches

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, flags=re.S))
def test_python_blocks_run(block):
    exec(compile(block, "README.md", "exec"), {})
    assert te_patches.report()["applied"]


def test_ci_runs_the_readmes_second_command():
    commands = re.findall(r"```bash\n(.*?)\n```", README, flags=re.S)
    assert len(commands) == 2
    assert commands[1] == (ROOT / ".ci" / "run").read_text().splitlines()[-1]


TABLES = runpy.run_path(str(ROOT / "benches" / "tables.py"))["TABLES"]


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, tables in TABLES.items() for name in tables])
def test_the_figures_are_those_of_the_committed_results(file, name):
    shown = re.search(rf"<!-- {name}:begin -->\n(.*)\n<!-- {name}:end -->", (ROOT / file).read_text(), flags=re.S)
    assert shown, "run benches/tables.py"
    assert shown.group(1) == TABLES[file][name]()


def test_files_named_in_the_map_exist():
    tree = README.split("## Map of the tree")[1]
    for name in re.findall(r"`((?:src|python|tests|benches|kernels)/[\w/.]*)`", tree):
        assert (ROOT / name).exists(), name


def test_the_version_is_the_changelogs_newest():
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert newest
    assert newest.group(1) == te_patches.__version__
    assert sys.version_info >= (3, 10)
