"""Set-up and checks in one command each: `nox -s demo` trains and compares, `nox -s tests` is all that CI runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

TORCH = "torch==2.11.0"
# What Transformer Engine's Python files import beside torch.
TE_NEEDS = ["pydantic", "packaging", "importlib-metadata"]
# The one whose states are made, read and written in the way furthest from the newest.
LOADED = ("2.11.0",)
RELEASES = ("2.20.2", "2.19.0", "2.18.0", "2.17.1", "2.15.0", "2.13.0", "2.11.0", "2.8.0")


def install(session: nox.Session) -> None:
    """torch, this project's wheel and Transformer Engine's Python files."""
    if not shutil.which("cargo"):
        session.error("Rust is needed to build the wheel: install it from your distribution or rustup")
    session.install(TORCH, "numpy", *TE_NEEDS)
    wheels = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    session.install("maturin>=1.9,<2")
    session.run("maturin", "build", "--release", "--locked", "--out", str(wheels))
    session.install("--force-reinstall", "--no-deps", *map(str, wheels.glob("*.whl")))
    session.install("click", "rich")


@nox.session
def demo(session: nox.Session) -> None:
    """Trains a small FSDP2 model by stock and by patched FusedAdam, side by side."""
    install(session)
    if session.run("python", "-c", "import transformer_engine_torch", success_codes=[0, 1], silent=True):
        session.install("--no-deps", "transformer-engine==2.20.2")
    session.run("python", "-m", "te_patches", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Lints, types, Rust tests, and the Python suite against every supported Transformer Engine release."""
    session.install("ruff", "mypy", "pytest", "pytest-xdist", "hypothesis")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    cargo = {"external": True}
    session.run("cargo", "fmt", "--check", **cargo)
    session.run("cargo", "clippy", "--all-targets", "--locked", "--", "-D", "warnings", **cargo)
    if not shutil.which("cargo-nextest"):
        session.run("cargo", "install", "cargo-nextest", "--locked", **cargo)
    session.run("cargo", "nextest", "run", "--locked", **cargo)
    install(session)
    session.run("mypy", "python/te_patches")
    session.run("python", "-m", "mypy.stubtest", "te_patches._core")
    session.run("python", "tests/te_release.py", *RELEASES, silent=True)
    for release in RELEASES:
        # The kernels and the documentation are the same for every release.
        folders = ["tests"] if release == RELEASES[0] else ["tests/parity", "tests/api", "tests/clients"]
        folders += ["tests/load"] if release in LOADED else []
        session.run(
            "python", "-m", "pytest", "-q", "-n", "auto", *folders, *session.posargs, env={"TE_RELEASE": release}
        )
