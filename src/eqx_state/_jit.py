"""`es.jit`: `jax.jit` of what is not made of arrays alone, and of what writes state.

All arrays of a call are traced; the rest is its *signature*, for which there is one
compiled program. The program of a call is found by a key that is equal for equal
signatures. While the call lasts the key also leads to the live objects, which the trace
runs on, if it comes to a trace.
"""

import functools as ft
import inspect
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal, overload, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu

from ._lift import Leaves, Lifted
from ._mutable import is_bound_method, Transform, wrap
from ._open import close, Opened
from ._scope import is_owned
from ._signature import signature_of
from ._traverse import is_array, KeyPath


_P = ParamSpec("_P")
_R = TypeVar("_R")

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]

# Which arrays are donated, of the first argument and of the others.
_DONATED: Final[dict[str, tuple[bool, bool]]] = {
    "all": (True, True),
    "all-except-first": (False, True),
    "warn": (True, True),
    "warn-except-first": (False, True),
    "none": (False, False),
}


class _Key:
    """What the program of a call depends on besides the shapes of its arrays."""

    def __init__(self, signature: Any, call: "_Call"):
        self.signature = signature
        self.hash = hash(signature)
        self.call: _Call | None = call  # only while the call lasts

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Key) and self.signature == other.signature


@jtu.register_static
class _Output:
    """What a program returns besides arrays, and where the arrays go."""

    def __init__(self, out: Any, written: list[Leaves], values: list[Leaves]):
        leaves, self.treedef = jtu.tree_flatten(out)
        # Arrays that the function has not touched do not go through the program: a
        # module that comes back with its own parameters may be assigned.
        inside = (x for old in values for x in old.values() if is_array(x))
        kept = {id(x): i for i, x in enumerate(inside)}
        self.kept = [kept.get(id(x)) for x in leaves]
        self.rest = [None if is_array(x) else x for x in leaves]
        self.is_array = [is_array(x) for x in leaves]
        self.names = [list(new) for new in written]

    def arrays(self, out: Any) -> list[Any]:
        """The arrays that the program has computed."""
        leaves = zip(jtu.tree_leaves(out), self.is_array, self.kept, strict=True)
        return [x for x, flag, kept in leaves if flag and kept is None]

    def put(self, arrays: list[Any], inside: list[Any]) -> Any:
        """The output of the call."""
        computed = iter(arrays)
        leaves = [
            inside[kept] if kept is not None else next(computed) if flag else x
            for x, flag, kept in zip(self.rest, self.is_array, self.kept, strict=True)
        ]
        return jtu.tree_unflatten(self.treedef, leaves)


