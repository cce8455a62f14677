"""The checks of this repository: `nox` runs lint, types and tests."""

import itertools
import shutil
from pathlib import Path

import nox


nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests"]

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
PYPROJECT = nox.project.load_toml("pyproject.toml")
# One worker per file, because the examples of a page depend on each other. A crashed
# worker is not replaced: xdist would wait for it forever (pytest-xdist issue 1327).
PARALLEL = ["-n", "auto", "--maxprocesses=8", "--dist=loadfile", "--durations=50"]
PARALLEL += ["--max-worker-restart=0"]
FUZZED = [
    "laws/test_programs.py",
    "laws/test_laws.py",
    "laws/test_threads.py",
]


def groups(*names: str) -> tuple[str, ...]:
    """The requirements of these dependency groups."""
    return nox.project.dependency_groups(PYPROJECT, *names)


@nox.session
def demo(session: nox.Session) -> None:
    """Train the example on handwritten digits, and draw `digits.png`."""
    session.log("The first run downloads about 180 MB, most of it JAX and SciPy.")
    session.install(".", *groups("examples"), silent=False)
    path = session.posargs or ["digits.png"]
    session.run("python", "examples/digits.py", *path, env={"PYTHONUNBUFFERED": "1"})


@nox.session
def examples(session: nox.Session) -> None:
    """Run all examples, shortened. `-- full` runs them in full, `-- vae gan` these."""
    session.install(".[io]", *groups("test", "examples"))
    names = session.posargs
    if not names:
        session.run("pytest", *PARALLEL, "tests/examples")
        names = ["data_parallel", "sharded"]  # which start processes of their own
    folder = Path("examples").resolve()
    if names == ["full"]:
        names = sorted(path.stem for path in folder.glob("[!_]*.py"))
    with session.chdir(session.create_tmp()):  # `training` writes files
        for name in names:
            session.run("python", str(folder / f"{name}.py"))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, with warnings as errors; `-- serve` shows it."""
    session.install(*groups("docs"))
    # Otherwise Material prints on every run that MkDocs 2 will not be supported.
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env=quiet)


@nox.session
def pages(session: nox.Session) -> None:
    """Run each page alone, as a script, with only the packages that it names."""
    packages = {"none": ["."], "io": [".[io]"], "more": groups("test")}
    for needs, names in packages.items():
        session.install(*names)
        session.run("python", "tools/pages.py", "--needs", needs, *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Compare memory, program size and host time with other ways to write a step."""
    session.install(".", *groups("bench"))
    session.run("python", "benchmarks/summary.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Test the built wheel, and the code in the documentation."""
    session.install(".", *groups("test", "examples"))
    everything = [*PARALLEL, "--ignore=tests/examples"]
    everything += ["--cov", "--cov-report=term-missing:skip-covered"]
    session.run("pytest", *(session.posargs or everything))


@nox.session(python=PYTHONS)
def versions(session: nox.Session) -> None:
    """Run the tests on each Python, with the newest JAX for it."""
    session.install(".", *groups("test", "examples"))
    session.run("pytest", *(session.posargs or PARALLEL))


@nox.session(python="3.11")
def floors(session: nox.Session) -> None:
    """Run the tests with the oldest dependencies that `pyproject.toml` allows."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    bounds = [*project["dependencies"], *itertools.chain(*extras)]
    session.install(".", *(bound.replace(">=", "==") for bound in bounds))
    # Leave out libraries that need a newer JAX. Tests that need them are skipped.
    session.install(*groups("test-base", "examples"))
    session.run("pytest", *(session.posargs or [*PARALLEL, "tests", "src"]))


@nox.session
@nox.parametrize("check", ["JAX_CHECK_TRACER_LEAKS", "JAX_DEBUG_KEY_REUSE"])
def jax_checks(session: nox.Session, check: str) -> None:
    """Run the tests with one of JAX's own checks enabled."""
    session.install(".", *groups("test", "examples"))
    # Without the pages, which call one model twice on purpose.
    args = session.posargs or [*PARALLEL, "tests", "src"]
    session.run("pytest", *args, env={check: "1"})


@nox.session
def fuzz(session: nox.Session) -> None:
    """Test laws on thousands of models, 20,000 random programs, and many threads."""
    session.install(".", *groups("test"))
    paths = [f"tests/{name}" for name in FUZZED]
    args = session.posargs or [*PARALLEL, "--dist=load", *paths]
    session.run("pytest", *args, env={"EQX_STATE_FUZZ": "1"})


@nox.session
def mutants(session: nox.Session) -> None:
    """Make one small change at a time, and list those that no test detects.

    `-- 1/4` runs a quarter. A second run skips changes that have been tested; delete
    `.mutants.jsonl` to start over.
    """
    session.install(".", *groups("test"))
    if not Path(".coverage.mutants").exists():  # records which tests run which line
        session.run("python", "tools/mutants.py", "cover")
    session.run("python", "tools/mutants.py", "run", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build the archives of a release in `dist`, and check them."""
    session.install(*groups("package"))
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")  # builds the wheel from the source archive
    archives = [str(path) for path in Path("dist").iterdir()]
    session.run("twine", "check", "--strict", *archives)
    session.run("check-wheel-contents", "dist")


@nox.session(python=PYTHONS)
def smoke(session: nox.Session) -> None:
    """Train with only the wheel that `package` built."""
    session.install(*map(str, Path("dist").glob("*.whl")))
    program = Path("examples/quickstart.py").resolve()
    with session.chdir(session.create_tmp()):  # away from the sources
        session.run("python", str(program))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, imports between layers, and the workflows."""
    session.install(*groups("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports", env={"PYTHONPATH": "src"})
    session.run("zizmor", "--offline", "--quiet", ".github")


@nox.session
def types(session: nox.Session) -> None:
    """Check types as users see them, and that every public name has a type."""
    session.install(".", *groups("types"))
    session.run("python", "tests/typing/check.py")
    session.run("pyright", "--verifytypes", "eqx_state", "--ignoreexternal")
