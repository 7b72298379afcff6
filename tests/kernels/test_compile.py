"""Every kernel compiles for every supported GPU without one, and keeps its operands in registers."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from te_patches import _core, _nvrtc

ARCHITECTURES = (80, 90, 100, 120)
GRADIENTS = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    _nvrtc.preload()


def assert_no_spills(compiled, what):
    cubin, log = compiled
    assert cubin[:4] == b"\x7fELF"
    usage = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert usage, log
    assert set(usage) == {("0", "0", "0")}, f"{what}: {usage}"


def chosen(arch):
    """(kernel, large): all that move their states once, for sm_90 at both sizes of their parameter. Of scaled ones each
    combination of parameter, moments and master, with a gradient type that differs from architecture to architecture;
    all of them with TE_PATCHES_EXHAUSTIVE.
    """
    rows = []
    for at, variant in enumerate(_core.kernel_variants()):
        grad, _, exp_avg, exp_avg_sq, *_ = variant
        once = exp_avg == exp_avg_sq and exp_avg in ("float32", "bfloat16")
        rotated = GRADIENTS.index(grad) == (at + ARCHITECTURES.index(arch)) % 3
        if once or rotated or "TE_PATCHES_EXHAUSTIVE" in os.environ:
            rows.append((variant, True))
        if once and arch == 90:
            rows.append((variant, False))
    return rows


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_variant_compiles_without_spills(arch):
    variants = _core.kernel_variants()
    assert len(set(variants)) == len(variants)

    def check(row):
        variant, large = row
        assert_no_spills(_core.compile_kernel(variant, arch, large), f"{variant} for sm_{arch}")

    # NVRTC compiles without the interpreter's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(check, chosen(arch)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_cast_compiles_without_spills(arch):
    casts = _core.kernel_casts()
    assert len(set(casts)) == len(casts)
    for index, cast in enumerate(casts):
        for large in (False, True):
            assert_no_spills(_core.compile_cast(index, arch, large), f"{cast} for sm_{arch}")
    with pytest.raises(IndexError):
        _core.compile_cast(len(casts), arch, False)


def test_an_unknown_architecture_is_an_error_with_the_compilers_words():
    with pytest.raises(RuntimeError, match="NVRTC"):
        _core.compile_kernel(_core.kernel_variants()[0], 7, False)


def test_an_unknown_storage_type_is_refused():
    with pytest.raises(ValueError, match="float64"):
        _core.compile_kernel(("float64", "float32", "float32", "float32", "none", "host"), 90, False)
