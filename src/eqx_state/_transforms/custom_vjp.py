"""`es.custom_vjp`: `jax.custom_vjp` for functions of modules that write state."""

import contextlib
import functools as ft
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import is_in_trace
from .._errors import show, TraceError
from .._state.scope import closed_copy, is_owned, Sown
from .._state.sow import in_words
from .._tree.base import fields_of
from .._tree.compare import difference_of_leaves, is_hole, leaves_like
from .._tree.walk import is_array, leaves, walk
from .lift import check_given, is_traced, Lifted, models_in, Ran, Slot, Values
from .transform import Transform, Unbound, why_not_called, wrap


# --- One call of an `es.custom_vjp`: what goes into JAX's, and what comes out.
#
# JAX does not trace into a custom derivative: it takes the arrays that go in and come
# out. So all arrays of all modules are among its inputs, and all state that may be
# written is among its outputs, whichever of the function and its forward rule JAX runs.


class Note(NamedTuple):
    """The facts about one trace that are needed outside of it."""

    static: Any  # the part of the output that is not arrays
    written: frozenset[Slot]
    sown: list[dict[Any, int]]  # for each scope and key, how many values were kept


class Alike:
    """The traces of one call.

    `sown`, `called` and `static` are the messages if they differ: in a name that was
    sown, in a module whose output is captured, in a leaf of the output.
    """

    def __init__(self, *, sown: str, called: str, static: str):
        self.messages = sown, called, static
        self.notes: list[Note] = []

    def take(self, ran: Ran, out: Any) -> tuple[Any, list[Sown]]:
        """The arrays of an output, and what was sown, as in the first trace."""
        out, static = eqx.partition(out, is_traced(out))
        counts = [{key: len(x) for key, x in s.items()} for s in ran.sown]
        self.notes.append(Note(static, frozenset(ran.written), counts))
        first = self.notes[0].sown
        self._check_sown(first, counts)
        name = difference_of_leaves(self.notes[0].static, static)
        if name is not None:
            raise TypeError(self.messages[2].format(name or "the output"))
        # In one order, which is part of the structure of an output.
        sown = zip(first, ran.sown, strict=True)
        return out, [OrderedDict((key, s[key]) for key in keys) for keys, s in sown]

    def _check_sown(
        self, sown: list[dict[Any, int]], other: list[dict[Any, int]]
    ) -> None:
        for first, last in zip(sown, other, strict=True):
            if first.items() != last.items():
                key, _ = min(first.items() ^ last.items(), key=str)
                raise ValueError(in_words(key, *self.messages[:2]))

    @property
    def written(self) -> frozenset[Slot]:
        """All that was written in some trace."""
        return frozenset().union(*(note.written for note in self.notes))

    @property
    def static(self) -> Any:
        return self.notes[0].static


class Rules(NamedTuple):
    """A function, its forward and its backward rule; which arguments are static."""

    name: str
    f: Any
    fwd: Any
    bwd: Any
    nondiff_argnums: tuple[int, ...]


