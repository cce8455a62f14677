"""`es.tabulate`: a model as a table: a row for each module, a column for each kind."""

import dataclasses
import io
import math
import re
import shutil
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._compat import boundary
from .._kinds.kinds import Kind, Parameter, State
from .._state.init import as_initialized
from .._state.lazy import check_not_a_class, Initializer
from .._state.observe import Observer, ProgramKey
from .._state.scope import Scope
from .._state.write import kind_at
from .._transforms.mutable import run_on_copy
from .._transforms.target import target
from .._transforms.transform import method_as_pytree, receiver
from .._tree.base import has_inference, is_eqx_module, is_module
from .._tree.combinators import trainable
from .._tree.filters import bind
from .._tree.modes import eval
from .._tree.parts import parts
from .._tree.walk import abstract, is_array, name_of, Visit, walk
from .._typing import KeyPath, PyTree


@boundary
def tabulate(
    tree: PyTree, *inputs: Any, depth: int | None = None, cost: bool = False
) -> str:
    """A table of the modules in a tree, and of their arrays with kinds and sizes.

    There is a row for each module and a column for each kind. A cell lists the arrays
    of the module itself, without those of inner modules: names, dtypes and shapes, then
    the numbers of elements and bytes. Arrays without a kind have their own column.

    The last row has the totals of each kind. Below the table are the totals of
    all arrays, and of those that `es.trainable` selects.

    **Arguments:**

    - `tree`: any pytree: a model (also before its `init`, or with
        `jax.ShapeDtypeStruct`s), a list of models, an `es.Optimizer`.
    - `*inputs`: arrays or `jax.ShapeDtypeStruct`s. With inputs, `tree(*inputs)` is
        traced in eval mode, without computing anything. The table then shows the inputs
        and outputs of the first call of each module, as the module sees them (one
        example, under `es.vmap`). For a batch, pass a transform:
        `es.tabulate(es.vmap(model), xs)`. For keyword arguments, pass a partial; for a
        method other than `__call__`, pass `model.encode`. A model before its `init` is
        shown as if initialized. As in `es.capture`, the model cannot stack two layers
        with `jax.tree.map` in the call.
    - `depth`: the largest depth of a module with its own row; the root has depth 0. The
        row of an outer module counts the arrays of deeper modules, without names.
        Default: no limit.
    - `cost`: whether to compile each call, for two more columns: its floating point
        operations, and the bytes that it reads and writes, as estimated by XLA. Both
        include inner modules. A row is about the one call that it shows; the last row
        is about all of `tree(*inputs)`. Parameters are also shown as a share of all
        parameters. XLA counts one step of a loop such as `es.scan`. For a call that
        cannot be compiled alone, for example because it uses the axis name of an outer
        `es.vmap`, both columns show `-`.

    **Returns:**

    Plain text. Use `print`. If the table does not fit the terminal, or 80 columns
    without one, the lines of its cells are broken. The environment variable `COLUMNS`
    overrides the width of the terminal.

    **Raises:**

    - `TypeError`: `tree` is a class; there are inputs, but the tree cannot be called;
        or `cost=True` without inputs.

    Errors of the model itself are raised unchanged.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax
        import jax.numpy as jnp
        import jax.random as jr

        linear = eqx.nn.Linear(2, 3, key=jr.key(0))
        model = eqx.nn.Sequential([linear, es.nn.BatchNorm(3, axis_name="batch")])
        print(es.tabulate(model))
        assert "weight: f32[3,2]" in es.tabulate(model)

        xs = jax.ShapeDtypeStruct((8, 2), jnp.float32)
        table = es.tabulate(es.vmap(model, axis_name="batch"), xs)
        assert "f32[2]" in table and "f32[3]" in table  # what the layers see

        print(es.tabulate(linear, jnp.ones(2), cost=True))  # 15 FLOPs
        ```
    """
    if cost and not inputs:
        raise TypeError("`cost=True` needs a call: `es.tabulate(model, x, cost=True)`.")
    check_not_a_class(tree)
    found = receiver(tree)
    if found is None and inputs:
        name = getattr(tree, "__name__", type(tree).__qualname__)
        raise TypeError(_NO_MODEL.format(name))
    tree, put = found or (tree, lambda model: model)
    calls: _Calls = {}
    if inputs:
        tree = as_initialized(tree)
        calls = _calls(tree, put, inputs, cost)
    arrays = parts(tree)
    rows = _rows(tree, depth)
    kinds = dict.fromkeys(entry.kind for row in rows for entry in row.entries)
    # `Parameter` first, arrays without a kind last, others in the order of the tree.
    kinds = sorted(kinds, key=lambda kind: (kind is None, kind is not Parameter))
    totals = {kind: [p.value for p in arrays if p.kind is kind] for kind in kinds}
    whole = sum(x.size for x in totals.get(Parameter, ())) if cost else 0
    is_trainable = bind(trainable, tree)
    return (
        f"{_table(rows, totals, calls, whole)}"
        f"Total: {_size([p.value for p in arrays])}\n"
        f"Trainable: {_size([p.value for p in arrays if is_trainable(p)])}\n"
    )