class _Call:
    """One call: its arrays, and its signature."""

    def __init__(self, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        if kwargs:  # `f(x, y=1)` is `f(x, 1)`
            bound = inspect.signature(f).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        self.origin = _origin(f)
        self.lifted = Lifted(f, args, kwargs, may_initialise=True)
        args, kwargs = self.lifted.arguments
        tree = (args[:1], (self.lifted.function, args[1:], kwargs))
        self.entries, self.treedef = jtu.tree_flatten_with_path(tree, is_leaf=is_owned)
        self.values = self.lifted.values()
        self.held = _held(tree)

    def inside(self) -> list[Any]:
        """The arrays of the owned modules."""
        return [x for old in self.values for x in old.values() if is_array(x)]

    def arrays(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Those of the first argument, of the others, and those never donated."""
        first, rest, kept = [], [], []
        for path, x in self.entries:
            if is_array(x):
                to = first if path[0].idx == 0 else rest
                (kept if any(path[: len(p)] == p for p in self.held) else to).append(x)
        return first, rest, kept + self.inside()

    def key(self) -> _Key:
        """What is equal for two calls that one program serves."""
        signature = signature_of(self.entries, self.treedef, self.lifted, self.origin)
        return _Key(signature, self)

    def trace(
        self, first: list[Any], rest: list[Any], kept: list[Any]
    ) -> tuple[list[Any], list[list[Any]], _Output]:
        """The call on these arrays, in the active trace."""
        sources = iter(first), iter(rest), iter(kept)
        leaves = []
        for path, x in self.entries:
            if is_array(x):
                is_held = any(path[: len(p)] == p for p in self.held)
                x = next(sources[2 if is_held else path[0].idx])
            leaves.append(x)
        values = [
            {name: next(sources[2]) if is_array(x) else x for name, x in old.items()}
            for old in self.values
        ]
        head, tail = close(jtu.tree_unflatten(self.treedef, leaves))
        f, args, kwargs = tail
        out, written = self.lifted.run(values, lambda: f(*head, *args, **kwargs))
        output = _Output(out, written, values)
        return output.arrays(out), [list(new.values()) for new in written], output

    def finish(self, result: tuple[list[Any], list[list[Any]], _Output]) -> Any:
        """The output of the call, after its writes to the owned modules."""
        arrays, state, output = result
        named = zip(output.names, state, strict=True)
        self.lifted.commit([dict(zip(n, x, strict=True)) for n, x in named])
        return output.put(arrays, self.inside())


def _held(tree: Any) -> list[KeyPath]:
    """Where the functions are that hold modules, whose arrays are never donated."""

    def is_leaf(x: Any) -> bool:
        return isinstance(x, Opened) or is_owned(x)

    entries, _ = jtu.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [path for path, x in entries if isinstance(x, Opened)]


# By function: the programs go when it goes, of which they keep nothing.
_PROGRAMS: Final[weakref.WeakKeyDictionary[Any, dict[Donate, Any]]] = (
    weakref.WeakKeyDictionary()
)


def _program(origin: Any, donate: Donate) -> Any:
    """The `jax.jit` in which the programs of one function are."""
    programs = _PROGRAMS.setdefault(origin, {})
    if donate not in programs:

        def run(key: _Key, *arrays: list[Any]) -> Any:
            assert key.call is not None
            return key.call.trace(*arrays)

        run.__name__ = run.__qualname__ = getattr(origin, "__name__", "run")
        argnums = tuple(i + 1 for i in range(2) if _DONATED[donate][i])
        programs[donate] = jax.jit(run, static_argnums=0, donate_argnums=argnums)
    return programs[donate]


def _origin(f: Any) -> Any:
    """The function in the source, or the class, that a callable comes from."""
    if isinstance(f, Transform):
        return _origin(f.f)
    if isinstance(f, (ft.partial, jtu.Partial, eqx.Partial)):
        return _origin(f.func)
    if is_bound_method(f):
        return _origin(f.__func__)
    return f if isinstance(f, types.FunctionType) else type(f)


class _Jit(Transform):
    donate: Donate = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        call = _Call(self.f, args, kwargs)
        if call.lifted.is_initialising:
            return self.f(*args, **kwargs)
        self._check_donation(call)
        key = call.key()
        try:
            with warnings.catch_warnings():
                if self.donate.startswith("all"):
                    text = "Some donated buffers were not usable*"
                    warnings.filterwarnings("ignore", message=text)
                result = _program(call.origin, self.donate)(key, *call.arrays())
        finally:
            key.call = None  # JAX keeps the key
        return call.finish(result)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # The object is the first argument, as `donate` understands it.
        return self if instance is None else eqx.Partial(self, instance)

    def lower(self, /, *args: Any, **kwargs: Any) -> "Lowered":
        """The program for these arguments, lowered but not compiled.

        `jax.ShapeDtypeStruct`s may stand for arrays. `.compile()` returns what is
        called with arguments of the same signature.
        """
        call = _Call(self.f, args, kwargs)
        key = call.key()
        try:
            program = _program(call.origin, self.donate)
            return Lowered(program.lower(key, *call.arrays()), self.f, key.signature)
        finally:
            key.call = None

    def _check_donation(self, call: _Call) -> None:
        if self.donate != "none" and call.lifted.roots:
            raise ValueError(
                f"`es.jit(donate={self.donate!r})` was called inside `es.mutable`, on"
                " modules that belong to it. Their old arrays are needed until the"
                " scope ends, and could not be given away. Donate at the top, around"
                " `es.mutable`: `es.jit(step, donate='all')(model, x)`."
            )


class Lowered:
    """A program that is lowered; the other methods are those of JAX's."""

    def __init__(self, lowered: Any, f: Any, signature: Any):
        self._lowered, self._f, self._signature = lowered, f, signature

    def compile(self, *args: Any, **kwargs: Any) -> "Compiled":
        """The compiled program. Arguments as for `jax.stages.Lowered.compile`."""
        compiled = self._lowered.compile(*args, **kwargs)
        return Compiled(compiled, self._f, self._signature)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)


class Compiled:
    """A compiled program; the other methods are those of JAX's."""

    def __init__(self, compiled: Any, f: Any, signature: Any):
        self._compiled, self._f, self._signature = compiled, f, signature

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The program's result, for arguments of the signature it was compiled for."""
        call = _Call(self._f, args, kwargs)
        if call.key().signature != self._signature:
            raise TypeError(
                "A program compiled by `es.jit(f).lower(...).compile()` was called with"
                " arguments of another structure, or with other static values. It"
                " serves only those it was made for; lower again, or call `es.jit(f)`,"
                " which compiles when it has to."
            )
        return call.finish(self._compiled(*call.arrays()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


@overload
def jit(
    *, donate: Donate = "none"
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
@overload
def jit(f: Callable[_P, _R], *, donate: Donate = "none") -> Callable[_P, _R]: ...
def jit(f: Any = None, *, donate: Donate = "none") -> Any:
    """`equinox.filter_jit`, through which the state of every module is carried.

    All arrays, JAX's and NumPy's, are traced; what is no array is static. Unlike
    `eqx.filter_jit` it returns without waiting for the result, and tells static values
    apart by their type, too: `1`, `True` and `1.0` are compiled for one by one.

    **Arguments:**

    - `f`: a function, a module, a bound method, or a partial. The modules that it
        closes over are traced like arguments.
    - `donate`: which arrays may be overwritten: `"all"`, `"all-except-first"` (not
        those of the first argument), `"none"`; `"warn"` and `"warn-except-first"` also
        warn of arrays of which JAX could make no use. Default: `"none"`.

    **Returns:**

    A function of the same arguments, which is a pytree, and can decorate methods. It
    has `.lower(*args, **kwargs)`.

    **Raises:**

    - `TypeError`: a static value cannot be hashed.
    - `ValueError`: donation inside a scope of `es.mutable`.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Counter(es.Module):
            count: es.State = 0

            def __call__(self, x):
                self.count = self.count + 1
                return x * self.count


        @es.jit
        def step(model, x):
            return es.mutable(model)(x)


        model = Counter()
        for _ in range(3):
            y, model = step(model, jnp.array(2.0))
        assert y == 6.0 and model.count == 3
        ```
    """
    if not isinstance(donate, str) or donate not in _DONATED:
        raise ValueError(
            f"`es.jit(donate={donate!r})`: `donate` is one of"
            f" {', '.join(map(repr, _DONATED))}."
        )
    if f is None:
        return ft.partial(jit, donate=donate)
    return wrap(_Jit, f, donate=donate)
