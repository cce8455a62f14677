"""`es.jit`: `jax.jit` for any pytrees, and for functions that write state."""

import functools as ft
from collections.abc import Callable
from typing import Any, Concatenate, Final, overload, ParamSpec, Protocol, TypeVar

import equinox as eqx

from .._compat import hide_frames
from .._transforms.transform import Bound, Transform, unbound, wrap
from .._tree.walk import is_array
from .._typing import P, R
from .call import bind, cache_key_of, JitCall
from .options import Donate, Options
from .programs import programs_of


_Q = ParamSpec("_Q")
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
        # Make the object the first argument, for `donate="all-except-first"`.
        if instance is None:
            return self
        return Bound(self.of(unbound(self.f)), instance)

    def lower(self, /, *args: Any, **kwargs: Any) -> "Lowered":
        """The program for these arguments, lowered but not compiled.

        Arrays may be `jax.ShapeDtypeStruct`s. `.compile()` returns a function for
        arguments of the same structure and static values.
        """
        call = JitCall(self.f, *bind(self.f, args, kwargs), is_array)
        program = programs_of(self.f, self.options).of(call)
        return Lowered(program.lower(call), self.f, program)

    def clear_cache(self) -> None:
        """Drop the compiled programs: the next call traces and compiles anew."""
        programs_of(self.f, self.options).clear()


class _Stage:
    """A lowered or compiled program, with all attributes of JAX's own object for it."""

    def __init__(self, stage: Any, f: Any, program: Any):
        self._stage, self._f, self._program = stage, f, program

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `copy` looks up names before there is a stage
            raise AttributeError(name)
        return getattr(self._stage, name)


class Lowered(_Stage):
    """A lowered program."""

    def compile(self, *args: Any, **kwargs: Any) -> "Compiled":
        """The compiled program. Arguments as for `jax.stages.Lowered.compile`."""
        compiled = self._stage.compile(*args, **kwargs)
        return Compiled(compiled, self._f, self._program.of_stage(compiled))


class Compiled(_Stage):
    """A compiled program."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The result for arguments of the structure and static values of `lower`."""
        call = JitCall(self._f, *bind(self._f, args, kwargs))
        if cache_key_of(call) != self._program.key:
            raise TypeError(
                "A program compiled by `es.jit(f).lower(...).compile()` was called with"
                " a different structure or different static values. Lower again, or"
                " call `es.jit(f)`, which recompiles if necessary."
            )
        return call.finish(self._program(call.arrays(), lambda: call))


_NO_FUNCTION: Final[Any] = object()  # `jit(None)` is an error


class Jitted(Protocol[P, _R_co]):
    """The result of `jit` for type checkers."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> _R_co: ...

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Jitted[P, _R_co]": ...
    @overload
    def __get__(
        self: "Jitted[Concatenate[_S, _Q], _R_co]", instance: _S, owner: Any = None
    ) -> Callable[_Q, _R_co]: ...
    @overload  # a `staticmethod`, whose first argument is not an instance
    def __get__(self, instance: Any, owner: Any = None) -> "Jitted[P, _R_co]": ...

    def lower(self, *args: Any, **kwargs: Any) -> Lowered: ...

    def clear_cache(self) -> None: ...


@overload
def jit(
    *, donate: Donate = "none", **jit_kwargs: Any
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
@overload
def jit(
    f: Callable[P, R], *, donate: Donate = "none", **jit_kwargs: Any
) -> Jitted[P, R]: ...
def jit(f: Any = _NO_FUNCTION, *, donate: Donate = "none", **jit_kwargs: Any) -> Any:
    """`equinox.filter_jit` for functions that may write the state of modules.

    All arrays, JAX's and NumPy's, are traced; all other leaves are static.

    Calls return before the result is ready, unlike those of `eqx.filter_jit`. The
    exception is a program that contains `eqx.error_if`, `jax.pure_callback` or
    `jax.experimental.io_callback`: the call waits for it, so that it can raise its
    errors. Static values are compared by type, too: `1`, `True` and `1.0` are compiled
    separately.

    Each `es.Module`, `es.Optimizer` and `es.Ema` in a result is built when it is first
    read. In a training loop, nothing reads the model between two calls, so a call costs
    about as much as one of `jax.jit` with a flat list of the arrays.

    **Arguments:**

    - `f`: a function, a module, a bound method, or a partial. Arrays in `f` itself are
        traced: in a module, in the object of a bound method, in an `eqx.Partial`.
        Arrays that a function closes over are constants of the program, as with
        `eqx.filter_jit`, so pass a model as an argument. Exceptions are modules that
        `es.mutable` makes writable: their arrays are traced in closures, too. Functions
        among the arguments or in fields are static, and compared by identity.
    - `donate`: the arrays that JAX may overwrite: `"all"`, `"all-except-first"` (not
        those of the first argument), `"none"`; `"warn"` and `"warn-except-first"` also
        warn about donated arrays that JAX could not use. Default: `"none"`.
    - `jit_kwargs`: options for `jax.jit`: `compiler_options`, `inline`, `keep_unused`,
        `backend`, `device`.

    **Returns:**

    A function of the same arguments. It is a pytree, and can decorate methods. As those
    of `jax.jit`, it has the methods `.lower(*args, **kwargs)`, and `.clear_cache()`,
    which drops the compiled programs.

    **Raises:**

    - `TypeError`: `f` cannot be called; a leaf that is not an array cannot be hashed;
        an option of `jax.jit` that counts or names arguments, such as `static_argnums`.
    - `ValueError`: `donate` is an unknown word; donation inside `es.mutable`; a trace
        finds one stateful module twice in an argument.
    - `es.TraceError`: `f` returns a function that closes over a module of a scope.
    - `eqx.EquinoxRuntimeError`: an `eqx.error_if` failed. The call raises it before
        anything is written to a module; inside an outer `jax.jit`, the outer call
        raises it. JAX raises the errors of other callbacks.

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
    options = Options(donate, **jit_kwargs)
    if f is _NO_FUNCTION:
        return ft.partial(jit, donate=donate, **jit_kwargs)
    return wrap(_Jit, f, options=options)