class Call:
    """One call: its arguments, and the state that it may write.

    - `chosen`, `given`: the arguments that are differentiated, and the same as an
        ordinary tree. `arrays` are those of `given`, with holes elsewhere.
    - `slots`: for each leaf of `given` the slot, if it is one of an owned module.
    """

    def __init__(self, rules: Rules, args: tuple[Any, ...]):
        self.rules, self.args = rules, args
        for i in rules.nondiff_argnums:
            if not -len(args) <= i < len(args):
                raise ValueError(_NO_ARGUMENT.format(rules.name, i, len(args)))
        fixed = {i % len(args) for i in rules.nondiff_argnums}
        self.fixed = [x for i, x in enumerate(args) if i in fixed]
        self.positions = [i for i in range(len(args)) if i not in fixed]
        self._check_signatures()
        functions = rules.f, rules.fwd, rules.bwd
        check_given(*args)
        self.lifted = Lifted(functions, args)
        self.args = args = self.lifted.arguments
        self.chosen = [args[i] for i in self.positions]
        self._check_passed((functions, self.fixed))
        self.given = closed_copy(self.chosen)
        arrays, self.rest = eqx.partition(self.given, is_traced(self.given))
        # JAX would hand out a number as a literal of a class of its own.
        self.arrays = jtu.tree_map(jnp.asarray, arrays)
        self.alike = Alike(sown=_SOWN, called=_CALLED, static=_NOT_ARRAYS)
        self.slots: list[Slot | None] = []
        for x in jtu.tree_leaves(self.chosen, is_leaf=is_owned):
            self.slots += self.lifted.slots(x) if is_owned(x) else [None]
        # These are known when the forward rule has been traced.
        self.ran_fwd = False
        self.written: frozenset[Slot] = frozenset()
        self.moving: set[Slot] = set()
        self.residuals: Any = None

    def _check_signatures(self) -> None:
        """Raise `TypeError` if a rule cannot be called as JAX will call it."""
        rules = self.rules
        bwd = [*self.fixed, None, None]
        for which, f, args, what in (
            ("forward", rules.fwd, self.args, _OF_FWD),
            ("backward", rules.bwd, bwd, _OF_BWD),
        ):
            if (problem := why_not_called(f, *args)) is not None:
                text = _RULE_ARGUMENTS.format(which, rules.name, what, problem)
                raise TypeError(text)

    def _check_passed(self, functions: Any) -> None:
        """Raise `ValueError` if a function only closes over a module with arrays."""
        passed = {id(visit.node) for visit in walk(self.chosen)}
        for module in models_in(functions):
            arrays = [v for v in leaves(module) if is_array(v.node)]
            if arrays and id(module) not in passed:
                cls = type(module).__name__
                raise ValueError(_CLOSED_OVER.format(self.rules.name, cls))
        for x in jtu.tree_leaves(self.fixed):
            if isinstance(x, jax.core.Tracer):
                message = _TRACED.format(self.rules.name, jax.typeof(x))
                raise jax.errors.UnexpectedTracerError(message)

    def run(self) -> Any:
        """Run, and commit what was written."""
        f, fwd, bwd = (
            _named(self.rules.name, f) for f in (self._primal, self._fwd, self._bwd)
        )
        primal = jax.custom_vjp(f)
        primal.defvjp(fwd, bwd)
        out, state, sown = primal(self.arrays)
        written = self.alike.written
        if not self.ran_fwd and is_in_trace():
            # JAX may trace the forward rule when all of this is over, and what that
            # writes has to be among the state already.
            written |= self._written_by_fwd()
        state = {slot: self._guarded(slot, state[slot]) for slot in written}
        self.lifted.commit(Ran(None, state, sown))
        return eqx.combine(out, self.alike.static)

    def _primal(self, arrays: Any) -> Any:
        ran, values = self._called(self.rules.f, arrays)
        return self._outputs(ran, ran.out, values)

    def _fwd(self, arrays: Any) -> tuple[Any, Any]:
        ran, values = self._called(self.rules.fwd, arrays)
        if not isinstance(ran.out, (tuple, list)) or len(ran.out) != 2:
            raise TypeError(_NOT_A_PAIR.format(self.rules.name, show(ran.out)))
        out, residuals = ran.out
        self.ran_fwd = True
        self.written = frozenset(ran.written)
        self.moving = self._moving(ran, arrays)
        residuals = closed_copy(residuals)  # which `bwd` may read, and not write
        traced, self.residuals = eqx.partition(residuals, is_traced(residuals))
        return self._outputs(ran, out, values), traced

    def _bwd(self, residuals: Any, cotangents: Any) -> tuple[Any]:
        out, state, _ = cotangents
        residuals = eqx.combine(residuals, self.residuals)
        given = self.rules.bwd(*self.fixed, residuals, out)
        return (self._fit(given, state),)

    def _called(self, f: Any, arrays: Any) -> tuple[Ran, Values]:
        """A call of `f` in the trace of these arrays, and the values before it."""
        new = jtu.tree_leaves(eqx.combine(arrays, self.rest))
        chosen, values = self.lifted.fill(self.chosen, new)
        args = list(self.args)
        for i, x in zip(self.positions, chosen, strict=True):
            args[i] = x
        values = {**self.lifted.values, **values}
        return self.lifted.run(values, lambda: f(*args)), values

    def _outputs(self, ran: Ran, out: Any, values: Values) -> tuple[Any, Values, Any]:
        out, sown = self.alike.take(ran, out)
        # All state, since the other rule may write what this one does not.
        old = {slot: values[slot] for slot in self.lifted.writable}
        return out, {**old, **ran.written}, sown

    # --- Gradients through state ------------------------------------------------------

    def _written_by_fwd(self) -> set[Slot]:
        written: set[Slot] = set()

        def run(arrays: Any) -> None:
            written.update(self._called(self.rules.fwd, arrays)[0].written)

        with contextlib.suppress(Exception):  # it may never be needed
            jax.eval_shape(run, self.arrays)
        return written

    def _moving(self, ran: Ran, arrays: Any) -> set[Slot]:
        """The state written by `fwd` that has a derivative by the arguments.

        Which has none because of a `stop_gradient` cannot be seen in its value. So
        `fwd` is traced again, by `jax.jvp`, in which a custom rule is called for
        tangents that are not known to be zero.
        """
        smooth = [slot for slot, x in ran.written.items() if _is_inexact(x)]
        found: set[Slot] = set()
        diff, rest = eqx.partition(arrays, jtu.tree_map(_is_inexact, arrays))

        def run(diff: Any) -> None:
            written = self._called(self.rules.fwd, eqx.combine(diff, rest))[0].written
            for slot in smooth:
                _watched(written[slot], lambda slot=slot: found.add(slot))

        if smooth:
            try:
                jax.eval_shape(lambda diff: jax.jvp(run, (diff,), (diff,)), diff)
            except Exception:  # what JAX cannot differentiate is why there is a rule
                return set(smooth)
        return found

    def _guarded(self, slot: Slot, x: Any) -> Any:
        """`x`, with an error for a cotangent of state that has lost its derivative."""
        if not _is_inexact(x):
            return x

        @jax.custom_vjp
        def guard(x: Any) -> Any:
            return x

        def bwd(_: None, cotangent: Any) -> tuple[Any]:
            # JAX calls this only for a cotangent that is not known to be zero.
            if slot in self.moving:
                name = self.lifted.name(slot)
                field = name.rpartition(".")[2]
                raise TraceError(_GRADIENT.format(name, self.rules.name, field))
            return (cotangent,)

        guard.defvjp(lambda x: (x, None), bwd)
        return guard(x)

    def _fit(self, given: Any, state: Values) -> Any:
        """What `bwd` has returned, as cotangents of `arrays`; `None` for zeros."""
        count = len(self.given)
        given = tuple(given) if isinstance(given, list) else given
        if not isinstance(given, tuple) or len(given) != count:
            shown = self.rules.name, count, show(given)
            raise TypeError(_COTANGENTS.format(*shown))
        what = "The cotangent that the backward rule of `{}` returned for argument {}"
        found: list[Any] = []
        for i, x, y in zip(self.positions, self.given, given, strict=True):
            found += _leaves_of(x, y, what.format(self.rules.name, i))
        flags = jtu.tree_leaves(is_traced(self.given))
        for k, slot in enumerate(self.slots):
            if slot in state and slot not in self.written and _is_inexact(state[slot]):
                own = found[k]
                found[k] = state[slot] if own is None else own + state[slot]
        found = [x if flag else None for x, flag in zip(found, flags, strict=True)]
        return jtu.tree_unflatten(jtu.tree_structure(self.given), found)


