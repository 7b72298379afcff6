"""What every test needs: Transformer Engine (the real one beside a GPU, else its Python files on CPU kernels), a fresh
seed, and patches that never outlive their test.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

# The twins of the parity suite serve everywhere.
sys.path.insert(0, str(Path(__file__).parent / "parity"))
sys.path.insert(0, str(Path(__file__).parent))

import te_patches.cpu
import te_release

GPU = torch.cuda.is_available()

if GPU:
    with warnings.catch_warnings():
        # It warns of frameworks it was not built for.
        warnings.simplefilter("ignore")
        import transformer_engine.pytorch  # noqa: F401
else:
    sys.path.insert(0, str(te_release.fetch(te_release.chosen())))
    te_patches.cpu.enable()


def pytest_report_header() -> str:
    where = torch.cuda.get_device_name() if GPU else "CPU kernels in place of its compiled part"
    return f"Transformer Engine {te_patches._releases._version()} on {where}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needs_gpu = item.get_closest_marker("gpu") is not None
        if needs_gpu and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and the whole of Transformer Engine"))
        elif GPU and not needs_gpu:
            item.add_marker(pytest.mark.skip(reason="a CPU test: stock Transformer Engine takes no CPU tensors"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Failures as they happen, in $FAILURES: a run that a time limit cuts off prints no summary."""
    path = os.environ.get("FAILURES")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E  ")]
        with open(path, "a") as file:
            file.write("\n".join([report.nodeid, *lines[-6:], ""]))


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TE_PATCHES", raising=False)
    torch.manual_seed(1234)
    yield
    te_patches.revert()


@pytest.fixture(scope="session", autouse=True)
def _tally():
    """What the parity suite compared is written at the end."""
    yield
    if twin := sys.modules.get("twin"):
        twin.TALLY.write()


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache():
    """Compiled kernels of a run stay out of the user's cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TE_PATCHES_CACHE", folder)
        yield


@pytest.fixture
def optimizer_class():
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam


@pytest.fixture(scope="session")
def mesh():
    """A mesh of 64 ranks through torch's fake process group: DTensors are real, communication is not."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    yield init_device_mesh("cuda" if GPU else "cpu", (64,))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def shard(mesh):
    """Wraps a local tensor as the shard of a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def wrap(local: torch.Tensor) -> torch.Tensor:
        placement = Shard(0) if local.dim() else Replicate()
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    return wrap
