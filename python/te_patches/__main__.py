"""Command line: `python -m te_patches demo | doctor | verify | bench`."""

from __future__ import annotations

import sys

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="te_patches")
def main() -> None:
    """Transformer Engine's FusedAdam at the speed of the GPU's memory."""


@main.command()
@click.option("--steps", default=30, show_default=True, type=click.IntRange(min=2), help="training steps")
def demo(steps: int) -> None:
    """Train a small FSDP2 model by stock and by patched FusedAdam and compare speed, bits and memory."""
    from te_patches import _demo

    sys.exit(0 if _demo.run(steps) else 1)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="for machines")
def doctor(as_json: bool) -> None:
    """Say what is here, what is missing and the command that mends it; exit code 1 if native steps are impossible."""
    from te_patches import _doctor

    sys.exit(0 if _doctor.report(as_json) else 1)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="for machines")
def verify(as_json: bool) -> None:
    """Compare patched steps with the installed Transformer Engine's on this GPU, bit for bit, with every option.

    Exit code 1 if anything differs or is not served natively.
    """
    from te_patches import _verify

    sys.exit(0 if _verify.report(as_json) else 1)


@main.command()
@click.option("--tensors", default=1000, show_default=True, help="parameters")
@click.option("--elements", default=1 << 20, show_default=True, help="elements of each")
@click.option("--steps", default=7, show_default=True, help="steps measured")
@click.option("--case", "cases", multiple=True, help="only these cases; names are in the table")
@click.option("--json", "as_json", is_flag=True, help="for machines")
def bench(tensors: int, elements: int, steps: int, cases: tuple[str, ...], as_json: bool) -> None:
    """Measure steps by stock and by te_patches on this GPU, against the rate at which it copies memory.

    Exit code 1 if a case could not be measured; smaller tensors need less of the GPU's memory.
    """
    from te_patches import _bench

    unknown = set(cases) - set(_bench.CASES)
    if unknown:
        raise click.BadParameter(f"{', '.join(sorted(unknown))}; there are {', '.join(_bench.CASES)}")
    sys.exit(0 if _bench.report(tensors, elements, steps, cases, as_json) else 1)


if __name__ == "__main__":
    main()
