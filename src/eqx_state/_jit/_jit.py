"""`es.jit`: `jax.jit` of what is not made of arrays alone, and of what writes state."""

import contextlib
import functools as ft
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import (
    Any,
    Concatenate,
    Final,
    overload,
    ParamSpec,
    Protocol,
    TypeVar,
)

import equinox as eqx

from .._compat import hide_frames, PROGRAM_ERRORS
from .._transforms._transform import Transform, Unbound, wrap
from .._tree._walk import is_array
from ._call import Call, origin_of
from ._plan import Mismatch
from ._programs import Donate, DONATED, Programs, programs_of, Retrace
from ._runtime_errors import report, Reporting, wait


_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=eqx.Module)
_R_co = TypeVar("_R_co", covariant=True)


def _bind(f: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`f(x, y=1)` is `f(x, 1)`."""
    if not kwargs:
        return args, kwargs
    bound = inspect.signature(f).bind(*args, **kwargs)
    return bound.args, bound.kwargs


class _Ignored:
    """Inside, a warning is ignored, in all threads.

    `warnings.catch_warnings` would put back what it has found, and undo what another
    thread has set meanwhile.
    """

    def __init__(self, message: str):
        self.message = message
        self.lock = threading.Lock()
        self.calls = 0
        self.filters: Any = []
        self.entry: Any = None

    def __enter__(self) -> None:
        with self.lock:
            self.calls += 1
            if self.calls == 1:
                warnings.filterwarnings("ignore", message=self.message)
                self.filters, self.entry = warnings.filters, warnings.filters[0]

    def __exit__(self, *_: Any) -> None:
        with self.lock:
            self.calls -= 1
            if self.calls == 0:
                # Meanwhile `catch_warnings` may have put a copy in their place.
                for filters in (self.filters, warnings.filters):
                    with contextlib.suppress(ValueError):
                        filters.remove(self.entry)


# In a group: not to be taken for a filter of the user's.
_UNUSABLE: Final = _Ignored("(?:Some donated buffers were not usable)")


class _Jit(Transform):
    donate: Donate = eqx.field(static=True)
    hides_frames = True  # a wrapper would make each call slower

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            f, donate = self.f, self.donate
            args, kwargs = _bind(f, args, kwargs)
            programs = programs_of(origin_of(f), donate)
            run = programs if programs.can_raise else programs.jitted
            for plan in programs.plans:
                try:
                    arrays = plan.arrays(f, args, kwargs)
                    result = run(plan.key, *arrays)
                    if result[2].callbacks is None:  # just compiled by another thread
                        programs.settle(result, plan.key, *arrays)
                except (Mismatch, KeyError):
                    continue
                except Retrace:
                    break
                except PROGRAM_ERRORS as error:
                    report(error)
                    raise
                arrays, _, output = result
                return output.put(arrays, [])
            return self._general(programs, args, kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    def _general(
        self, programs: Programs, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The call that may be any: in a scope, the first of its signature."""
        call = Call(self.f, args, kwargs)
        if call.lifted.is_initializing:
            return self.f(*args, **kwargs)
        self._check_donation(call)
        key = programs.key(call)
        is_quiet = self.donate.startswith("all")
        with _UNUSABLE if is_quiet else contextlib.nullcontext():
            result = programs(key, *call.arrays())
        programs.remember(self.f, call, key)
        return call.finish(result)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # The object is the first argument, as `donate` understands it.
        if instance is None:
            return self
        is_stacked = isinstance(self.f, Transform)
        jit = self.of(Unbound.around(self.f)) if is_stacked else self
        return eqx.Partial(jit, instance)

    def lower(self, /, *args: Any, **kwargs: Any) -> "Lowered":
        """The program for these arguments, lowered but not compiled.

        `jax.ShapeDtypeStruct`s may stand for arrays. `.compile()` returns what is
        called with arguments of the same signature.
        """
        call = Call(self.f, *_bind(self.f, args, kwargs), is_array)
        programs = programs_of(call.origin, self.donate)
        lowered = programs.lower(programs.key(call), *call.arrays())
        return Lowered(lowered, self.f, call.signature)

    def _check_donation(self, call: Call) -> None:
        if self.donate != "none" and call.lifted.roots:
            raise ValueError(
                f"`es.jit(donate={self.donate!r})` was called inside `es.mutable`, on"
                " modules that belong to it. Their old arrays are needed until the"
                " scope ends, and could not be given away. Donate at the top, around"
                " `es.mutable`: `es.jit(step, donate='all')(model, x)`."
            )


class _Stage:
    """A program at some stage; all that is not defined here is as in JAX."""

    def __init__(self, stage: Any, f: Any, signature: Any):
        self._stage, self._f, self._signature = stage, f, signature

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by `copy`, before there is a stage
            raise AttributeError(name)
        return getattr(self._stage, name)


class Lowered(_Stage):
    """A program that is lowered."""

    def compile(self, *args: Any, **kwargs: Any) -> "Compiled":
        """The compiled program. Arguments as for `jax.stages.Lowered.compile`."""
        compiled = self._stage.compile(*args, **kwargs)
        return Compiled(compiled, self._f, self._signature)


class Compiled(_Stage):
    """A compiled program."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The program's result, for arguments of the signature it was compiled for."""
        call = Call(self._f, *_bind(self._f, args, kwargs))
        if call.signature != self._signature:
            raise TypeError(
                "A program compiled by `es.jit(f).lower(...).compile()` was called with"
                " arguments of another structure, or with other static values. It"
                " serves only those it was made for; lower again, or call `es.jit(f)`,"
                " which compiles when it has to."
            )
        arrays = call.arrays()
        with Reporting():
            result = self._stage(*arrays)
            wait(result[2].callbacks, arrays, result)
        return call.finish(result)


_NO_FUNCTION: Final[Any] = object()  # `None` is a mistake


class Jitted(Protocol[_P, _R_co]):
    """To a type checker, what `jit` returns."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Jitted[_P, _R_co]": ...
    @overload
    def __get__(
        self: "Jitted[Concatenate[_S, _Q], _R_co]", instance: _S, owner: Any = None
    ) -> Callable[_Q, _R_co]: ...
    @overload  # of a `staticmethod`, whose first argument is not an instance
    def __get__(self, instance: Any, owner: Any = None) -> "Jitted[_P, _R_co]": ...

    def lower(self, *args: Any, **kwargs: Any) -> Lowered: ...


@overload
def jit(*, donate: Donate = "none") -> Callable[[Callable[_P, _R]], Jitted[_P, _R]]: ...
@overload
def jit(f: Callable[_P, _R], *, donate: Donate = "none") -> Jitted[_P, _R]: ...
def jit(f: Any = _NO_FUNCTION, *, donate: Donate = "none") -> Any:
    """`equinox.filter_jit`, through which the state of every module is carried.

    All arrays, JAX's and NumPy's, are traced; what is not an array is static. Unlike
    `eqx.filter_jit` it returns without waiting for the result, and tells static values
    apart by their type, too: `1`, `True` and `1.0` are compiled for one by one.
    Only a program that can raise is waited for: one with `eqx.error_if`,
    `jax.pure_callback` or `jax.experimental.io_callback` in it.

    **Arguments:**

    - `f`: a function, a module, a bound method, or a partial. The modules that it
        closes over, also by way of other functions and of containers, are traced like
        arguments. Anything else that it reaches (a global, an object that is not a
        pytree, a bare array in its closure) is read when it is traced. A function among
        the *arguments*, or in a field, is a static value: it is compared by identity,
        and what it closes over is a constant of the program. Only the modules of a
        scope are carried through, however they are reached.
    - `donate`: which arrays may be overwritten: `"all"`, `"all-except-first"` (not
        those of the first argument), `"none"`; `"warn"` and `"warn-except-first"` also
        warn of arrays of which JAX could make no use. Default: `"none"`.

    **Returns:**

    A function of the same arguments, which is a pytree, and can decorate methods. It
    has `.lower(*args, **kwargs)`.

    **Raises:**

    - `TypeError`: `f` cannot be called; a leaf that is not an array cannot be hashed.
    - `ValueError`: donation inside a scope of `es.mutable`; one stateful module in two
        places of an argument.
    - `es.TraceError`: a function or an object that holds a module of a scope is to be
        returned; the function put a module into what it closes over.
    - `eqx.EquinoxRuntimeError`: an `eqx.error_if` in it failed. It is raised by the
        call, before anything is written to a module; inside another `jax.jit` by
        whatever runs that. Errors of other callbacks come as JAX raises them.

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
    if not isinstance(donate, str) or donate not in DONATED:
        raise ValueError(
            f"`es.jit(donate={donate!r})`: `donate` is one of"
            f" {', '.join(map(repr, DONATED))}."
        )
    if f is _NO_FUNCTION:
        return ft.partial(jit, donate=donate)
    return wrap(_Jit, f, donate=donate)
