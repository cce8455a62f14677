"""Mutants of the library: change one thing, and see whether a test notices.

    python tools/mutants.py cover                 # which tests run which line
    python tools/mutants.py run 1/4               # a quarter of all mutants
    python tools/mutants.py run _keys nn._dropout # those of some modules

A mutant runs in a fork of this process, which has imported everything but the library:
starting JAX takes longer than most tests. The mutated module is given to Python when it
is imported, so that no file is changed. `tests/mutants.md` says why the mutants in it
change nothing that a test could see; any other survivor is an error.
"""

import ast
import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest


ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "eqx_state"
DATA = ROOT / ".coverage.mutants"
EXPLAINED = ROOT / "tests" / "mutants.md"
# Imported once, for all mutants. Not what imports the library.
HEAVY = "jax jax.numpy equinox optax hypothesis pytest rich.table treescope beartype"
# First the tests that run the least else; more only for what survives them.
CHUNKS = (25, 75, 300)
OPTIONS = "-x -q -p no:cacheprovider -p no:cov -W".split()
OPTIONS += ["ignore::pytest.PytestAssertRewriteWarning"]  # it is imported already
SECONDS = 300  # a mutant that takes longer is noticed, as what loops for ever


# --- What is changed ------------------------------------------------------------------

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
    """One change: a span of the source, and what stands there instead."""

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
        """The change as a row of the table: no line numbers, which move."""
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
    """The nodes to be replaced, and the code for each."""
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
        if ast.unparse(node.value) != "None":
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
    if isinstance(node, (ast.Raise, ast.Delete, ast.AugAssign)):
        return True
    return isinstance(node, ast.Assign) and not any(
        isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets
    )


def code_in(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: not annotations, messages, or what type checkers see."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    decorators = getattr(node, "decorator_list", [])
    if any("overload" in ast.unparse(x) for x in decorators):
        return
    if isinstance(node, ast.Assign) and "__tracebackhide__" in ast.unparse(node):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # an assertion of ours
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
                yield from code_in(child)


def mutants_of(path: Path) -> list[Mutant]:
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in code_in(ast.parse(text)):
        for where, new in changes(node):
            start = starts[where.lineno - 1] + where.col_offset
            stop = starts[where.end_lineno - 1] + where.end_col_offset
            old = text[start:stop].decode()
            found.append(Mutant(path, where.lineno, start, stop, old, new))
    return found


# --- Which tests are to notice --------------------------------------------------------


class Tests:
    """The tests that run a line, those first that run the least else."""

    def __init__(self) -> None:
        data = coverage.CoverageData(str(DATA))
        data.read()
        self.by_line: dict[str, dict[int, set[str]]] = {}
        self.size: Counter[str] = Counter()
        for file in data.measured_files():
            lines = self.by_line.setdefault(_name(file), defaultdict(set))
            for line, contexts in data.contexts_by_lineno(file).items():
                names = {_node_id(c) for c in contexts if c.endswith("|run")}
                lines[line] |= names
                self.size.update(names)

    def of(self, mutant: Mutant) -> list[str]:
        lines = self.by_line.get(_name(str(mutant.path)), {})
        names = lines.get(mutant.line) or set().union(*lines.values())
        return sorted(names, key=lambda name: (self.size[name], name))


def _name(file: str) -> str:
    return file[file.rindex("eqx_state") :]


def _node_id(context: str) -> str:
    return context.rsplit("|", 1)[0]


def cover(args: list[str]) -> None:
    """One run of the tests, which notes the lines that each runs."""
    env = {**os.environ, "COVERAGE_FILE": str(DATA), "PYTHONPATH": str(ROOT / "src")}
    cov = ["--cov=eqx_state", "--cov-context=test", "--cov-report="]
    command = [sys.executable, "-m", "pytest", "-q", *cov, "--cov-fail-under=0"]
    args = args or ["-n", "auto", "tests"]
    subprocess.run([*command, *args], cwd=ROOT, env=env, check=True)


# --- Running --------------------------------------------------------------------------


class Mutated(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds one module of the library, and gives Python other code for it."""

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


def start(mutant: Mutant, tests: list[str]) -> int:
    """A fork in which the tests run, and which fails if one does."""
    if pid := os.fork():
        return pid
    status = 1
    with contextlib.suppress(BaseException), open(os.devnull, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        sys.meta_path.insert(0, Mutated(mutant))
        os.chdir(ROOT)
        status = tests_fail(tests)
    os._exit(status)


def tests_fail(tests: list[str]) -> int:
    first = 0
    for size in CHUNKS:
        chunk, first = tests[first : first + size], first + size
        if chunk and pytest.main([*OPTIONS, *chunk]) != 0:
            return 1
    return 0


def survivors_of(mutants: list[Mutant], tests: Tests) -> Iterator[Mutant]:
    """The mutants that no test notices; as many at once as there are processors."""
    todo, running = mutants[::-1], {}
    while todo or running:
        while todo and len(running) < (os.cpu_count() or 1):
            mutant = todo.pop()
            pid = start(mutant, tests.of(mutant))
            running[pid] = mutant, time.monotonic() + SECONDS
        for pid, (mutant, deadline) in list(running.items()):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
                if status == 0:
                    yield mutant
        time.sleep(0.01)


def chosen(args: list[str]) -> list[Mutant]:
    """All mutants, those of some modules, or each n-th."""
    found = [m for path in sorted(SOURCE.rglob("*.py")) for m in mutants_of(path)]
    if not args:
        return found
    if "/" in args[0]:
        k, n = map(int, args[0].split("/"))
        return found[k - 1 :: n]
    return [m for m in found if m.module in args]


def run(args: list[str]) -> int:
    sys.path.insert(0, str(ROOT / "src"))
    for name in HEAVY.split():
        importlib.import_module(name)
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    explained = EXPLAINED.read_text()
    mutants = [m for m in chosen(args) if m.row not in explained]
    tests, begin, survivors = Tests(), time.monotonic(), 0
    # Without a change, one for each module: it must survive, or the tests are broken.
    same = {m.module: dataclasses.replace(m, stop=m.start, new="") for m in mutants}
    if len(list(survivors_of(list(same.values()), tests))) < len(same):
        sys.exit("Tests fail without a mutant: cover them anew, or mend them.")
    for mutant in survivors_of(mutants, tests):
        survivors += 1
        print(f"{mutant.row} {mutant.path.name}:{mutant.line} |", flush=True)
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(mutants)} mutants in {minutes:.0f} minutes: {survivors} survive that")
    print(f"`{EXPLAINED.relative_to(ROOT)}` does not explain.")
    return int(survivors > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["cover"]:
        cover(sys.argv[2:])
    else:
        sys.exit(run(sys.argv[2:]))
