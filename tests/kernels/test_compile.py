"""Every kernel compiles for every supported GPU without one, and keeps its operands in registers."""

from __future__ import annotations

import re

import pytest
from te_patches import _core, _nvrtc

ARCHITECTURES = (80, 90, 100, 120)


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    _nvrtc.preload()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_variant_compiles_without_spills(arch):
    variants = _core.kernel_variants()
    assert len(set(variants)) == len(variants)
    for variant in variants:
        for large in (False, True):
            cubin, log = _core.compile_kernel(variant, arch, large)
            assert cubin[:4] == b"\x7fELF"
            usage = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
            assert usage, log
            assert usage.groups() == ("0", "0", "0"), f"{variant} for sm_{arch}: {usage.group()}"


def test_an_unknown_architecture_is_an_error_with_the_compilers_words():
    with pytest.raises(RuntimeError, match="NVRTC"):
        _core.compile_kernel(_core.kernel_variants()[0], 7, False)


def test_an_unknown_storage_type_is_refused():
    with pytest.raises(ValueError, match="float64"):
        _core.compile_kernel(("float64", "float32", "float32", "none"), 90, False)
