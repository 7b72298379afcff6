"""What is in place and what each group's last step was."""

from __future__ import annotations

import io
from typing import Any

from te_patches import _core, _load, _patching, _step

_REMEDY = (
    "this optimizer holds the step it had before te_patches.apply(), pinned by a scheduler or another wrapper: call "
    "te_patches.apply() before schedulers are built"
)


class Report(dict[str, Any]):
    """What `report()` found; printed, it is tables for people."""

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        console = Console(file=io.StringIO(), width=200, no_color=True, markup=False)
        console.print(
            f"te_patches {'applied' if self['applied'] else 'not applied'}, kernels {self['kernels']}, "
            f"Transformer Engine {self['te']}, torch {self['torch']}"
        )
        if self.get("remedy"):
            console.print(f"NOT REACHED: {self['remedy']}")
        titles = {"patches": "patches", "proofs": "kernels compared with stock", "groups": "parameter groups"}
        for name, title in titles.items():
            if rows := self.get(name):
                table = Table(*rows[0], title=title, title_justify="left")
                for row in rows:
                    table.add_row(
                        *("\n".join(value) if isinstance(value, list) else f"{value}" for value in row.values())
                    )
                console.print(table)
        if self.get("load"):
            counts = ", ".join(f"{name} {count}" for name, count in self["load"].items())
            console.print(f"last load, states: {counts}")
        return str(console.file.getvalue())  # type: ignore[attr-defined]


def report(optimizer: Any = None) -> Report:
    """The patches and, given an optimizer, how each of its groups was last stepped: a dict, which prints as tables.

    Keys: applied (bool), kernels ("auto", "native", "te"), te and torch (versions), patches (target, state, why),
    proofs (kernel, device, equal, reason). With an optimizer also groups: index, tier ("native", "replay", "stock"; ""
    before the first step), reason, kernels, tensors, elements, steps (taken natively), launches, plans (made), recalled
    (parameters that the last step found as they were, and so read by their words alone); reached (whether its step is
    the patched one) and remedy (what to do if not); and load: None, or of the last `load_state_dict` the states loaded,
    in_place, fresh (into new buffers) and same (were their own source).
    """
    import torch

    applied = _patching.applied()
    result = Report()
    result |= {
        "applied": applied is not None,
        "kernels": applied.switch.kernels if applied else None,
        "te": applied.switch.release.version if applied else None,
        "torch": torch.__version__,
        "patches": [
            {"target": patch.target, "state": patch.state, "why": patch.why}
            for patch in (applied.patches if applied else [])
        ],
        "proofs": [
            {"kernel": kernel, "device": f"cuda:{device}", "equal": equal, "reason": reason}
            for device, kernel, equal, reason in _core.proofs()
        ],
    }
    if optimizer is not None:
        plan = _step.plan_of(optimizer)
        result["groups"] = plan.report() if plan else []
        result["reached"] = reached = applied is not None and _step.reaches(optimizer)
        result["remedy"] = "" if reached or applied is None else _REMEDY
        result["load"] = _load.last_load(optimizer)
    return result
