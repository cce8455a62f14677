"""One traced call of a training step: its arguments, and what it returns of them."""

import functools as ft
import inspect
import itertools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._kinds.kinds import OptState, Parameter, Rng
from .._state.marks import MARKS, Marks
from .._transforms.transform import receiver
from .._tree.base import is_eqx_module, keystr
from .._tree.compare import same_modes
from .._tree.context import children
from .._tree.dtypes import is_traceable
from .._tree.keys import is_typed
from .._tree.walk import Visit, walk
from .closure import arrays_in, is_constant
from .dataflow import Dataflow, NEW, Value, ZERO


# A part of JAX's cache keys: with a new value JAX traces each function again, and does
# not use that trace, which has marks, for the real calls.
_CONTEXT: Final = jax.make_user_context()
_NUMBERS: Final = itertools.count(1)


class Leaf(NamedTuple):
    """A leaf of an argument.

    - `name`: the argument and the path, `model.norm.mean`.
    - `is_moment`: whether it is a part of the state of an optimizer.
    """

    name: str
    visit: Visit
    is_moment: bool

    @property
    def value(self) -> Any:
        return self.visit.node

    @property
    def is_of_optimizer(self) -> bool:
        """Whether it is in the field `opt_state` of an `es.Optimizer`."""
        return self.visit.is_a(OptState) and ".opt_state" in self.name

    @property
    def is_trainable(self) -> bool:
        """Whether an optimizer may train it: `es.trainable`, but no optimizer's own."""
        visit = self.visit
        if self.is_moment or visit.context.frozen or not visit.is_a(Parameter):
            return False
        return jnp.issubdtype(self.value.dtype, jnp.inexact)

    @property
    def is_key(self) -> bool:
        return self.visit.is_a(Rng) or is_typed(self.value)

    @property
    def is_number(self) -> bool:
        """Whether it is like a literal to the model: a learning rate, a count."""
        is_scalar = self.visit.context.owner is None and np.ndim(self.value) == 0
        return self.is_moment or is_scalar

    @property
    def is_zero_moment(self) -> bool:
        """Whether it is a moment of a new optimizer; counts are not moments."""
        if not self.is_moment or not is_concrete(self.value):
            return False
        return jnp.issubdtype(self.value.dtype, jnp.inexact) and not np.any(self.value)


class Unit(NamedTuple):
    """A module, or a container without modules, and the positions of its leaves."""

    node: Any
    inside: range
    name: str = ""


