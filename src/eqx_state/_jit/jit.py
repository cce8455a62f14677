"""`es.jit`: `jax.jit` of what is not made of arrays alone, and of what writes state."""

import functools as ft
from collections.abc import Callable
from typing import Any, Concatenate, Final, overload, ParamSpec, Protocol, TypeVar

import equinox as eqx

from .._compat import hide_frames, PROGRAM_ERRORS
from .._transforms.transform import Transform, Unbound, wrap
from .._tree.walk import is_array
from .call import bind, cache_key_of, Call
from .options import checked, Donate, Options
from .programs import programs_of, raise_failed_check, unlogged, wait


_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")
_S = TypeVar("_S", bound=eqx.Module)
_R_co = TypeVar("_R_co", covariant=True)


class _Jit(Transform):
    options: Options = eqx.field(static=True)
    hides_frames = True  # a wrapper would make each call slower

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            programs = programs_of(self.f, self.options)
            return programs(self.f, *bind(self.f, args, kwargs))
        except Exception as error:
            hide_frames(error)
            raise

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # The object is the first argument, as `donate` understands it.
        if instance is None:
            return self
        is_stacked = isinstance(self.f, Transform)
        jit = self.of(Unbound.made(f=self.f)) if is_stacked else self
        return eqx.Partial(jit, instance)

    def lower(self, /, *args: Any, **kwargs: Any) -> "Lowered":
        """The program for these arguments, lowered but not compiled.

        `jax.ShapeDtypeStruct`s may stand for arrays. `.compile()` returns what is
        called with arguments of the same signature.
        """
        call = Call(self.f, *bind(self.f, args, kwargs), is_array)
        lowered = programs_of(self.f, self.options).of(call).lower(call)
        return Lowered(lowered, self.f, cache_key_of(call))


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
        call = Call(self._f, *bind(self._f, args, kwargs))
        if cache_key_of(call) != self._signature:
            raise TypeError(
                "A program compiled by `es.jit(f).lower(...).compile()` was called with"
                " arguments of another structure, or with other static values. Lower"
                " again, or call `es.jit(f)`, which compiles when it has to."
            )
        arrays = call.arrays()
        try:
            with unlogged():
                result = self._stage(*arrays)
                if result.output.callbacks:
                    wait(result.output.callbacks, arrays, result)
        except PROGRAM_ERRORS as error:
            raise_failed_check(error)
            raise
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
def jit(
    *, donate: Donate = "none", **jit_kwargs: Any
) -> Callable[[Callable[_P, _R]], Jitted[_P, _R]]: ...
@overload
def jit(
    f: Callable[_P, _R], *, donate: Donate = "none", **jit_kwargs: Any
) -> Jitted[_P, _R]: ...
def jit(f: Any = _NO_FUNCTION, *, donate: Donate = "none", **jit_kwargs: Any) -> Any:
    """`equinox.filter_jit`, through which the state of every module is carried.

    All arrays, JAX's and NumPy's, are traced; what is not an array is static. Unlike
    `eqx.filter_jit` it returns without waiting for the result, and tells static values
    apart by their type, too: `1`, `True` and `1.0` are compiled for one by one.
    Only a program that can raise is waited for: one with `eqx.error_if`,
    `jax.pure_callback` or `jax.experimental.io_callback` in it.

    **Arguments:**

    - `f`: a function, a module, a bound method, or a partial. Arrays are traced if they
        are in `f` itself: in a module, in the object of a bound method, in an
        `eqx.Partial`. What a function closes over is a constant of the program, as with
        `eqx.filter_jit`, except for the modules of a scope, which are carried through:
        pass a model as an argument. A function among the arguments, or in a field, is a
        static value, which is compared by identity.
    - `donate`: which arrays may be overwritten: `"all"`, `"all-except-first"` (not
        those of the first argument), `"none"`; `"warn"` and `"warn-except-first"` also
        warn of arrays of which JAX could make no use. Default: `"none"`.
    - `jit_kwargs`: options of `jax.jit`, passed on to it: `compiler_options`, `inline`,
        `keep_unused`, `backend`, `device`.

    **Returns:**

    A function of the same arguments, which is a pytree, and can decorate methods. It
    has `.lower(*args, **kwargs)`.

    **Raises:**

    - `TypeError`: `f` cannot be called; a leaf that is not an array cannot be hashed;
        an option of `jax.jit` that counts or names arguments, such as `static_argnums`.
    - `ValueError`: donation inside a scope of `es.mutable`; one stateful module in two
        places of an argument.
    - `es.TraceError`: a function that closes over a module of a scope is returned.
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
    options = checked(donate, jit_kwargs)
    if f is _NO_FUNCTION:
        return ft.partial(jit, donate=donate, **jit_kwargs)
    return wrap(_Jit, f, options=options)
