"""The switches: by argument to `apply()` or by environment. Read once per `apply()`, kept in one place."""

from __future__ import annotations

import os
from typing import Literal, cast, get_args

Kernels = Literal["auto", "native", "te"]
_ACCEPTED = (*get_args(Kernels), "off")


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
