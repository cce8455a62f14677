"""`es.hold`: a compiled step that stores its carry, packed, between calls."""

import contextlib
import functools as ft
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, Final, Generic, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from .._compat import boundary, hide_frames, is_in_trace
from .._errors import show, TraceError
from .._kinds.kinds import State
from .._state.init import check_ready
from .._state.scope import is_open_here, Scope
from .._transforms.loops import NOT_RETURNED, pair_of
from .._transforms.mutable import thread
from .._transforms.reach import is_mappable
from .._transforms.transform import check_callable, method_as_pytree
from .._tree.compare import difference, same
from .._tree.dtypes import as_jax, same_type
from .._tree.walk import is_array, leaves, Visit
from .._typing import P, R
from .call import bind, origin_of
from .options import Options
from .packing import Layout, Pack
from .programs import Programs
from .static import structure, typed


_C = TypeVar("_C")


class _Frame:
    """A carry whose arrays are replaced by `_ARRAY`."""

    def __init__(self, carry: Any, visits: list[Visit]):
        self.treedef = jtu.tree_structure(carry)
        self.leaves = [_ARRAY if is_mappable(v) else v.node for v in visits]
        static = tuple(x if x is _ARRAY else typed(x) for x in self.leaves)
        self.key = structure(self.treedef), static

    def with_arrays(self, arrays: list[Array]) -> Any:
        """The carry with these arrays."""
        rest = iter(arrays)
        filled = [next(rest) if x is _ARRAY else x for x in self.leaves]
        return jtu.tree_unflatten(self.treedef, filled)

    def arrays(self, carry: Any) -> list[Array]:
        """The arrays of a carry."""
        pairs = zip(self.leaves, jtu.tree_leaves(carry), strict=True)
        return [jnp.asarray(x) for static, x in pairs if static is _ARRAY]


_ARRAY: Final = "array"


class _Mode:
    """A structure of the carry, its layout, and the compiled functions for both."""

    def __init__(self, f: Any, frame: _Frame, layout: Layout, donate: bool):
        self.f, self.frame, self.layout = f, frame, layout
        options = Options("all-except-first" if donate else "none")
        self.programs = Programs(options, origin_of(f))
        # One object for all calls: it is part of the cache key.
        self.step = ft.partial(_packed_step, frame, layout, donate)

    def __call__(self, args: Any, kwargs: Any, arrays: list[Array]) -> Any:
        """The packed arrays of the new carry, their layout, and the output."""
        return self.programs(self.step, ((self.f, args, kwargs), arrays), {})


def _packed_step(
    frame: _Frame, layout: Layout, donate: bool, given: Any, arrays: list[Array]
) -> tuple[list[Array], Layout, Any]:
    """Run one step in a trace. Returns the results of `_Mode.__call__`."""
    f, args, kwargs = given
    carry = frame.with_arrays(layout.unpack(arrays))
    new, out = held_step(f, carry, args, kwargs)
    layout, after = layout.after(frame.arrays(new))
    packed = layout.pack(after)
    if donate:
        # The next call donates these arrays, so the caller must not have them. In
        # `es.hold(lambda carry, x: (carry, carry), …)` under `jax_disable_jit`, they
        # would also be the output. Compiled functions return a separate array for each
        # output in all versions of JAX that we know.
        packed = [jnp.copy(x) for x in packed]
    return packed, layout, out


