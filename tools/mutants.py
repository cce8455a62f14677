"""Mutation testing: make one change to the library, and see whether a test fails.

    python tools/mutants.py cover                   # which tests run which line
    python tools/mutants.py run 1/8                 # an eighth of all mutants
    python tools/mutants.py run _tree.keys nn._dropout   # those of some modules
    python tools/mutants.py run --tests=400 --again # those that survived fewer tests
    python tools/mutants.py run --tests=61 --again --also=tests/a.py  # and a whole file
    python tools/mutants.py table                   # write tests/mutants.md

Each mutant runs in a fork of this process, which has imported everything except the
library, because starting JAX takes longer than most tests. No file is changed: a finder
gives Python the mutated code when the module is imported.

Each result is appended to `.mutants.jsonl` as a line. Mutants with a result are not run
again, so you can stop a run at any time, and resume it. A mutant is identified by its
module and the line of code before and after, not by the line number.

For each mutant, run at most `--tests` tests, until one fails. Begin with tests that are
fast, run little other code, and test the module itself. Of a line that thousands of
tests run, or that runs at import, these may be the wrong ones: run the survivors again
with `--also`. `tests/mutants.md` says why no test can detect the mutants in it; any
other survivor is an error.

Why not a library: importing JAX takes seconds, so each mutant needs a fork, and core
functions are called by thousands of tests, so each mutant needs a selection of tests.
cosmic-ray 8.7 starts a process for each mutant, and pytest-gremlins 1.12 for each ten.
mutmut 3.8 forks, and its wrappers of functions pass the tests of `tests/kinds`. But it
makes 1,007 mutants of `_kinds` alone, most of them in texts of errors, which our tests
match by fragments, and runs for a survivor all tests that call the function: in
`_kinds` a median of 186, in the core nearly all.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools as ft
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Any

import coverage
import pytest


ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "eqx_state"
DATA = ROOT / ".coverage.mutants"
TIMES = ROOT / ".coverage.mutants.times"
RESULTS = ROOT / ".mutants.jsonl"
EXPLAINED = ROOT / "tests" / "mutants.md"
BYTECODE = ROOT / ".mutants.bytecode"  # `cover` deletes `.coverage.*`
# Imported once, for all mutants. None of these may import the library.
HEAVY = (
    "jax jax.numpy equinox optax hypothesis.extra.numpy numpy.testing pytest rich.table"
    " beartype sybil.parsers.markdown safetensors.numpy"
)
TICK = 0.01  # seconds between two checks of the running mutants
FIRST = 10  # collect and run this many tests before the others
OPTIONS = "-q -p no:cacheprovider -p no:cov -p no:xdist -W".split()
OPTIONS += ["ignore::pytest.PytestAssertRewriteWarning"]  # it is imported already
NO_TEST = "there is no such test"
# A mutant that takes more time or memory than this counts as detected, because it may
# loop forever. Count CPU seconds, and seconds in which all threads wait, but not wall
# time: the run may be suspended, or other processes may use the machine.
CPU_SECONDS, WAITING_SECONDS, BYTES = 10, 100, 8 * 2**30


# --- Mutants --------------------------------------------------------------------------

COMPARISONS = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: a span of the source, and the text that replaces it."""

    path: Path
    line: int
    start: int  # in bytes, in the whole file
    stop: int
    old: str
    new: str

    @property
    def module(self) -> str:
        parts = self.path.relative_to(SOURCE).with_suffix("").parts
        return ".".join(parts)

    @property
    def row(self) -> str:
        """The change as a row of the table, without line numbers, which move."""
        text = self.path.read_bytes()
        first = text.rindex(b"\n", 0, self.start) + 1
        last = text.index(b"\n", self.stop)
        before, after = text[first : self.start], text[self.stop : last]
        lines = before + self.old.encode() + after, before + self.new.encode() + after
        old, new = (" ".join(line.decode().split()) for line in lines)
        return f"| `{self.module}` | {_as_code(old)} | {_as_code(new)} |"

    def source(self) -> bytes:
        text = self.path.read_bytes()
        return text[: self.start] + self.new.encode() + text[self.stop :]


