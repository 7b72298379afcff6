"""Writes docs/compatibility.md: what each Transformer Engine release needs, and whether every tier gave its bits.

    python tests/compatibility.py

Every release's own Python files, on CPU kernels in place of its compiled part; the H200's row comes from the results in
benches/results. With a release as argument: that release's findings as JSON, nothing written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "compatibility.md"
RESULTS = HERE.parent / "benches" / "results"
sys.path[:0] = [str(HERE), str(HERE / "parity")]

import te_release  # noqa: E402

TIERS = ("native", "replay", "stock")


def examine(release: str) -> dict[str, Any]:
    """Verdict of each patch, and for each tier "equal" or how it differs from stock after three steps."""
    import te_patches.cpu

    sys.path.insert(0, str(te_release.fetch(release)))
    te_patches.cpu.enable()
    import torch
    from options import Combination
    from te_patches import _patching
    from twin import Twin

    te_patches.apply()
    applied = _patching.applied()
    assert applied is not None
    prefix = "transformer_engine.pytorch.optimizers."
    patches = {patch.target.removeprefix(prefix): patch.state for patch in applied.patches}
    tiers = {}
    remainder = Combination(torch.bfloat16, torch.bfloat16, "remainder", torch.float32)
    capturable = Combination(torch.float32, torch.float32, "none", torch.float32, capturable=True)
    for tier in TIERS:
        te_patches.apply(kernels="native" if tier == "native" else "te")
        # Below native, capturable mode is stock's.
        twin = Twin(capturable if tier == "stock" else remainder)
        try:
            for _ in range(3):
                twin.fill_gradients()
                twin.step()
            served = {group["tier"] for group in te_patches.report(twin.mine)["groups"]}
            tiers[tier] = "equal" if served == {tier} else f"served by {served}"
        except AssertionError as error:
            tiers[tier] = f"differs: {error}"
    return {"patches": patches, "tiers": tiers}


def on_h200(release: str) -> str:
    path = RESULTS / f"parity-{release}-h200.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    failed = f" ({found['tests_failed']} more failed)" if found.get("tests_failed") else ""
    counts = f"{found['combinations']:,} combinations, {found['mismatches']} mismatches"
    return f"{found['tests_passed']:,} tests{failed}, {counts}"


def table(findings: dict[str, dict[str, Any]]) -> str:
    """The document."""
    names = list(next(iter(findings.values()))["patches"])
    lines = [
        "# Compatibility",
        "",
        "Written by `python tests/compatibility.py`: what each release's Python files need,",
    ]
    lines += [
        "and whether each tier gave stock's bits on them (CPU kernels, ragged and empty tensors, three steps).",
        "",
    ]
    lines += ["| | " + " | ".join(findings) + " |", "|---|" + "---|" * len(findings)]
    for name in names:
        states = [found["patches"][name] for found in findings.values()]
        lines.append(f"| `{name}` | " + " | ".join(states) + " |")
    for tier in TIERS:
        lines.append(f"| tier {tier} | " + " | ".join(found["tiers"][tier] for found in findings.values()) + " |")
    lines.append("| gpu suite on an H200 | " + " | ".join(on_h200(release) for release in findings) + " |")
    lines += [
        "",
        "patched: the release needs it. stepped aside: the release does it by itself, found by probing what it does.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(examine(sys.argv[1])))
        return
    findings = {}
    for release in te_release.RELEASES:
        command = [sys.executable, __file__, release]
        findings[release] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    DOCUMENT.write_text(table(findings))


if __name__ == "__main__":
    main()
