"""Meshes for DTensors, and the tally of what was compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import twin


@pytest.fixture(scope="session", autouse=True)
def _tally():
    yield
    twin.TALLY.write()


@pytest.fixture(scope="session")
def mesh():
    """A mesh of 64 ranks through torch's fake process group: DTensors are real, communication is not."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    yield init_device_mesh(twin.DEVICE, (64,))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def shard(mesh):
    """Wraps a local tensor as the shard of a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def wrap(local: torch.Tensor) -> torch.Tensor:
        placement = Shard(0) if local.dim() else Replicate()
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    return wrap