def held_step(f: Any, carry: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The new carry and the output of `f(carry, *args, **kwargs)`, in a trace."""

    def run(carry: Any) -> Any:
        try:
            pair = f(carry, *args, **kwargs)
        except TypeError as error:
            # Python's message begins with the name of `f` if the arguments do not fit.
            if not str(error).startswith(f"{getattr(f, '__qualname__', '?')}()"):
                raise
            raise TypeError(_FORM.format(error)) from error
        new, (_, rest) = pair_of(pair, "es.hold")
        return new, rest

    # As in `es.mutable`, the body writes to a private copy of the carry.
    (new, out), private = thread(carry, Scope((State,)), run)
    if jtu.tree_structure(carry) != jtu.tree_structure(new):
        raise ValueError(_STRUCTURE.format(difference(carry, new)))
    visits = zip(leaves(carry), jtu.tree_leaves(private), leaves(new), strict=True)
    for before, written, after in visits:
        name, x = before.name or "the carry", after.node
        if written is not before.node and x is before.node:
            raise ValueError(NOT_RETURNED.format(name))
        # As in a loop, a number is an array, unless it is a field of a module.
        x = jnp.asarray(x) if is_mappable(after) else x
        is_like = same_type if is_array(before.node) else same
        if not is_like(before.node, x):
            raise ValueError(_LEAF.format(name, show(before.node), show(after.node)))
    return new, out


_FORM: Final = """A held step is `(carry, …) -> (carry, out)`, and its first argument \
is the whole carry: {}. Unpack the carry inside, `model, optimizer = carry`, and end \
with `return (model, optimizer), loss`."""

_STRUCTURE: Final = """The function of `es.hold` returned a carry of a different \
structure or mode, {}. The next step starts with the carry that this step returns, so \
only the values of arrays may change. To change the structure between two steps, \
assign a carry: `run.carry = run.carry.eval()`."""

_LEAF: Final = """The function of `es.hold` changed `{0}` in its carry from `{1}` to \
`{2}`. The next step starts with the carry that this step returns, so only the values \
of arrays may change. Convert it: `x.astype(old.dtype)`."""


class Held(Generic[_C, P, R]):
    """A step that stores its carry: the result of `hold`.

    `.carry` returns the carry as an ordinary tree. You can assign a new carry; a
    different structure or mode recompiles the step.
    """

    def __init__(self, f: Callable[..., Any], carry: _C, donate: bool):
        self._f, self._donate = method_as_pytree(f), donate
        self._modes: dict[Any, _Mode] = {}
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._held: tuple[_Mode, list[Array]] | None = self._hold(carry)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            with self._alone():
                return self._run(*bind(self._f, (None, *args), kwargs))
        except Exception as error:
            hide_frames(error)
            raise

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode, arrays = self._get()
        try:
            # Drop the first argument, the placeholder for the carry that `bind` needed.
            after, layout, out = mode(args[1:], kwargs, arrays)
        except BaseException:
            if any(x.is_deleted() for x in arrays):
                self._held = None
            raise
        if layout is not mode.layout:
            mode = self._mode(mode.frame, layout)
        # Assign last, so that an exception above leaves the carry unchanged.
        self._held = mode, after
        return out

    @property
    @boundary
    def carry(self) -> _C:
        """The carry, as an ordinary tree."""
        with self._alone():
            mode, packed = self._get()
            arrays = mode.layout.unpack(packed, Pack.split_now)
            if self._donate:
                for i in mode.layout.unpacked:
                    arrays[i] = jnp.copy(arrays[i])
            return mode.frame.with_arrays(arrays)

    @carry.setter
    @boundary
    def carry(self, carry: _C) -> None:
        with self._alone():
            self._held = self._hold(carry)

    def _get(self) -> tuple[_Mode, list[Array]]:
        if self._held is None:
            raise RuntimeError(_LOST)
        return self._held

    def _hold(self, carry: Any) -> tuple[_Mode, list[Array]]:
        """The mode and the packed arrays of a carry that the caller passed."""
        check_ready(carry)
        visits = leaves(carry)
        arrays = [_as_array(visit) for visit in visits if is_mappable(visit)]
        layout = Layout.of(arrays)
        if self._donate:
            for i in layout.unpacked:
                arrays[i] = jnp.copy(arrays[i])
        mode = self._mode(_Frame(carry, visits), layout)
        return mode, layout.pack(arrays, Pack.join_now)

    def _mode(self, frame: _Frame, layout: Layout) -> _Mode:
        key = frame.key, layout
        if key not in self._modes:
            self._modes[key] = _Mode(self._f, frame, layout, self._donate)
        return self._modes[key]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for other threads; raise where a held step cannot be used."""
        me = threading.get_ident()
        if self._owner == me:
            raise RuntimeError(_IN_ITSELF)
        check_outside()
        with self._lock:
            self._owner = me
            try:
                yield
            finally:
                self._owner = None

    def __reduce__(self) -> Any:
        raise TypeError(_COPIED)


def check_outside() -> None:
    """Raise inside a trace or a scope, which cannot track a held carry."""
    if is_in_trace():
        raise TraceError(_IN_TRACE)
    if is_open_here():
        raise RuntimeError(_IN_SCOPE)


def _as_array(visit: Visit) -> Array:
    """A leaf as an immutable JAX array."""
    x, name = visit.node, visit.name or "the carry"
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(_NO_VALUE.format(name, show(x)))
    return x if isinstance(x, jax.Array) else as_jax(x, name)


@boundary
def hold(
    f: Callable[Concatenate[_C, P], tuple[_C, R]], carry: _C, *, donate: bool = False
) -> Held[_C, P, R]:
    """A compiled step that stores its carry between calls.

    For small models, host time dominates a step: each array that a compiled call takes
    or returns costs a few microseconds. A held step stores the model and the optimizer
    between calls, with small arrays packed into one buffer per dtype, and costs less
    host time than `jax.jit` of a flat list of the same arrays.

    **Arguments:**

    - `f`: a function that takes the carry and any other arguments, and returns the new
        carry and an output, as for [`es.scan`][eqx_state.scan]. The new carry must have
        the structure, modes, shapes and dtypes of the old one. Modules in the carry may
        write their state. Otherwise as for [`es.jit`][eqx_state.jit]: arrays in the
        other arguments are traced, the rest is static.
    - `carry`: the first carry, any pytree. Its arrays are never changed or donated. A
        number outside of a module becomes an array. A stateful module may occur only
        once.
    - `donate`: whether a step may overwrite the arrays of its carry. It then needs
        memory for one carry instead of two, but a run that fails loses the carry.
        Default: `False`.

    **Returns:**

    `run`, where `run(*args, **kwargs)` returns the output of `f(carry, *args,
    **kwargs)` and stores the new carry. As with `es.jit`, the call returns before the
    result is ready. `run.carry` is the carry as an ordinary tree, with a copy of every
    packed array (with `donate`: of every array). You can assign a new carry; each new
    structure or mode compiles the step once. Threads take turns.

    **Raises:**

    - `TypeError`: `f` cannot be called, or does not return a pair; `carry` contains a
        `jax.ShapeDtypeStruct`; `donate` is not a bool; `run` is copied or pickled.
    - `ValueError`: `f` returned a carry of a different structure, mode, shape or dtype;
        or a stateful module occurs twice in the carry.
    - `RuntimeError`: `run` is used inside a scope of `es.mutable`, or by `f`; with
        `donate`, an earlier run failed, and you have not assigned a new carry.
    - `es.TraceError`: `run` is used inside a transform.
    - `es.NotInitializedError`: the carry still contains an `es.Initializer`.
    - All errors of `es.jit`. Without `donate`, the carry does not change.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Mean(es.Module):
            sum: es.State = 0.0
            count: es.State = 0

            def __call__(self, x):
                self.sum = self.sum + x
                self.count = self.count + 1
                return self.sum / self.count


        run = es.hold(lambda mean, x: (mean, mean(x)), Mean())
        means = [run(jnp.array(x)) for x in (1.0, 2.0, 6.0)]
        assert means == [1.0, 1.5, 3.0]
        assert run.carry.count == 3
        ```
    """
    check_callable(f)
    if not isinstance(donate, bool):
        raise TypeError(_DONATE.format(donate))
    check_outside()
    return Held(f, carry, donate)


_IN_TRACE: Final = """A held step was called inside a JAX transform, which cannot \
track changes to its carry. Call it at top level. Inside a transform, call the \
function itself: `carry, y = step(carry, x)`."""

_IN_SCOPE: Final = """A held step was called inside `es.mutable`, which cannot track \
changes to its carry. Call it at top level instead; the modules in its carry can write \
state there: `run = es.hold(lambda model, x: (model, model(x)), model)`."""

_IN_ITSELF: Final = """The function of `es.hold` used its own held step while that was \
running. The function receives the carry as its argument and returns the new one."""

_LOST: Final = """The carry of this held step is lost: with `donate=True`, it was \
donated to a run that failed. Assign a new one, `run.carry = es.load(path, like)`. \
Without `donate`, a run that fails does not change the carry."""

_DONATE: Final = """`es.hold(donate={!r})`: `donate` must be `True` or `False`. A held \
step donates only its carry, never its arguments."""

_COPIED: Final = """A held step cannot be copied or pickled. Copy or save its carry, \
`run.carry`, which is an ordinary tree."""

_NO_VALUE: Final = """`es.hold` was given `{}` as `{}`, which has a shape but no \
values. Create the carry first, or load it: `es.load(path, like)`."""
