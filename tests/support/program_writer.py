"""Random programs as Python source: functions, closures, and transforms three deep.

A program is described by its text. Run with `eqx_state`, it is a program as users write
them; run with `program_reference`, it gives the expected result. Both agree because
programs keep to the rules of `eqx_state`: they write state only where the scope, the
trace and the lanes allow it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from program_models import (
    Both,
    Cell,
    COUNTERS,
    Net,
    Noise,
    NUMBERS,
    Phase,
    Plain,
    Spec,
    Tally,
    Wrap,
)


Path = tuple[str, ...]
ANY = 99  # the level of a number that may differ in every lane


@dataclasses.dataclass(frozen=True)
class Node:
    """A module or container that a program can reach, and what it may do with it.

    `level` is the number of `vmap`s in which each lane has its own; `grads` is the
    number of gradients that contain its scope; `loops` is the number of loops and
    branches.
    """

    text: str
    path: Path  # identifies the object, whatever expression reads it
    spec: Spec
    level: int = 0
    grads: int = 0
    loops: int = 0
    inside: int = 0  # in how many transforms it is
    is_shared: bool = False  # in each lane, but the lanes of an outer `vmap` share it
    is_owned: bool = False
    is_given: bool = False  # it is an argument, and the closure sees its old state
    assign: str = ""  # code that replaces it by `NEW`, or empty
    has_buffers: bool = False  # its scope may write buffers

    @property
    def is_module(self) -> bool:
        return self.spec.cls not in (list, tuple, dict) and not self.spec.is_stack

    @property
    def write_level(self) -> int:
        """The level of the values that may be written to it."""
        return 0 if self.is_shared else self.level


@dataclasses.dataclass(frozen=True)
class Helper:
    """A function that a program has defined, and where it may be called."""

    name: str
    grads: int
    paths: frozenset[Path]


@dataclasses.dataclass(frozen=True)
class Context:
    """The position of a statement."""

    depth: int
    nodes: tuple[Node, ...]
    helpers: tuple[Helper, ...] = ()
    hidden: tuple[Path, ...] = ()  # mapped, sliced or carried outside
    level: int = 0
    x_level: int = 0
    axes: frozenset[int] = frozenset()  # the levels over which `pmean` may reduce
    min_level: int = 0  # of state that may be written
    grads: int = 0
    loops: int = 0
    inside: int = 0
    steps: int = 0  # number of loops and branches in one lane
    is_main: bool = False
    is_run: bool = True  # false in a helper, which may never be called
    wholes: tuple[str, ...] = ()  # parameters of mapped stacks

    def into(self, **changes: Any) -> "Context":
        changes.setdefault("depth", self.depth - 1)
        changes.setdefault("inside", self.inside + 1)
        changes.setdefault("steps", self.steps + (changes.get("loops") is not None))
        return dataclasses.replace(self, is_main=False, **changes)

    def passing(self, node: Node) -> "Context":
        """The position inside of a function that gets `node` as an argument.

        The closure sees the old state of the module, and does not write it: two writes
        would be an error, and so would be one that is missing in a copy that comes out.
        """
        nodes = tuple(
            dataclasses.replace(n, is_given=True) if related(n.path, node.path) else n
            for n in self.nodes
        )
        return dataclasses.replace(self, nodes=nodes, helpers=())

    def readable(self) -> list[Node]:
        return [n for n in self.nodes if n.is_module and not self.hides(n.path)]

    def writable(self) -> list[Node]:
        return [n for n in self.readable() if self.may_write(n)]

    def may_write(self, node: Node) -> bool:
        return (
            node.is_owned
            and not node.is_given
            and node.grads <= self.grads  # a gradient is a lifted transform
            and node.write_level >= self.min_level
        )

    def trees(self) -> list[Node]:
        """Modules and containers."""
        return [n for n in self.nodes if not n.spec.is_stack and not self.hides(n.path)]

    def stacks(self) -> list[Node]:
        return [n for n in self.nodes if n.spec.is_stack and not self.hides(n.path)]

    def hides(self, path: Path) -> bool:
        return any(related(path, other) for other in self.hidden)

    def callable_helpers(self) -> list[Helper]:
        return [
            h
            for h in self.helpers
            if h.grads == self.grads
            and not self.min_level
            and not any(map(self.hides, h.paths))
        ]


def related(a: Path, b: Path) -> bool:
    """Whether one path contains the other."""
    return a[: len(b)] == b[: len(a)]


# --- Models ---------------------------------------------------------------------------


class Drawing:
    """Random choices: `below(n)` draws a number below n. The simplest is 0."""

    def __init__(self, below: Callable[[int], int]):
        self.below = below
        self.seeds = 0

    def pick(self, options: Any) -> Any:
        return options[self.below(len(options))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1

    def leaf(self) -> Spec:
        self.seeds += 7
        # Sometimes one array occurs twice.
        seed = 7 if self.chance(8) else self.seeds
        return Spec(self.pick([Cell, Noise, Tally, Noise, Phase, Plain]), (), seed)

    def tree(self, depth: int) -> Spec:
        if depth == 0 or self.chance(3):
            return self.leaf()
        cls = self.pick([Both, list, Wrap, dict, tuple])
        children = tuple(self.tree(depth - 1) for _ in range(1 if cls is Wrap else 2))
        self.seeds += 1
        return Spec(cls, children, self.seeds)

    def model(self) -> Spec:
        stack = dataclasses.replace(self.leaf(), is_stack=True)
        return Spec(Net, (self.tree(2), stack), 3)


def has_key(spec: Spec) -> bool:
    return spec.cls is Noise or any(map(has_key, spec.children))


def has_phase(spec: Spec) -> bool:
    return spec.cls is Phase or any(map(has_phase, spec.children))


def has_bare(spec: Spec) -> bool:
    """Whether it contains an Equinox module that is not part of an `es.Module`."""
    is_open = spec.cls in (Wrap, list, tuple, dict)
    return spec.cls is Plain or (is_open and any(map(has_bare, spec.children)))


def nodes_of(node: Node) -> list[Node]:
    """A node and everything below it."""
    spec, text = node.spec, node.text
    if spec.is_stack:
        return [node]
    places: list[tuple[str, str]] = []
    if spec.cls in (Both, Net):
        names = ("a", "b") if spec.cls is Both else ("body", "stack")
        places = [(f".{name}", f"{text}.{name} = NEW") for name in names]
    elif spec.cls is Wrap:
        places = [(".inner", "")]  # a program does not write to an Equinox module
    elif spec.cls is dict:
        for name in "ba"[: len(spec.children)]:
            new = f"{{**{text}, '{name}': NEW}}"
            places.append((f"['{name}']", node.assign.replace("NEW", new)))
    elif spec.cls in (list, tuple):
        for i in range(len(spec.children)):
            new = f"*{text}[:{i}], NEW, *{text}[{i + 1}:]"
            new = f"[{new}]" if spec.cls is list else f"({new})"
            places.append((f"[{i}]", node.assign.replace("NEW", new)))
    found = [node]
    for child, (key, assign) in zip(spec.children, places, strict=True):
        found += nodes_of(
            dataclasses.replace(
                node,
                text=f"{text}{key}",
                path=(*node.path, key),
                spec=child,
                assign=assign,
            )
        )
    return found


# --- Programs -------------------------------------------------------------------------


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


class Writer(Drawing):
    """Writes a program, statement by statement."""

    def __init__(
        self, below: Callable[[int], int], statements: Any, scopes: Any, fault: Any
    ):
        super().__init__(below)
        self.names = 0
        self.aliased: set[Path] = set()
        self.statements, self.scopes = statements, scopes
        # The fault that the program must contain, until a statement with it is written.
        self.fault = fault
        self.expected: Expected | None = None

    def name(self, letter: str) -> str:
        self.names += 1
        return f"{letter}{self.names}"

    def program(self) -> "tuple[Spec, str, Expected | None]":
        spec = self.model()
        return spec, "\n".join(self.main(spec)), self.expected

    def main(self, spec: Spec) -> list[str]:
        model = Node("model", ("model",), spec)
        ctx = Context(3, tuple(nodes_of(model)), is_main=True)
        return [
            "def main(model, x):",
            *indented([*self.block(ctx, 3), "return x, model"]),
        ]

    def block(self, ctx: Context, most: int = 2) -> list[str]:
        lines: list[str] = []
        for _ in range(1 + self.below(most)):
            if self.expected is not None:
                # A statement after the error could hide it, or raise a different one.
                break
            new, ctx = self.statement(ctx)
            lines += new
        return lines

    def statement(self, ctx: Context) -> "Statement":
        if self.fault and ctx.is_run and not ctx.is_main and self.chance(2):
            lines, expected = self.fault(self, ctx)
            if expected is not None:
                self.fault, self.expected = None, expected
                return lines, ctx
        if ctx.depth == 0 or (not ctx.is_main and self.chance(4)):
            return self.simple(ctx), ctx
        is_scope = ctx.is_main and not self.chance(4)
        options = self.scopes if is_scope else self.statements
        if ctx.grads:  # JAX has no reverse mode for it
            options = [f for f in options if f.__name__ != "while_loop"]
        return self.pick(options)(self, ctx)

    # --- Without a transform

    def simple(self, ctx: Context) -> list[str]:
        writable, readable = ctx.writable(), ctx.readable()
        helpers = ctx.callable_helpers()
        if ctx.wholes and self.chance(2):
            return [f"x = mix(x, total({self.pick(ctx.wholes)}))"]
        if writable and not self.chance(3):
            return self.write(ctx, self.pick(writable))
        if helpers and self.chance(2):
            return [f"x = {self.pick(helpers).name}(x)"]
        if readable and self.chance(6):
            node = self.pick(readable)
            if node.spec.cls is not Wrap and node.spec.cls is not Plain:
                return [f"x = es.eval({node.text})(x)"]
        if readable and not self.chance(4):
            return [f"x = {self.pick(readable).text}.peek(x)"]
        return ["x = mix(x, 0.5)"]

    def write(self, ctx: Context, node: Node) -> list[str]:
        """Write state, or call a module that writes its own."""
        text, cls = node.text, node.spec.cls
        what = self.below(5)
        if node.has_buffers and cls is Tally and self.chance(2):
            return [f"{text}.k = mix({text}.k, {self.value(ctx, node)})"]
        if what == 1 and cls in COUNTERS:
            return [f"{text}.n = {text}.n + {1 + self.below(3)}"]
        if what == 2 and cls in NUMBERS:
            return [f"{text}.s = mix({text}.s, {self.value(ctx, node)})"]
        if what == 3 and cls in (Cell, Noise, Tally):
            return [f"{text}.push({self.value(ctx, node)})"]
        # In a step of a lane, it is not known that all lanes assign the same key.
        if what == 1 and cls is Noise and (ctx.steps == 0 or ctx.level == 0):
            return [f"{text}.rng = KEY"]
        if what == 3 and cls is Phase and node.inside == ctx.inside:
            return [f"{text}.phase = 'warm'"]
        if what == 4 and cls is Noise and self.chance(2):
            return [f"x = {text}.draw(x)"]
        if what == 4 and cls in (Cell, Noise) and node.loops == ctx.loops:
            return [f'{text}.sow("v", x)']
        return [f"x = {text}(x)"]

    def value(self, ctx: Context, node: Node) -> str:
        """A number that is the same for all lanes that share the module."""
        if ctx.x_level <= (level := node.write_level):
            return "x"
        if ctx.x_level == ctx.level <= level + 1 and ctx.level in ctx.axes:
            return f'pmean(x, "l{ctx.level}")'
        return "0.75"

    def predicate(self, ctx: Context) -> tuple[str, int]:
        """A condition, and its level."""
        nodes = [n for n in ctx.readable() if n.spec.cls in COUNTERS]
        if nodes and not self.chance(3):
            node = self.pick(nodes)
            return f"{node.text}.n % 2 == 0", node.level
        return self.pick(["True", "False"]), 0

    # --- Functions

    def function(
        self,
        inner: Context,
        params: str = "x",
        head: tuple[str, ...] = (),
        tail: str = "x",
        axis: str = "",
    ) -> tuple[list[str], str, list[str]]:
        """A function that reaches a module in some way.

        Returns its lines, the expression to call, and its leading arguments. If the
        function is mapped, `axis` is the entry for these arguments in `in_axes`.
        """
        # A mapped function gets more arguments, because there are rules for them.
        how = self.pick((*WAYS, *["argument"] * 8) if axis else WAYS)
        nodes = inner.trees() if how == "argument" else inner.readable()
        if axis and how in ("partial", "keywords"):
            # A partial may be a pytree, whose keys are split although nobody owns them.
            nodes = [n for n in nodes if n.is_owned or not has_key(n.spec)]
        if axis and how == "argument" and not self.chance(3):
            owned = [n for n in nodes if n.is_owned] or nodes
            nodes = [n for n in owned if has_key(n.spec)] or owned
        if how == "method":
            return *self.method(inner, params, head, tail), []
        if how == "closure" or not nodes:
            return *self.define(inner, params, head, tail), []
        node, name = self.pick(nodes), self.name("m")
        self.aliased.add(node.path)

        def reach(text: str) -> Context:
            alias = dataclasses.replace(node, text=text, assign="")
            outside = inner.passing(node) if how == "argument" else inner
            hidden = outside.hidden
            if how == "argument" and has_key(node.spec) and axis not in ("", "None"):
                # The lanes have the keys that the rules say, but those of the defaults
                # in the closure.
                alias = dataclasses.replace(alias, path=("argument", *node.path))
                hidden = (*hidden, node.path)
            nodes = (*outside.nodes, *nodes_of(alias))
            return dataclasses.replace(outside, nodes=nodes, hidden=hidden)

        before: list[str] = []
        text, args = name, []
        if how == "cell":
            before = [f"{name} = {node.text}"]
        elif how == "list":
            before, text = [f"{name} = [{node.text}]"], f"{name}[0]"
        elif how == "dict":
            before, text = [f"{name} = {{'k': [{node.text}]}}"], f"{name}['k'][0]"
        elif how == "default":
            params = f"{params}, {name}={node.text}"
        elif how == "keyword":
            params = f"{params}, *, {name}={node.text}"
        elif how == "keywords":
            params = f"{params}, *, {name}"
        else:
            params = f"{name}, {params}"
            args = [node.text]
        inside = reach(text)
        if axis and how == "argument" and node.is_module and inside.may_write(node):
            head = (*head, f"x = {name}(x)")
        lines, f = self.define(inside, params, head, tail)
        if how == "partial":
            f, args = f"{self.pick(PARTIALS)}({f}, {node.text})", []
        elif how == "keywords":
            f = f"{self.pick(PARTIALS)}({f}, {name}={node.text})"
        return [*before, *lines], f, args

    def define(
        self, inner: Context, params: str, head: tuple[str, ...] = (), tail: str = "x"
    ) -> tuple[list[str], str]:
        name = self.name("f")
        body = [*head, *self.block(inner), f"return {tail}"]
        return [f"def {name}({params}):", *indented(body)], name

    def method(
        self,
        inner: Context,
        params: str,
        head: tuple[str, ...] = (),
        tail: str = "x",
        teacher: Node | None = None,
    ) -> tuple[list[str], str]:
        """A method of a plain object, which stores a number and perhaps a module.

        A transform does not look into the object, so only a method that no transform
        traces calls the `teacher`.
        """
        cls, name, after = self.name("T"), self.name("t"), []
        head = (*head, "x = mix(x, self.k)")
        if teacher is not None:
            call = "" if inner.may_write(teacher) else ".peek"
            head = (*head, f"x = self.teacher{call}(x)")
            after = [f"{name}.teacher = {teacher.text}"]
        lines, f = self.define(inner, f"self, {params}", head, tail)
        lines = [f"class {cls}:", *indented(["k = 0.75", *lines])]
        return [*lines, f"{name} = {cls}()", *after], f"{name}.{f}"

    def whole(
        self, inner: Context, params: str = "x", head: Any = (), tail: str = "x"
    ) -> tuple[list[str], str]:
        """A function that needs no leading arguments."""
        lines, f, args = self.function(inner, params, head, tail)
        return lines, f"ft.partial({', '.join([f, *args])})" if args else f

    def is_assignable(self, ctx: Context, node: Node) -> bool:
        """Whether a new module may replace it, and no alias refers to it."""
        return (
            node.assign != ""
            and ctx.may_write(node)
            and node.write_level == ctx.level
            and (node.inside == ctx.inside or not has_phase(node.spec))
            and not any(related(node.path, path) for path in self.aliased)
        )


WAYS = (
    "closure",
    "cell",
    "default",
    "keyword",
    "list",
    "dict",
    "argument",
    "partial",
    "keywords",
    "method",
)
PARTIALS = ("ft.partial", "eqx.Partial", "jtu.Partial")
Statement = tuple[list[str], Context]
# The types of an error, and a regex for its message.
Expected = tuple[tuple[type, ...], str]