def _as_code(text: str) -> str:
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """The nodes to replace, and the code that replaces each."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = ast.Compare(
            node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators
        )
        yield node, f"({ast.unparse(new)})"
    elif isinstance(node, ast.BoolOp):
        yield (
            node,
            f"({ast.unparse(ast.BoolOp(OPERATORS[type(node.op)](), node.values))})",
        )
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        new = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        yield node, f"({ast.unparse(new)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        is_bool = isinstance(node.value, bool)
        yield node, repr(not node.value if is_bool else node.value + 1)
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield test, f"(not ({ast.unparse(test)}))"
    elif isinstance(node, ast.For):
        yield node.iter, "()"
    elif isinstance(node, ast.Return) and node.value is not None:
        if ast.unparse(node.value) not in ("None", "False"):  # `None` acts the same
            yield node.value, "None"
    elif isinstance(node, (ast.Break, ast.Continue)):
        yield node, "continue" if isinstance(node, ast.Break) else "break"
    elif isinstance(node, ast.ExceptHandler) and node.type is not None:
        yield node.type, "ZeroDivisionError"
    elif _is_effect(node):
        yield node, "pass"


def _is_effect(node: ast.AST) -> bool:
    """A statement without which the rest still runs."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.Call, ast.Yield, ast.YieldFrom))
    if isinstance(node, ast.Delete):  # `del name` has no effect that a test sees
        return not all(isinstance(target, ast.Name) for target in node.targets)
    if isinstance(node, (ast.Raise, ast.AugAssign)):
        return True
    return isinstance(node, ast.Assign) and not any(
        isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets
    )


def code_in(node: ast.AST, unused: Set[int]) -> Iterator[ast.AST]:
    """The nodes that run, without annotations, messages and code for type checkers.

    `unused`: the lines that do not run with these versions of Python and JAX.
    """
    if getattr(node, "lineno", None) in unused and isinstance(
        node, (ast.stmt, ast.ExceptHandler)
    ):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "TypeVar":
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    decorators = getattr(node, "decorator_list", [])
    if any("overload" in ast.unparse(x) for x in decorators):
        return
    if isinstance(node, ast.Assign) and "__tracebackhide__" in ast.unparse(node):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # our own assertion
        return
    if isinstance(node, ast.ClassDef) and "Protocol" in "".join(
        map(ast.unparse, node.bases)
    ):
        return
    yield node
    if isinstance(node, (ast.Raise, ast.JoinedStr)):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from code_in(child, unused)


def mutants_of(path: Path) -> list[Mutant]:
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    lines = text.decode().splitlines()
    unused = {n for n, x in enumerate(lines, start=1) if "# pragma: no cover" in x}
    for node in code_in(ast.parse(text), unused):
        for where, new in changes(node):
            start = starts[where.lineno - 1] + where.col_offset
            stop = starts[where.end_lineno - 1] + where.end_col_offset
            old = text[start:stop].decode()
            found.append(Mutant(path, where.lineno, start, stop, old, new))
    return found


# --- Tests for each mutant ------------------------------------------------------------