def _named(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` with a name that JAX uses in its messages."""

    def call(*args: Any) -> Any:
        return f(*args)

    call.__name__ = name
    return call


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _watched(x: Any, note: Callable[[], None]) -> Any:
    """`x`; calls `note` in a trace in which it has a tangent."""

    watched = jax.custom_jvp(lambda x: x)

    @ft.partial(watched.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        note()
        return *primals, *tangents

    return watched(x)


def _leaves_of(tree: Any, given: Any, what: str) -> list[Any]:
    """For each leaf of an argument its cotangent; `None` may stand for any subtree."""
    with contextlib.suppress(ValueError):  # which `leaves_like` explains
        given = jtu.tree_map(
            lambda y, x: jtu.tree_map(lambda _: None, x) if is_hole(y) else y,
            given,
            tree,
            is_leaf=is_hole,
        )
    try:
        new = leaves_like(tree, given, what)
    except ValueError as error:
        raise TypeError(error.args[0]) from None
    visits = leaves(tree, is_leaf=is_hole)
    for visit, y in zip(visits, new, strict=True):
        x = visit.node
        if eqx.is_array(y) and eqx.is_inexact_array(x):
            expected, got = map(jax.typeof, (x, y))  # NumPy's float64 is float32 to JAX
            if (expected.shape, expected.dtype) != (got.shape, got.dtype):
                at = f" at `{visit.name}`" if visit.name else ""
                raise ValueError(_OTHER_TYPE.format(what, show(y), at, show(x)))
    return [y for v, y in zip(visits, new, strict=True) if not is_hole(v.node)]


_NO_ARGUMENT: Final = """`es.custom_vjp`: `nondiff_argnums` of `{}` names argument {}, \
and there are {} arguments. They are counted from 0, of a method with `self`."""

_CLOSED_OVER: Final = """`es.custom_vjp`: `{0}`, or one of its rules, has a `{1}` from \
outside, or as an argument in `nondiff_argnums`. JAX does not look into a custom \
derivative, so the arrays of that module could have no gradient. Pass it:

    es.custom_vjp(lambda x: layer(x))           # wrong
    es.custom_vjp(lambda layer, x: layer(x))    # right

and return a cotangent for it from the backward rule, or `None` for zero. The `self` \
of a decorated method is argument 0, and is passed already."""

_TRACED: Final = """`es.custom_vjp`: an argument of `{}` that is in `nondiff_argnums` \
holds the tracer `{}`. These arguments are static: functions, numbers, strings. Pass \
an array as an ordinary argument, and return `None` for it from the backward rule."""

_NOT_A_PAIR: Final = """The forward rule of `{}` returns a pair, `(out, residuals)`, \
and this one returned `{}`. Without residuals: `return out, None`."""

_COTANGENTS: Final = """The backward rule of `{}` returns a tuple with a cotangent for \
each argument (of a method also for `self`), which are {} here, and this one returned \
`{}`. `None` stands for zero: `return None, dx`."""

_OTHER_TYPE: Final = """{} is `{}`{}, where the argument is `{}`. A cotangent has the \
shape and the dtype of what it is for."""

_RULE_ARGUMENTS: Final = """`es.custom_vjp`: the {} rule of `{}` is called with {}: \
{}."""
_OF_FWD: Final = "the arguments of the function, all by position"
_OF_BWD: Final = """the arguments in `nondiff_argnums`, the residuals, and the \
cotangents of the output"""

_GRADIENT: Final = """A gradient flows through `{0}`, which was written in `{1}`, the \
forward rule of an `es.custom_vjp` or its function. The backward rule has cotangents \
of the output only, so what flows through the state would be lost. Return the value as \
a part of the output; or, if there shall be no gradient, say so where it is written. \
That is also necessary in a loop, where JAX cannot see that it is zero:

    self.{2} = jax.lax.stop_gradient(value)"""

_SOWN: Final = """`{}` was sown in the function of an `es.custom_vjp`, and not, or not \
as often, in its forward rule, or the other way round. One of them runs, and their \
outputs have one structure. Sow it in both, or return it and sow it after the call."""

_CALLED: Final = """The output of `{}` was captured in the function of an \
`es.custom_vjp`, and it was not called, or not as often, in its forward rule, or the \
other way round. Call it in both, or leave it out of `outputs`."""

_NOT_ARRAYS: Final = """The function and the forward rule of an `es.custom_vjp` return \
different values at `{}`, which are not arrays. One of them runs, so only arrays may \
differ. Return arrays, or the same value from both."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


class _CustomVjp(Transform):
    nondiff_argnums: tuple[int, ...] = eqx.field(static=True)
    fwd: Any
    bwd: Any

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> "_CustomVjp":
        fields_of(self).update(fwd=fwd, bwd=bwd)
        return self

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        # The object is argument 0 here, for which `bwd` returns a cotangent, too.
        rule = self.of(_unbound(self.f))
        rule.__dict__.update(fwd=_unbound(self.fwd))
        return eqx.Partial(rule, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        name = getattr(self.f, "__name__", type(self.f).__name__)
        if self.fwd is None:
            raise AttributeError(_NO_RULES.format(name))
        rules = Rules(name, self.f, self.fwd, self.bwd, self.nondiff_argnums)
        call = Call(rules, _by_position(rules, args, kwargs))
        if call.lifted.is_initializing:
            return self.f(*call.args)
        return call.run()


def _unbound(f: Any) -> Any:
    return Unbound.around(f) if isinstance(f, Transform) else f


def _by_position(rules: Rules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All arguments of a call by position, with defaults, as the rules take them."""
    try:
        bound = inspect.signature(rules.f).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise TypeError(_BINDING.format(rules.name, error)) from None
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(_BY_NAME.format(rules.name, min(bound.kwargs)))
    return bound.args


_NO_RULES: Final = """`es.custom_vjp`: `{0}` was called, and has no rules yet. Define \
them first: `{0}.defvjp(fwd, bwd)`."""

_NO_SUCH_NAME: Final = """`es.custom_vjp`: `nondiff_argnames` has `{}`, and the \
arguments are {}."""

_BINDING: Final = """`es.custom_vjp`: the arguments do not fit the signature of `{}`: \
{}."""

_BY_NAME: Final = """`es.custom_vjp`: the rules of `{}` take all arguments by \
position, and `{}` is only given by name. Let it be given by position, too."""


class _Rule(Generic[_P, _R]):
    """The type of `custom_vjp(f)`, for type checkers."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., _R]: ...
    def defvjp(
        self, fwd: Callable[..., tuple[_R, Any]], bwd: Callable[..., tuple[Any, ...]]
    ) -> "_Rule[_P, _R]": ...


def custom_vjp(
    fun: Callable[_P, _R],
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> _Rule[_P, _R]:
    """`jax.custom_vjp` for functions of modules, which may write state.

    `rule = es.custom_vjp(f)`, and then `rule.defvjp(fwd, bwd)`, which returns `rule`:
    `fwd` takes the arguments of `f` and returns `(out, residuals)`; `bwd` takes the
    residuals and the cotangents of `out`, and returns a tuple with a cotangent for each
    argument. If the call is differentiated, `fwd` runs, and otherwise `f`. Both may
    write state of modules among their arguments, and what the one that ran has written
    counts.

    **Arguments:**

    - `fun`: a function. For a decorated method, `self` is argument 0, also of `fwd` and
        in what `bwd` returns.
    - `nondiff_argnums`, `nondiff_argnames`: arguments that are static, and come first
        in the arguments of `bwd`. Leaves that are not arrays need not be named.

    **Returns:**

    A function of the same arguments, with the method `defvjp`. The cotangent for a
    module is a tree like it, with `None` for leaves without one; `None` in place of a
    whole argument, or of any part of it, is zero. The function is a pytree, and can
    decorate methods.

    **Raises:**

    - `ValueError`: `fun`, `fwd` or `bwd` closes over a module that is not an argument;
        they sow different values.
    - `dataclasses.FrozenInstanceError`: `bwd` writes to a module that it is given.
    - `es.TraceError`: a gradient flows through state that `fwd` has
        written, and not behind an explicit `jax.lax.stop_gradient`.
    - `TypeError`: `fwd` did not return a pair, or `bwd` a tuple of trees like the
        arguments. `AttributeError`: there are no rules yet.

    !!! example

        ```python
        import eqx_state as es
        import jax
        import jax.numpy as jnp


        class Clip(es.Module):
            # The identity, with a gradient that is clipped.

            limit: es.Buffer
            calls: es.State = 0

            @es.custom_vjp
            def __call__(self, x):
                self.calls = self.calls + 1
                return x

            def _fwd(self, x):
                self.calls = self.calls + 1
                return x, self.limit

            def _bwd(limit, g):
                return None, jnp.clip(g, -limit, limit)

            __call__.defvjp(_fwd, _bwd)


        def loss(clip, x):
            return jnp.sum(5 * clip(x))


        x = jnp.array([1.0, 2.0])
        (grads, by_x), (clip, _) = es.grad(loss, argnums=(0, 1))(Clip(1.0), x)
        assert by_x.tolist() == [1.0, 1.0] and clip.calls == 1
        ```
    """
    is_one = isinstance(nondiff_argnums, int)
    positions = {nondiff_argnums} if is_one else {*nondiff_argnums}
    is_name = isinstance(nondiff_argnames, str)
    for name in [nondiff_argnames] if is_name else nondiff_argnames:
        parameters = [*inspect.signature(fun).parameters]
        if name not in parameters:
            raise ValueError(_NO_SUCH_NAME.format(name, ", ".join(parameters)))
        positions.add(parameters.index(name))
    argnums = tuple(sorted(positions))
    return wrap(_CustomVjp, fun, nondiff_argnums=argnums, fwd=None, bwd=None)
