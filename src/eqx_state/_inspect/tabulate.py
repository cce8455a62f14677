"""`es.tabulate`: a model as a table with a row per module and a column per kind."""

import collections
import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._compat import boundary
from .._kinds.kinds import Kind, Parameter, State
from .._state.init import as_initialized, Initializer
from .._state.scope import Scope
from .._state.write import kind_at
from .._transforms.mutable import carried, target, thread
from .._tree.axis_names import dims_text, named_leaves, Names
from .._tree.base import has_inference, is_eqx_module, is_module
from .._tree.filters import bind, trainable
from .._tree.modes import eval
from .._tree.observe import Observer
from .._tree.parts import parts
from .._tree.walk import is_array, is_numpy, name_of, Visit, walk
from .._typing import KeyPath, PyTree


# --- What the modules of a model are called with, and what they return: only shapes.


@dataclasses.dataclass
class Call:
    """The first call of a module, and how many there were."""

    inputs: str
    outputs: str
    times: int = 1


class _Name:
    """The name of a module. Without `by_name` all are equal, as the modules are."""

    def __init__(self, name: str, by_name: bool):
        self.name, self.key = name, name if by_name else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Name) and self.key == other.key


class _Table(Observer):
    """Notes the calls by the name of the module."""

    def __init__(self, by_name: bool):
        # Its own, so that no function that JAX has traced before goes unseen.
        self.key = object()
        self.by_name = by_name
        self.calls: dict[str, Call] = {}

    def select(self, name: str, module: Any) -> _Name:
        return _Name(name, self.by_name)

    def called(self, scope: Any, mark: Any, call: Any, args: Any, kwargs: Any) -> Any:
        __tracebackhide__ = True
        if mark.name in self.calls:
            self.calls[mark.name].times += 1
            return call(*args, **kwargs)
        first = self.calls[mark.name] = Call(_show_arguments(args, kwargs), "")
        out = call(*args, **kwargs)
        first.outputs = summary(out)
        return out