class Tests:
    """The tests that run a line, the fastest and most specific first."""

    def __init__(self) -> None:
        data = coverage.CoverageData(str(DATA))
        data.read()
        self.by_line: dict[str, dict[int, set[str]]] = {}
        seconds = seconds_of_tests()
        size: Counter[str] = Counter()
        for file in data.measured_files():
            lines = self.by_line.setdefault(_name(file), defaultdict(set))
            for line, contexts in data.contexts_by_lineno(file).items():
                names = {_node_id(c) for c in contexts if c.endswith("|run")}
                lines[line] |= names
                size.update(names)
        self.cost = {
            name: num * (0.2 + seconds.get(name, 1.0)) for name, num in size.items()
        }

    def of(self, mutant: "Mutant", most: int) -> list[str]:
        lines = self.by_line.get(_name(str(mutant.path)), {})
        # A line in the middle of a statement may not be measured by itself.
        line = max((n for n in lines if n <= mutant.line), default=0)
        # A line that runs at import, such as a default: first the tests that run the
        # next line, which may be the body of its function, then those of the module.
        below = (lines[n] for n in sorted(lines) if n > line)
        near = lines.get(line) or next(filter(None, below), set())
        names = lines.get(line) or set().union(*lines.values())
        folders, stem = mutant.path.relative_to(SOURCE).parts[:-1], mutant.path.stem
        mirror = "/".join(["tests", *(x.strip("_") for x in folders), ""])

        def cost(name: str) -> float:
            here = 0.3 if name.startswith(mirror) else 1
            here *= 0.2 if name.startswith(f"{mirror}test_{stem.strip('_')}") else 1
            return self.cost[name] * here

        # Perhaps only tests of the lines around a changed condition detect it.
        around = [lines[n] & names for n in range(line - 5, line + 15) if n in lines]
        ranked = [
            sorted(group, key=lambda x: (cost(x), x))
            for group in [near, *around, names]
        ]
        others = (name for group in ranked[1:-1] for name in group[:2])
        order = [*ranked[0][:FIRST], *others, *ranked[0], *ranked[-1]]
        return [*dict.fromkeys(order)][:most]


def tests_of(mutants: list["Mutant"], most: int) -> list[list[str]]:
    """The tests for each mutant.

    Compute them in a fork: the coverage data take a gigabyte, which slows later forks.
    """

    def found() -> Iterator[str]:
        tests = Tests()
        return (json.dumps(tests.of(mutant, most)) for mutant in mutants)

    pid, pipe = forked(found)
    with open(pipe) as file:
        names = [json.loads(line) for line in file.read().splitlines()]
    os.waitpid(pid, 0)
    return names


def seconds_of_tests() -> dict[str, float]:
    return dict(map(json.loads, TIMES.read_text().splitlines()))


def _name(file: str) -> str:
    return file[file.rindex("eqx_state") :]


def _node_id(context: str) -> str:
    return context.rsplit("|", 1)[0]


def cover(args: list[str]) -> None:
    """Run the tests once, and record the lines that each test runs, and its time."""
    TIMES.unlink(missing_ok=True)
    env = {**os.environ, "COVERAGE_FILE": str(DATA)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tools")])
    cov = ["--cov=eqx_state", "--cov-context=test", "--cov-report="]
    command = [sys.executable, "-m", "pytest", "-q", *cov, "--cov-fail-under=0"]
    args = args or ["-n", "auto", "tests"]
    subprocess.run([*command, "-p", "mutants", *args], cwd=ROOT, env=env, check=True)


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin of `cover`: record how long a test takes."""
    if report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:
        with TIMES.open("a") as file:
            print(json.dumps([report.nodeid, round(report.duration, 3)]), file=file)


# --- Running --------------------------------------------------------------------------


class Mutated(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds one module of the library, and gives Python the mutated code for it."""

    def __init__(self, mutant: Mutant):
        name = f"eqx_state.{mutant.module}".removesuffix(".__init__")
        super().__init__(name, str(mutant.path))
        self.mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, name: str) -> Any:
        return compile(self.mutant.source(), self.path, "exec")


