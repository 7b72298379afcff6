"""The switches: by argument to `apply()` or by environment. Read once per `apply()`, kept in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, cast, get_args

from te_patches._releases import Release

Kernels = Literal["auto", "native", "te"]
_ACCEPTED = (*get_args(Kernels), "off")


@dataclass
class Switch:
    """Whether the patches are in force and how; shared with functions that schedulers may hold for ever."""

    kernels: Kernels
    release: Release
    in_place_load: bool = True
    progress: bool = False
    count_empty_groups: bool = False
    active: bool = True


def choose_kernels(argument: Kernels | None) -> Kernels | Literal["off"]:
    """`argument`, or else the environment's `TE_PATCHES`, or else "auto".

    `TE_PATCHES=off` wins over everything, so that a job can be run stock without touching its script. ValueError for
    any other word, wherever it came from.
    """
    environment = os.environ.get("TE_PATCHES", "").strip().lower()
    if environment and environment not in _ACCEPTED:
        raise ValueError(f"TE_PATCHES={environment!r} in the environment; accepted: {', '.join(_ACCEPTED)}")
    if argument is not None and argument not in get_args(Kernels):
        raise ValueError(f"kernels={argument!r}; accepted: {', '.join(get_args(Kernels))}")
    if environment == "off":
        return "off"
    return argument or cast(Kernels, environment or "auto")


def choose_progress(argument: bool | None) -> bool:
    """`argument`, or else whether the environment's `TE_PATCHES_PROGRESS` is 1. ValueError for another word there."""
    environment = os.environ.get("TE_PATCHES_PROGRESS", "").strip()
    if environment not in ("", "0", "1"):
        raise ValueError(f"TE_PATCHES_PROGRESS={environment!r} in the environment; accepted: 0, 1")
    return environment == "1" if argument is None else argument