_NO_MODEL: Final = """`es.tabulate` was given inputs, but `{}` is not a model that can \
be called. It cannot look into a function, so pass the model, or a transform of the \
model: `es.tabulate(es.vmap(model), xs)`."""


# --- The inputs and outputs of modules ------------------------------------------------


# The first call of each module, by name, and of the whole call, by `None`: the inputs,
# the outputs and, if requested, the cost.
_Calls = dict[str | None, tuple[str, ...]]


class _Table(Observer):
    """Records the first call of each module."""

    def __init__(self, cost: bool):
        # A new key, so that JAX traces every function again and no call is missed.
        self.key = ProgramKey((object(),))
        self.calls: _Calls = {}
        # Costs by the text of the program, so that equal layers are compiled once.
        self.costs: dict[str, Any] | None = {} if cost else None

    def select(self, name: str, module: Any) -> str:
        return name

    def called(self, scope: Any, tag: Any, call: Any, /, *args: Any, **kw: Any) -> Any:
        out = call(*args, **kw)
        self.note(tag, args[0], args[1:], kw, out)
        return out

    def note(self, name: Any, call: Any, args: Any, kwargs: Any, out: Any) -> None:
        if name in self.calls:
            return
        # Leave out `key=None`, which Equinox's layers pass to each other.
        named = [f"{name}={_show(x)}" for name, x in kwargs.items() if x is not None]
        inputs = "\n".join([*map(_show, args), *named])
        self.calls[name] = (inputs, _show(out), *self.cost(call, args, kwargs))

    def cost(self, f: Any, *given: Any) -> tuple[str, ...]:
        """XLA's estimate for a call of `f`; `given` are the arguments and keywords."""
        if self.costs is None:
            return ()
        arrays, rest = eqx.partition((method_as_pytree(f), *given), eqx.is_array)

        def run(arrays: PyTree) -> PyTree:
            model, run = target(*eqx.combine(arrays, rest), None, "es.tabulate")
            return eqx.filter(run_on_copy(model, Scope((State,)), run)[0], is_array)

        try:
            lowered = jax.jit(run).lower(jtu.tree_map(abstract, arrays))
            if (text := lowered.as_text()) not in self.costs:
                self.costs[text] = lowered.compile().cost_analysis()
            found = self.costs[text]
            return f"{found.get('flops', 0):,.0f}", _bytes(int(found["bytes accessed"]))
        except Exception:  # `f` needs an outer axis name, or XLA has no estimate
            return "-", "-"


def _calls(model: PyTree, put: Any, inputs: Any, cost: bool) -> _Calls:
    """The calls that `put(model)(*inputs)` makes in eval mode."""
    arrays, rest = eqx.partition(eval(model), is_array)
    table = _Table(cost)

    def call(arrays: PyTree, inputs: tuple[Any, ...]) -> None:
        f = put(eqx.combine(arrays, rest))
        model, run = target(f, inputs, {}, None, "es.tabulate")
        out, _ = run_on_copy(model, Scope((State,), observer=table), run)
        table.note(None, f, inputs, {}, out)
        # If `put(model)` is a method other than `__call__`, the root was not called.
        # Record the whole call for its row.
        table.calls.setdefault("", table.calls[None])

    # Tags contain the module's name, so two layers never share a trace. Otherwise a
    # block with `@eqx.filter_jit` would only be recorded for the first layer.
    eqx.filter_eval_shape(call, arrays, inputs)
    return table.calls


def _show(tree: PyTree) -> str:
    """A pytree with the shapes and dtypes of its arrays, `f32[4,32]`."""

    return eqx.tree_pformat(
        jtu.tree_map(abstract, tree, is_leaf=_is_opaque),
        width=40,
        struct_as_array=True,
        truncate_leaf=_is_opaque,
    )


def _is_opaque(x: Any) -> bool:
    return is_eqx_module(x) or isinstance(x, eqx.nn.State)


# --- Rows -----------------------------------------------------------------------------


class _Entry(NamedTuple):
    """An array or an Initializer. If `line` is empty, the row only counts it."""

    kind: Kind | None
    line: str
    node: Any


@dataclasses.dataclass
class _Row:
    """A module, or the root of the tree."""

    path: KeyPath
    module: str
    level: int
    entries: list[_Entry] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return name_of(self.path)