class Killer:
    """A plugin that records the names of tests, and of test files, that fail."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


class Passing:
    """A plugin that runs some tests of the files, and records those that pass."""

    def __init__(self, names: set[str]) -> None:
        self.names, self.passed = names, set[str]()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self.names]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and not report.failed:
            self.passed.add(report.nodeid)


def forked(call: Callable[[], Iterable[str]]) -> tuple[int, int]:
    """Run a function in a fork. Returns its process, and a pipe for its result."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(write)
        return pid, read
    with contextlib.suppress(BaseException), open(os.devnull, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        os.chdir(ROOT)
        os.write(write, "\n".join(call()).encode())
        os._exit(0)
    os._exit(1)


def killers_of(mutant: Mutant, tests: list[str], seconds: float) -> list[str]:
    """The first test that fails with a mutant; empty if all pass."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    sys.meta_path.insert(0, Mutated(mutant))
    try:
        importlib.import_module("eqx_state")
    except BaseException:
        return ["import"]
    for chunk in filter(None, [tests[:FIRST], tests[FIRST:]]):
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + CPU_SECONDS + 3 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, -1))
        killer = Killer()
        if code := pytest.main(["-x", *OPTIONS, *chunk], plugins=[killer]):
            # Pytest cannot show some errors.
            is_internal = code == pytest.ExitCode.INTERNAL_ERROR
            return killer.names or ["pytest" if is_internal else NO_TEST]
    return []


def passing(names: set[str]) -> set[str]:
    """The tests that exist, and pass without a mutant."""
    files = {name.split("::")[0] for name in names}
    plugin = Passing(names)
    pytest.main([*OPTIONS, *(f for f in sorted(files) if Path(f).exists())], [plugin])
    return plugin.passed


@dataclasses.dataclass
class Running:
    """A mutant whose tests are running."""

    mutant: Mutant
    tests: list[str]
    pipe: int
    waited: float = 0.0


def results_of(
    mutants: list[Mutant], most: int, jobs: int, also: list[str]
) -> Iterator[dict[str, Any]]:
    """The result of each mutant, in the order in which the tests end.

    `also`: test files to run after the tests that cover the line.
    """
    todo, running = [*zip(mutants, tests_of(mutants, most), strict=True)][::-1], {}
    seconds_of = seconds_of_tests()
    extra = sum(x for name, x in seconds_of.items() if name.split("::")[0] in also)
    while todo or running:
        while todo and len(running) < jobs:
            mutant, names = todo.pop()
            seconds = extra + sum(seconds_of.get(name, 1.0) for name in names)
            names = [*names, *also]
            pid, pipe = forked(ft.partial(killers_of, mutant, names, seconds))
            running[pid] = Running(mutant, names, pipe)
        for pid, one in list(running.items()):
            one.waited = one.waited + TICK if is_waiting(pid) else 0.0
            if one.waited > WAITING_SECONDS:
                os.kill(pid, signal.SIGKILL)
            done, status, used = os.wait4(pid, os.WNOHANG)
            if done:
                del running[pid]
                with open(one.pipe) as file:
                    killer = file.read() if status == 0 else "time"
                yield {
                    "row": one.mutant.row,
                    "line": f"{one.mutant.module}:{one.mutant.line}",
                    "killer": killer,
                    "tests": len(one.tests),
                    "most": most,
                    "seconds": round(used.ru_utime + used.ru_stime, 1),
                }
        time.sleep(TICK)


def is_waiting(pid: int) -> bool:
    """Whether all threads of a process and of its children wait."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            children = (task / "children").read_text().split()
            if state != "S" or not all(is_waiting(int(child)) for child in children):
                return False
    return True


# --- Results --------------------------------------------------------------------------


def all_mutants() -> list[Mutant]:
    return [m for path in sorted(SOURCE.rglob("*.py")) for m in mutants_of(path)]


def chosen(args: list[str]) -> list[Mutant]:
    """All mutants, every n-th mutant, or those of some modules of any folder."""
    found = all_mutants()
    if not args:
        return found
    if "/" in args[0]:
        k, n = map(int, args[0].split("/"))
        return found[k - 1 :: n]
    return [m for m in found if {m.module, m.module.split(".")[-1]} & {*args}]


def all_results() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def results() -> dict[str, dict[str, Any]]:
    """The last result of each mutant, by its row of the table.

    Several mutants may have equal rows. The row survives if one of them survives.
    """
    found: dict[str, dict[str, Any]] = {}
    for new in all_results():
        old = found.get(new["row"])
        if old is None or old["most"] < new["most"] or not new["killer"]:
            found[new["row"]] = new
    return found


def explained() -> dict[str, str]:
    """The reasons in `tests/mutants.md`, by row."""
    lines = EXPLAINED.read_text().splitlines()
    rows = [line.rpartition(" | ") for line in lines if line.endswith(" |")]
    reasons = {f"{row} |": why.removesuffix("|").strip() for row, _, why in rows}
    return {row: why for row, why in reasons.items() if why and "`" in row}


def drop_false(killers: set[str]) -> None:
    """Drop results that come from tests that also fail without a mutant."""
    names = {name for name in killers if "::" in name}
    pid, pipe = forked(lambda: passing(names))
    with open(pipe) as file:
        bad = (names - {*file.read().splitlines()}) | (killers & {NO_TEST})
    os.waitpid(pid, 0)
    if bad:
        kept = [x for x in all_results() if not bad & {*x["killer"].splitlines()}]
        RESULTS.write_text("".join(f"{json.dumps(x)}\n" for x in kept))
        print("These fail without a mutant: mend them, or cover anew.")
        sys.exit("\n".join(sorted(bad)))


def prepare() -> None:
    """Import, once for all forks, everything except the library."""
    sys.path.insert(0, str(ROOT / "src"))
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(BYTECODE)
    for name in HEAVY.split():
        importlib.import_module(name)
    # For speed: Sybil looks up the module of each file, and pytest collects garbage.
    inspect.getmodule(prepare.__code__)
    gc.freeze()
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")


def run(args: argparse.Namespace) -> int:
    prepare()
    before, reasons = results(), explained()

    def is_due(mutant: Mutant) -> bool:
        old = before.get(mutant.row)
        if mutant.row in reasons:
            return False
        if args.again:
            return bool(old) and not old["killer"] and old["most"] < args.tests
        return old is None

    mutants = [m for m in chosen(args.which) if is_due(m)]
    survivors, seconds, killers = 0, 0.0, set()
    for result in results_of(mutants, args.tests, args.jobs, args.also):
        with RESULTS.open("a") as file:
            print(json.dumps(result), file=file)
        killers |= {*result["killer"].splitlines()}
        seconds += result["seconds"]
        if not result["killer"]:
            survivors += 1
            print(f"{result['row']} {result['line']} |", flush=True)
    drop_false(killers)
    print(f"{len(mutants)} mutants in {seconds / 60:.0f} minutes of a processor:")
    print(f"{survivors} survive that `{EXPLAINED.relative_to(ROOT)}` does not explain.")
    return int(survivors > 0)


HEAD = """\
# Mutants that no test can detect

`nox -s mutants` makes one small change to `src/` at a time, a *mutant*, and lists those
that no test detects. For each survivor, write the missing test, or add it to this page
with the reason why no test can detect it. `python tools/mutants.py table` writes this
page, and keeps the reasons.
"""


def table() -> None:
    """Write `tests/mutants.md`: the mutants of each module, and the survivors."""
    prepare()
    drop_false({name for x in all_results() for name in x["killer"].splitlines()})
    reasons, known = explained(), results()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    rows: dict[str, None] = {}
    for mutant in all_mutants():
        result, count = known.get(mutant.row), counts[mutant.module]
        count["all"] += 1
        if mutant.row in reasons or (result and not result["killer"]):
            count["survive"] += 1
            rows[mutant.row] = None
        elif result is not None:
            count["killed"] += 1
    lines = [HEAD, "| module | mutants | run | survive |", "|---|---|---|---|"]
    for name, n in counts.items():
        num = n["killed"] + n["survive"]
        lines.append(f"| `{name}` | {n['all']} | {num} | {n['survive']} |")
    lines += ["", "| module | code | mutant | why |", "|---|---|---|---|"]
    lines += [f"{row} {reasons.get(row, '')} |" for row in rows]
    EXPLAINED.write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cover")
    commands.add_parser("table")
    running = commands.add_parser("run")
    running.add_argument("which", nargs="*", help="a part, 1/8, or names of modules")
    running.add_argument("--tests", type=int, default=60, help="at most, for one")
    running.add_argument("--also", action="append", default=[], help="a test file")
    running.add_argument("--again", action="store_true", help="those that survived")
    running.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args, others = parser.parse_known_args()
    if args.command == "cover":
        cover(others)
    elif args.command == "table":
        table()
    else:
        return run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
