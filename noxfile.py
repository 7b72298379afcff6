"""Set-up and checks in one command each: `nox -s demo` trains and compares, `nox -s tests` is all that CI runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

TORCH = "2.11.0"
# Others whose tensors are read; the first, with tensors laid out otherwise than in the one above, by `tests` too.
OTHER_TORCHES = ("2.9.1", "2.7.1", "2.13.0", "2.15.0")
# What Transformer Engine's Python files import beside torch.
TE_NEEDS = ["pydantic", "packaging", "importlib-metadata"]
RELEASES = ("2.20.2", "2.19.0", "2.18.0", "2.17.1", "2.15.0", "2.13.0", "2.8.0", "2.11.0")
# Its states are made, read and written in the way furthest from the newest: loading is tested with it too. It comes
# last, with a wheel that checks its assertions and integer overflows.
CHECKED = RELEASES[-1]


def build(session: nox.Session, profile: str) -> None:
    """This project's wheel, built with a profile of Cargo's and installed."""
    wheels = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    session.run("maturin", "build", "--profile", profile, "--locked", "--out", str(wheels))
    session.install("--force-reinstall", "--no-deps", *map(str, wheels.glob("*.whl")))


def install(session: nox.Session, torch: str = TORCH) -> None:
    """torch, this project's wheel and what Transformer Engine's Python files need."""
    if not shutil.which("cargo"):
        session.error("Rust is needed to build the wheel: install it from your distribution or rustup")
    session.install(f"torch=={torch}", "numpy", *TE_NEEDS)
    session.install("maturin>=1.9,<2", "click", "rich")
    build(session, "release")


def install_dev(session: nox.Session, torch: str = TORCH) -> None:
    """What the tests take beside this project; some of it would bring the newest torch."""
    dev = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]["dev"]
    session.install(f"torch=={torch}", *dev)


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
    install_dev(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    cargo = {"external": True}
    session.run("cargo", "fmt", "--check", **cargo)
    session.run("cargo", "clippy", "--all-targets", "--locked", "--", "-D", "warnings", **cargo)
    fuzz = ("--manifest-path", "tests/fuzz/Cargo.toml", "--target-dir", "target")
    session.run("cargo", "clippy", "--locked", *fuzz, "--", "-D", "warnings", **cargo)
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
        if release == CHECKED:
            folders += ["tests/load"]
            build(session, "checked")
        session.run(
            "python", "-m", "pytest", "-q", "-n", "auto", *folders, *session.posargs, env={"TE_RELEASE": release}
        )
    session.notify(f"torches({OTHER_TORCHES[0]})")


@nox.session
@nox.parametrize("torch", [nox.param(torch, id=torch) for torch in OTHER_TORCHES])
def torches(session: nox.Session, torch: str) -> None:
    """The parts that read tensors, with other torch releases: `nox -s torches`, or `nox -s "torches(2.15.0)"`."""
    install_dev(session, torch)
    install(session, torch)
    session.run("python", "tests/te_release.py", RELEASES[0], silent=True)
    session.run("python", "-m", "pytest", "-q", "-n", "auto", "tests/api", "tests/parity", "tests/load")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Each fuzz target for the given number of seconds, 60 by default; needs a nightly Rust and cargo-fuzz."""
    seconds = session.posargs[0] if session.posargs else "60"
    for target in ("views", "plan", "loader"):
        command = ["cargo", "+nightly", "fuzz", "run", "--fuzz-dir", "tests/fuzz", target, "--"]
        session.run(*command, f"-max_total_time={seconds}", external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """The API reference, from the docstrings, into dist/api/."""
    install(session)
    session.install("pdoc")
    session.run("pdoc", "te_patches", "te_patches.cpu", "--no-show-source", "--output-directory", "dist/api")


@nox.session
def wheels(session: nox.Session) -> None:
    """The wheels for x86-64 and aarch64 Linux and the source distribution, into dist/; needs rustup."""
    session.install("maturin>=1.9,<2", "ziglang", "auditwheel")
    dist = Path("dist")
    shutil.rmtree(dist, ignore_errors=True)
    for target in ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"):
        session.run("rustup", "target", "add", target, external=True)
        command = ["maturin", "build", "--release", "--locked", "--zig", "--compatibility", "manylinux_2_28"]
        session.run(*command, "--target", target, "--out", str(dist))
    session.run("maturin", "sdist", "--out", str(dist))
    for wheel in sorted(dist.glob("*.whl")):
        session.run("auditwheel", "show", str(wheel))
        if wheel.stat().st_size > 10 << 20:
            session.error(f"{wheel.name} is larger than 10 MB")
