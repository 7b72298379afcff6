"""A tensor's bits, which tell values apart that compare equal or unequal to themselves: zeros by their sign, NaN."""

from __future__ import annotations

from typing import Any


def bits(tensor: Any) -> Any:
    """A view of the tensor's bytes as integers of its element size: 1, 2, 4 or 8 bytes."""
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