def _rows(tree: PyTree, depth: int | None) -> list[_Row]:
    """The rows of all modules."""
    # By the path of a module: its row, or below `depth`, that of the nearest outer one.
    rows = {(): _Row((), _class(tree, is_frozen=False), 0)}
    for visit in walk(tree):
        above = (visit.path[:n] for n in range(len(visit.path), -1, -1))
        nearest = next(path for path in above if path in rows)
        row = rows[nearest]
        if is_array(visit.node) or isinstance(visit.node, Initializer):
            line = _line(visit, row.path) if nearest == row.path else ""
            row.entries.append(_Entry(kind_at(visit), line, visit.node))
        elif visit.path and not visit.is_leaf and not _is_index(visit):
            if row.level != depth:
                module = _class(visit.node, visit.context.frozen)
                row = _Row(visit.path, module, row.level + 1)
            rows[visit.path] = row
    return [row for path, row in rows.items() if row.path == path]


def _line(visit: Visit, above: KeyPath) -> str:
    name = name_of(visit.path[len(above) :])
    what = _show(visit.node) if is_array(visit.node) else "not initialized"
    return f"{name}: {what}" if name else what


def _is_index(visit: Visit) -> bool:
    """Whether this is a `StateIndex` or a part of one, which has no row of its own."""
    classes = (type(visit.node), visit.context.owner or object)
    return any(issubclass(cls, eqx.nn.StateIndex) for cls in classes)


def _class(node: Any, is_frozen: bool) -> str:
    """The class of a module, and its modes that are not the default."""
    modes = {"eval": False, "frozen": is_frozen}
    if is_module(node):
        modes = {"eval": not node.training, "frozen": is_frozen or node.frozen}
    elif is_eqx_module(node) and has_inference(node):
        modes["eval"] = node.__dict__["inference"]
    name = "array" if is_array(node) else type(node).__name__.lstrip("_")
    marks = ", ".join(mode for mode, is_set in modes.items() if is_set)
    return f"{name} ({marks})" if marks else name


# --- Tables ---------------------------------------------------------------------------

# The arrays of each kind.
_Totals = dict[Kind | None, list[Any]]


def _table(rows: list[_Row], totals: _Totals, calls: _Calls, whole: int) -> str:
    call = calls.get(None, ())
    named = ["inputs", "outputs", "FLOPs", "bytes accessed"][: len(call)]
    lines = [["path", "module", *named, *map(_kind, totals)]]
    for row in rows:
        cells = [_cell(row, kind, whole * (kind is Parameter)) for kind in totals]
        shapes = calls.get(row.name, [""] * len(call))
        lines.append([row.name, row.module, *shapes, *cells])
    sums = map(_size, totals.values())
    lines.append(["Total", "", *["", ""][: len(call)], *call[2:], *sums])
    return _render(*lines)


def _cell(row: _Row, kind: Kind | None, whole: int) -> str:
    entries = [entry for entry in row.entries if entry.kind is kind]
    lines = [entry.line for entry in entries if entry.line]
    arrays = [entry.node for entry in entries if is_array(entry.node)]
    return "\n".join(lines + ([_size(arrays, whole)] if arrays else []))


def _kind(kind: Kind | None) -> str:
    return "no kind" if kind is None else kind.__name__


def _size(arrays: list[Any], whole: int = 0) -> str:
    """The numbers of elements and bytes; for a typed key, the bytes of its data.

    If `whole` is not 0, also their share of this number of elements.
    """
    count = sum(x.size for x in arrays)
    size = sum(x.size * x.dtype.itemsize for x in arrays)
    share = f", {count / whole:.1%}" if whole else ""
    return f"{count:,} ({_bytes(size)}){share}"


def _bytes(size: int) -> str:
    if size < 1000:
        return f"{size} B"
    power = min(int(math.log10(size)) // 3, 4)
    return f"{size / 1000**power:,.1f} {' KMGT'[power]}B"


def _render(headers: list[str], *rows: list[str]) -> str:
    """Plain text that fits the terminal, with a line between any two rows."""
    # Import rich only when needed: it would be a fifth of the import time of eqx_state.
    from rich.box import HORIZONTALS
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=HORIZONTALS, show_edge=False, show_lines=True, padding=(0, 1, 0, 0)
    )
    for header in headers:
        table.add_column(header, overflow="fold")  # nothing is cut
    for row in rows:
        table.add_row(*map(Text, row))  # not `str`: `[0]` would be markup
    plain = dict.fromkeys(("force_terminal", "force_jupyter", "legacy_windows"), False)
    width = shutil.get_terminal_size().columns
    # A file of its own, or the encoding of `sys.stdout` would decide on the lines.
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, **plain).print(table)
    return re.sub(" +$", "", text.getvalue(), flags=re.MULTILINE)