def model_of(tree: PyTree, inputs: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """The model in a callable, and a function that puts another model in its place."""
    found = carried(tree)
    if found is None and not inputs:
        return tree, lambda model: model
    if found is None or (inputs and not callable(tree)):
        name = getattr(tree, "__name__", type(tree).__qualname__)
        raise TypeError(
            f"`es.tabulate` was given inputs, and `{name}` is not a model that can be"
            " called; a function is not looked into. Pass a module, a bound method"
            " `model.encode`, a transform of `es` such as `es.vmap(model)`, or"
            " `functools.partial(model, key=key)` for keyword arguments."
        )
    return found


def record(
    model: PyTree, put: Callable[[Any], Any], inputs: tuple[Any, ...]
) -> dict[str, Call]:
    """The calls that `put(model)(*inputs)` makes in eval mode, by module name."""
    # Modules that are told apart never reuse each other's traces, so every call is
    # seen. But a model that stacks its layers needs them equal. Then it is traced with
    # equal ones, and some calls may be missed.
    model = eval(model)
    with contextlib.suppress(Exception):
        return _calls(model, put, inputs, by_name=True)
    return _calls(model, put, inputs, by_name=False)


def _calls(
    model: PyTree, put: Any, inputs: tuple[Any, ...], by_name: bool
) -> dict[str, Call]:
    table = _Table(by_name)
    # NumPy arrays stay concrete: the model may use them as shapes.
    parts = eqx.partition(model, lambda x: is_array(x) and not is_numpy(x))
    args = eqx.partition(inputs, is_array)

    def call(arrays: tuple[Any, Any]) -> None:
        model, given = map(eqx.combine, arrays, (parts[1], args[1]))
        model, run = target(put(model), given, {}, None, "es.tabulate")
        out, _ = thread(model, Scope((State,), observer=table), run)
        if "" not in table.calls:  # another method than `__call__`
            table.calls[""] = Call(_show_arguments(given, {}), summary(out))

    jax.eval_shape(call, (parts[0], args[0]))
    return table.calls


# --- In words -------------------------------------------------------------------------


def summary(tree: PyTree) -> str:
    """A pytree with the shapes and dtypes of its arrays, `f32[4,32]`."""

    def struct(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x

    return eqx.tree_pformat(
        jtu.tree_map(struct, tree, is_leaf=_is_opaque),
        width=40,
        struct_as_array=True,
        truncate_leaf=_is_opaque,
    )


def _is_opaque(x: Any) -> bool:
    return is_eqx_module(x) or isinstance(x, eqx.nn.State)


def _show_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    # Equinox's layers pass `key=None` on to each other, which says nothing.
    named = [f"{name}={summary(x)}" for name, x in kwargs.items() if x is not None]
    return "\n".join([*map(summary, args), *named])


@dataclasses.dataclass
class _Cell:
    """The arrays of one kind that a module holds."""

    lines: list[str] = dataclasses.field(default_factory=list)
    arrays: list[Any] = dataclasses.field(default_factory=list)
    folded: int = 0  # how many of them are in modules without a row

    def __str__(self) -> str:
        folded = [f"+ {self.folded:,} below"] if self.folded else []
        size = [_size(self.arrays)] if self.arrays else []
        return "\n".join([*self.lines, *folded, *size])


@dataclasses.dataclass
class _Row:
    """A module, or the root of the tree."""

    path: KeyPath
    node: Any
    level: int
    is_frozen: bool = False  # by what is above, or by its path
    cells: dict[Kind | None, _Cell] = dataclasses.field(default_factory=dict)
    trivial: list[str] = dataclasses.field(default_factory=list)

    @property
    def module(self) -> str:
        """Its class, and those of trivial modules in it, which have no row."""
        counts = collections.Counter(self.trivial).items()
        names = [name if n == 1 else f"{n} {name}" for name, n in counts]
        trivial = [f"+ {', '.join(names)}"] if names else []
        return "\n".join([_class(self.node, self.is_frozen), *trivial])

    def add(
        self, visit: Visit, kind: Kind | None, axes: Names | None, is_folded: bool
    ) -> None:
        cell = self.cells.setdefault(kind, _Cell())
        is_initialized = is_array(visit.node)
        if is_initialized:
            cell.arrays.append(visit.node)
        if is_folded:
            cell.folded += 1
            return
        what = summary(visit.node) if is_initialized else "not initialized"
        name = name_of(visit.path[len(self.path) :])
        named = f" ({dims_text(axes)})" if axes and any(axes) else ""
        cell.lines.append((f"{name}: {what}" if name else what) + named)


@boundary
def tabulate(tree: PyTree, *inputs: Any, depth: int | None = None) -> str:
    """A table of the modules in a tree, with a row for each and a column for each kind.

    A cell lists the arrays that a module holds itself, not those of modules inside it:
    names, dtypes and shapes, and the names of axes, `(mlp embed)`, where annotations
    give them; then the numbers of elements and of bytes. A module that holds no arrays
    at all and whose output looks like its input, such as an activation or a dropout, is
    named in the row of the module around it. The last row has the totals of each kind;
    below it are those of all arrays and of what `es.trainable` selects. Arrays without
    a kind have their own column.

    **Arguments:**

    - `tree`: any pytree: a model (also before its `init`, or made of
        `jax.ShapeDtypeStruct`s), a list of models, an `es.Optimizer`.
    - `*inputs`: arrays or `jax.ShapeDtypeStruct`s. With inputs, `tree(*inputs)` is
        traced in eval mode, and nothing is computed. The table then shows what each
        module was called with and what it returned: in its first call, as the module
        saw it (one example, under `es.vmap`), and the number of calls if there were
        several. For a batch pass a transform, `es.tabulate(es.vmap(model), xs)`; for
        keyword arguments pass a partial, for another method `model.encode`. A model
        before its `init` is shown as it will be.
    - `depth`: modules further down than this have no row; their arrays are counted in
        the row of the module around them. The root is at depth 0. Default: no limit.

    **Returns:**

    Plain text, as wide as its content: `print` it.

    **Raises:**

    - `TypeError`: there are inputs, and the tree cannot be called.
    - `ValueError`: `depth` is negative.

    Errors of the model itself come out unchanged.

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
        ```
    """
    if depth is not None and depth < 0:
        raise ValueError(
            f"`es.tabulate(..., depth={depth})`: the root is at depth 0, its modules at"
            " depth 1. Pass `depth=None` for all of them."
        )
    tree, put = model_of(tree, inputs)
    calls: dict[str, Call] = {}
    if inputs:
        tree = as_initialized(tree)
        calls = record(tree, put, inputs)
    rows = _rows(tree, depth, calls)
    kinds = sorted(
        dict.fromkeys(kind for row in rows for kind in row.cells),
        # All other kinds in the order of the tree.
        key=lambda kind: (kind is None, kind is not Parameter),
    )
    arrays = parts(tree)
    columns = [("path", "Total"), ("module", "")]
    if inputs:
        columns += [("inputs", ""), ("outputs", "")]
    for kind in kinds:
        header = "no kind" if kind is None else kind.__name__
        columns.append((header, _size(p.value for p in arrays if p.kind is kind)))
    lines = []
    for row in rows:
        name = name_of(row.path)
        called = _called(calls.get(name)) if inputs else []
        cells = [str(row.cells.get(kind, "")) for kind in kinds]
        lines.append([name, row.module, *called, *cells])
    is_trainable = bind(trainable, tree)
    return (
        f"{_render(columns, lines)}"
        f"Total: {_size(p.value for p in arrays)}\n"
        f"Trainable: {_size(p.value for p in arrays if is_trainable(p))}\n"
    )


def _rows(tree: PyTree, depth: int | None, calls: dict[str, Call]) -> list[_Row]:
    root = _Row((), tree, 0)
    rows = [root]
    visits = walk(tree)
    names = {x.visit.path: x.names for x in named_leaves(tree, strict=False)}
    drawn = [v.path for v in visits if v.is_leaf and _has_cell(v.node)]
    holding = {path[:n] for path in drawn for n in range(len(path))}
    # By the path of a module: its row, or the row that it is folded into.
    row_at = {(): (root, False)}
    for visit in visits:
        around = (visit.path[:n] for n in range(len(visit.path), -1, -1))
        row, is_folded = next(row_at[path] for path in around if path in row_at)
        if visit.is_leaf:
            if _has_cell(visit.node):
                row.add(visit, kind_at(visit), names.get(visit.path), is_folded)
        elif visit.path and not _is_index(visit):
            is_trivial = visit.path not in holding and not _says_something(
                calls.get(visit.name)
            )
            if is_trivial and not is_folded:
                row.trivial.append(_class(visit.node))
            if is_trivial or is_folded or row.level == depth:
                row_at[visit.path] = row, True
            else:
                is_frozen = visit.context.frozen
                rows.append(_Row(visit.path, visit.node, row.level + 1, is_frozen))
                row_at[visit.path] = rows[-1], False
    return rows


def _says_something(call: Call | None) -> bool:
    """Whether a call shows more than that the output is like the input."""
    if call is None:
        return False
    given = call.inputs.partition("\nkey=")[0]
    return call.times > 1 or given != call.outputs


def _has_cell(x: Any) -> bool:
    return is_array(x) or isinstance(x, Initializer)


def _is_index(visit: Visit) -> bool:
    """A `StateIndex`, or a part of one: the row is that of the layer that holds it."""
    classes = (type(visit.node), visit.context.owner or object)
    return any(issubclass(cls, eqx.nn.StateIndex) for cls in classes)


# --- In words -------------------------------------------------------------------------


def _class(node: Any, is_frozen: bool = False) -> str:
    """The class of a module, and its modes where they are not the default."""
    if is_array(node):
        return "array"
    name = type(node).__name__.lstrip("_")
    if is_module(node):
        modes = {"eval": not node.training, "frozen": node.frozen or is_frozen}
    else:
        is_layer = is_eqx_module(node) and has_inference(node)
        is_eval = is_layer and node.__dict__["inference"]
        modes = {"eval": is_eval, "frozen": is_frozen}
    marks = [mark for mark, is_set in modes.items() if is_set]
    return f"{name} ({', '.join(marks)})" if marks else name


def _called(call: Call | None) -> list[str]:
    if call is None:
        return ["", ""]
    times = f"\n({call.times} calls)" if call.times > 1 else ""
    return [call.inputs + times, call.outputs]


def _size(arrays: Iterable[Any]) -> str:
    """The numbers of elements and of bytes; a typed key has the bytes of its data."""
    count = size = 0
    for x in arrays:
        count += math.prod(x.shape)
        size += math.prod(x.shape) * x.dtype.itemsize
    return f"{count:,} ({_bytes(size)})"


def _bytes(size: int) -> str:
    if size < 1000:
        return f"{size} B"
    power = min(int(math.log10(size)) // 3, 4)
    return f"{size / 1000**power:,.1f} {' KMGT'[power]}B"


def _render(columns: list[tuple[str, str]], lines: list[list[str]]) -> str:
    """Plain text, whatever the terminal, the notebook and the environment are."""
    # At the top of the file they would be a fifth of the import time of eqx_state.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True, show_footer=True)
    for header, footer in columns:
        table.add_column(header, footer=footer)
    for line in lines:
        table.add_row(*map(Text, line))
    out = io.StringIO()
    console = Console(
        file=out,
        width=10**6,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
    )
    console.print(table)
    return out.getvalue()
