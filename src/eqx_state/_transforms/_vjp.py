"""`es.vjp`, `es.jvp`, `es.linearize`: their namesakes in JAX, which carry state."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, overload, TypeVar

import equinox as eqx
import jax

from .._compat import boundary
from ._primal import Primal
from ._tangents import Mold, Pullback, Pushforward


_R = TypeVar("_R")
_A = TypeVar("_A")
_Linear = Callable[..., Any]


@overload
def vjp(
    fun: Callable[..., _R], *primals: Any, has_aux: Literal[False] = False
) -> tuple[_R, _Linear]: ...
@overload
def vjp(
    fun: Callable[..., tuple[_R, _A]], *primals: Any, has_aux: Literal[True]
) -> tuple[_R, _Linear, _A]: ...
@boundary
def vjp(fun: Any, *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """`jax.vjp` that carries the state of every module in reach.

    State is threaded by the call of `fun`, once; the function that comes back does not
    touch it. In a scope the modules have their new state when `es.vjp` returns.

    **Arguments:**

    - `fun`: a function, a module, a bound method, or a partial.
    - `*primals`: its arguments, any pytrees. They are differentiated with respect to
        all inexact arrays, those of modules among them, state included. What `fun`
        closes over is constant, also a module that is an argument as well.
    - `has_aux`: whether `fun` returns `(out, aux)`, of which only `out` is
        differentiated.

    **Returns:**

    `(out, vjp_fn)`, or `(out, vjp_fn, aux)`. `vjp_fn` takes the cotangents of `out` and
    returns a tuple with those of each argument: a tree like the argument, with `None`
    in place of all that is not an inexact array. For such leaves of `out` it takes
    `None` or zeros of dtype `float0`. It is a pytree, and passes through `es.jit`.

    **Raises:**

    - `TypeError`: with `has_aux=True`, `fun` did not return a pair.
    - `ValueError`: cotangents do not fit `out`; a state of an argument was written, and
        was also read or written through the closure.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Sine(es.Module):
            weight: es.Parameter
            calls: es.State = 0

            def __call__(self, x):
                self.calls = self.calls + 1
                return jnp.sin(self.weight * x)


        def value_and_slopes(sine, x):
            y, vjp_fn = es.vjp(lambda sine, x: sine(x), sine, x)
            return y, vjp_fn(1.0)


        (y, (by_sine, by_x)), sine = es.mutable(value_and_slopes)(Sine(2.0), 0.5)
        assert jnp.allclose(by_sine.weight, 0.5 * jnp.cos(1.0))
        assert jnp.allclose(by_x, 2.0 * jnp.cos(1.0))
        assert by_sine.calls is None and sine.calls == 1
        ```
    """
    primal = Primal(fun, primals, {}, range(len(primals)), has_aux)
    out, pullback, rest = jax.vjp(primal.run, *primal.diff, has_aux=True)
    static, *aux = primal.finish(rest)
    out = eqx.combine(out, static)
    mold = Mold(out, _FOR_VJP, errors=(ValueError, ValueError), fills=True)
    return out, Pullback(pullback, mold), *aux


@overload
def jvp(
    fun: Callable[..., _R],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: Literal[False] = False,
) -> tuple[_R, Any]: ...
@overload
def jvp(
    fun: Callable[..., tuple[_R, _A]],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: Literal[True],
) -> tuple[_R, Any, _A]: ...
@boundary
def jvp(
    fun: Any, primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> tuple[Any, ...]:
    """`jax.jvp` that carries the state of every module in reach.

    State is threaded by the primal computation, once, and has no tangents: a tangent of
    what `fun` writes is dropped.

    **Arguments:**

    - `fun`: a function, a module, a bound method, or a partial.
    - `primals`: its arguments, a tuple or a list.
    - `tangents`: as many trees like them, with an array of the same shape and dtype for
        each inexact array, those of modules among them, and `None` or zeros of dtype
        `float0` for everything else.
    - `has_aux`: whether `fun` returns `(out, aux)`, of which only `out` is
        differentiated.

    **Returns:**

    `(out, tangents_out)`, or `(out, tangents_out, aux)`. `tangents_out` is a tree like
    `out`, with zeros of dtype `float0` for arrays that are not inexact, and `None` for
    what is not an array.

    **Raises:**

    - `TypeError`: `primals` or `tangents` is not a tuple or a list; they differ in
        structure or dtype. `ValueError`: in shape. Else as [`es.vjp`][eqx_state.vjp].

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Mean(es.Module):
            mean: es.BatchStat = 0.0

            def __call__(self, x):
                self.mean = 0.5 * self.mean + 0.5 * x
                return x**2


        def slope(model, x):
            return es.jvp(model, (x,), (1.0,))


        (y, dy), model = es.mutable(slope)(Mean(), 3.0)
        assert (y, dy, model.mean) == (9.0, 6.0, 1.5)
        ```
    """
    for given in (primals, tangents):
        if not isinstance(given, (tuple, list)):
            raise TypeError(_NOT_A_TUPLE.format(type(given).__name__))
    primal = Primal(fun, primals, {}, range(len(primals)), has_aux)
    mold = Mold(primal.given, _OF_JVP, errors=(TypeError, TypeError))
    new = mold.fit(tuple(tangents))
    out, moved, rest = jax.jvp(primal.run, primal.diff, new, has_aux=True)
    static, *aux = primal.finish(rest)
    return eqx.combine(out, static), moved, *aux


@overload
def linearize(
    fun: Callable[..., _R], *primals: Any, has_aux: Literal[False] = False
) -> tuple[_R, _Linear]: ...
@overload
def linearize(
    fun: Callable[..., tuple[_R, _A]], *primals: Any, has_aux: Literal[True]
) -> tuple[_R, _Linear, _A]: ...
@boundary
def linearize(fun: Any, *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """`jax.linearize` that carries the state of every module in reach.

    State is threaded by the call of `fun`, once, however often the linear function is
    called.

    **Arguments:**

    - `fun`, `*primals`, `has_aux`: as for [`es.vjp`][eqx_state.vjp].

    **Returns:**

    `(out, jvp_fn)`, or `(out, jvp_fn, aux)`. `jvp_fn` takes a tangent for each argument
    and returns those of `out`, both as for [`es.jvp`][eqx_state.jvp]. It is a pytree,
    and passes through `es.jit`.

    **Raises:**

    - `TypeError`: tangents of another structure. `ValueError`: of another shape or
        dtype. Else as [`es.vjp`][eqx_state.vjp].

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp

        y, jvp_fn = es.linearize(jnp.sin, 1.0)
        assert jnp.allclose(jvp_fn(2.0), 2.0 * jnp.cos(1.0))
        ```
    """
    primal = Primal(fun, primals, {}, range(len(primals)), has_aux)
    out, pushforward, rest = jax.linearize(primal.run, *primal.diff, has_aux=True)
    static, *aux = primal.finish(rest)
    mold = Mold(primal.given, _FOR_LINEARIZE, errors=(TypeError, ValueError))
    return eqx.combine(out, static), Pushforward(pushforward, mold), *aux


_FOR_VJP: Final = "The tree of cotangents for what `es.vjp` returned"
_FOR_LINEARIZE: Final = "The tree of tangents for what `es.linearize` returned"
_OF_JVP: Final = "The tree of tangents of `es.jvp`"

_NOT_A_TUPLE: Final = """`es.jvp(f, primals, tangents)`: `primals` and `tangents` are \
tuples or lists, with an entry for each argument of `f`, and one of them is a `{}`: \
`es.jvp(f, (x,), (dx,))`."""