class TracedStep:
    """One call, traced.

    - `f`: the step.
    - `trees`: the arguments and their names, and the object to which `f` is bound.
    - `leaves`: the leaves of all of them; `inputs`: the positions of the arrays.
    - `units`: the models among them; `modules`: every module in them, parents first.
    - `flow`: what is known about the outputs; `marks`: the writes.
    """

    def __init__(self, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.f = f
        names = argument_names(f, args, kwargs)
        given = [*args, *kwargs.values()]
        if (bound := receiver(f)) is not None:
            given, names = [bound.model, *given], ["self", *names]

        self.trees = [*zip(names, given, strict=True)]
        self.leaves: list[Leaf] = []
        self.units: list[Unit] = []
        self.modules: list[Unit] = []
        for name, tree in self.trees:
            self._add(name, tree)
        self.inputs = [i for i, x in enumerate(self.leaves) if is_traceable(x.value)]

        arrays, rest = eqx.partition(given, is_traceable)
        flat, structure = jtu.tree_flatten(arrays)
        static: Any = None

        def run(*flat: Any) -> Any:
            nonlocal static
            given = eqx.combine(jtu.tree_unflatten(structure, flat), rest)
            call = f if bound is None else bound.bind(given.pop(0))
            named = dict(zip(kwargs, given[len(args) :], strict=True))
            out = call(*given[: len(args)], **named)
            arrays, static = eqx.partition(out, is_traceable)
            return arrays

        self.marks = Marks()
        token = MARKS.set(self.marks)
        try:
            # `Marks` keeps tracers while JAX traces, and a mark uses a key once more,
            # which JAX's checks would report.
            with (
                _CONTEXT(next(_NUMBERS)),
                jax.check_tracer_leaks(False),
                jax.debug_key_reuse(False),
            ):
                trace = jax.make_jaxpr(run, return_shape=True)
                self._closed, out = trace(*flat)
        finally:
            MARKS.reset(token)
            self.marks.kept.clear()
        self._output = eqx.combine(out, static)
        self._follow(set())
        self._pair()
        self._assume_zero()

    def _add(self, name: str, tree: Any) -> None:
        """Record the leaves and the modules of an argument."""
        # Outside of an `es.Optimizer`, the states of optax declare no kind.
        nodes = jtu.tree_leaves(tree, is_leaf=_is_of_optax)
        is_moment = [_is_of_optax(x) for x in nodes for _ in jtu.tree_leaves(x)]
        first = len(self.leaves)
        self.units += units(tree, first)
        for visit in walk(tree):
            path, start = f"{name}{keystr(visit.path)}", len(self.leaves)
            if visit.is_leaf:
                known = visit.is_a(OptState) or is_moment[start - first]
                self.leaves.append(Leaf(path, visit, known))
            else:
                inside = range(start, start + jtu.tree_structure(visit.node).num_leaves)
                self.modules.append(Unit(visit.node, inside, path))

    def name_of_constant(self, constant: Any) -> str | None:
        """The name of a constant of the jaxpr, `None` if the step made it."""
        pairs = self._closed_over
        return next((name for name, x in pairs if is_constant(x, constant)), None)

    @ft.cached_property
    def _closed_over(self) -> list[tuple[str, Any]]:
        return arrays_in(self.f, (type(unit.node) for unit in self.modules))

    # --- What comes back --------------------------------------------------------------

    def comes_back(self, i: int) -> bool:
        """Whether a leaf of an argument comes back unchanged, and only so."""
        if i not in self._partners:
            return not self._same(i).isdisjoint(self._outputs)
        return self._returned(i) <= self._same(i)

    def _returned(self, i: int) -> set[Value]:
        """The values of the leaves that replace a leaf of an argument."""
        return {self._outputs[j] for j in self._partners[i]}

    def _same(self, i: int) -> set[Value]:
        """The values of a leaf that is unchanged, but for weight decay."""
        is_trainable = self.leaves[i].is_trainable
        return {self.value(i), *([Value("decayed", i)] if is_trainable else [])}

    def value(self, i: int) -> Value:
        """That of a leaf of an argument."""
        leaf = self.leaves[i]
        what = "key" if leaf.is_key else "number" if leaf.is_number else "input"
        return Value(what, i)

    @property
    def trained(self) -> Iterator[range]:
        """The leaves of each argument of which the step changes a parameter."""
        for inside in self._replaced:
            parameters = [i for i in inside if self.leaves[i].is_trainable]
            if not all(self.comes_back(i) for i in parameters):
                yield inside

    def _follow(self, zero: set[int]) -> None:
        """Follow the values from the arguments to the outputs.

        `zero`: the arguments that are zero.
        """
        given = [ZERO if i in zero else self.value(i) for i in self.inputs]
        self.flow = Dataflow(self._closed, given)
        values = iter(self.flow.outputs)
        found = jtu.tree_leaves(self._output)
        self._outputs = [next(values) if is_traceable(x) else NEW for x in found]

    def _pair(self) -> None:
        """Find the argument that each module of the output replaces.

        It has the same class and structure. If there are several, it is one that
        replaces no other argument yet, and of which most leaves come back.
        """
        self._partners: dict[int, list[int]] = {}
        self._replaced: dict[range, None] = {}
        found: list[tuple[Unit, list[Unit]]] = []
        for new in units(self._output):
            if not found or new.inside.start >= found[-1][0].inside.stop:
                alike = [x for x in self.units if _is_alike(x, new)]
                alike = alike or [x for x in self.modules if _is_alike(x, new)]
                found += [(new, alike)] if alike else []
        # First those of which most comes back.
        found.sort(key=lambda x: -max(self._kept(old, x[0]) for old in x[1]))
        for new, alike in found:
            free = [old for old in alike if old.inside not in self._replaced]
            best = max(free or alike, key=lambda old: self._kept(old, new)).inside
            self._replaced[best] = None
            for i, j in zip(best, new.inside, strict=True):
                self._partners.setdefault(i, []).append(j)

    def _kept(self, old: Unit, new: Unit) -> int:
        """The number of leaves that come back."""
        pairs = zip(old.inside, new.inside, strict=True)
        return sum(self._outputs[j] in self._same(i) for i, j in pairs)

    def _assume_zero(self) -> None:
        """Follow the values, with the moments that are zero and remain so.

        Those of a new optimizer are zero. For a parameter whose gradient is zero they
        remain zero, and then its update is zero.
        """
        zero = {i for i in self._partners if self.leaves[i].is_zero_moment}
        assumed = None
        while zero != assumed:
            self._follow(zero)
            assumed = zero
            zero = {i for i in zero if self._returned(i) == {ZERO}}


def units(tree: Any, first: int = 0) -> Iterator[Unit]:
    """What may be a model: modules, and containers beside them; parents first.

    `first`: the position of the first leaf.
    """
    is_whole = is_eqx_module(tree)
    below = [] if is_whole else children(tree) or []
    if is_whole or below and _is_model(tree, [x for _, x in below]):
        yield Unit(tree, range(first, first + jtu.tree_structure(tree).num_leaves))
    for _, child in below:
        yield from units(child, first)
        first += jtu.tree_structure(child).num_leaves


def _is_model(container: Any, below: list[Any]) -> bool:
    if not isinstance(container, tuple):
        return True
    # A tuple with a module is a carry: a model, its optimizer, a second model. A tuple
    # of arrays is a batch, or a loss and a metric.
    inside = jtu.tree_leaves(container, is_leaf=is_eqx_module)
    return not any(map(is_eqx_module, inside)) and not jtu.all_leaves(below)


def _is_alike(a: Unit, b: Unit) -> bool:
    """Whether two nodes have the same class and structure, modes aside."""
    if type(a.node) is not type(b.node) or len(a.inside) != len(b.inside):
        return False
    first, second = (jtu.tree_structure(same_modes(x.node)) for x in (a, b))
    return first == second


def argument_names(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The names of the arguments in the signature of the function."""
    if isinstance(f, eqx.Partial):  # into which `inspect` does not look
        f = ft.partial(f.func, *f.args, **f.keywords)
    try:
        parameters = [*inspect.signature(f).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    last = inspect.Parameter.POSITIONAL_OR_KEYWORD  # or a kind before it
    known = [p.name for p in parameters if p.kind <= last][: len(args)]
    rest = next((p.name for p in parameters if p.kind == last + 1), "args")
    return [*known, *(f"{rest}[{i}]" for i in range(len(args) - len(known))), *kwargs]


def _is_of_optax(x: Any) -> bool:
    return type(x).__module__.startswith("optax.")


def is_concrete(x: Any) -> bool:
    """Whether the values of an array are known."""
    return not isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct))
