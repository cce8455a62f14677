"""The checks of this repository: `nox` runs lint, types and tests."""

from pathlib import Path

import nox


nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")


def groups(*names: str) -> tuple[str, ...]:
    """The requirements of these dependency groups."""
    return nox.project.dependency_groups(PYPROJECT, *names)


@nox.session
def demo(session: nox.Session) -> None:
    """Train the example on handwritten digits."""
    session.install(".", *groups("examples"))
    session.run("python", "examples/digits.py", *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Run every example in full: each asserts its result and writes a picture."""
    session.install(".", *groups("examples"))
    paths = sorted(Path("examples").resolve().glob("*.py"))
    with session.chdir(session.create_tmp()):  # where the pictures go
        for path in paths:
            session.run("python", str(path))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, with warnings as errors; `-- serve` to look at it."""
    session.install(*groups("docs"))
    # Material prints on every run that there will be no MkDocs 2 for it.
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env=quiet)


@nox.session
def bench(session: nox.Session) -> None:
    """Compare with JAX by hand and with other libraries: memory, program size, time."""
    session.install(".", *groups("bench"))
    session.run("python", "benchmarks/summary.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Test the built wheel and every example of the documentation."""
    session.install(".", *groups("test", "examples"))
    everything = [
        "-n",
        "auto",
        "--maxprocesses=8",
        "--dist=loadfile",  # the examples of a page need one another
        "--cov",
        "--cov-report=term-missing:skip-covered",
    ]
    session.run("pytest", *(session.posargs or everything))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and which module imports which."""
    session.install(*groups("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports", env={"PYTHONPATH": "src"})


@nox.session
def types(session: nox.Session) -> None:
    """Check what users' type checkers see, and that every public name has a type."""
    session.install(".", *groups("types"))
    session.run("python", "tests/typing/check.py")
    session.run("pyright", "--verifytypes", "eqx_state", "--ignoreexternal")
