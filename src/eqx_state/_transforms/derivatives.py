"""`es.vjp`, `es.jvp` and `es.linearize`, for functions with state.

Each one gives JAX a `Primal`: a pure function of the inexact arrays of the arguments.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, overload, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import boundary
from .._state.codecs import snapshot
from .._tree.compare import difference, same_modes
from .._typing import R
from .primal import Primal, which_inexact


# --- Tangents and cotangents ----------------------------------------------------------


def _without_zeros(tree: Any) -> Any:
    """A copy of `tree` that no scope owns, with `None` for zeros of dtype float0."""
    return jtu.tree_map(
        lambda x: None if getattr(x, "dtype", None) == jax.dtypes.float0 else x,
        snapshot(tree),
    )


def _abstract(arrays: Any) -> tuple[Any, ...]:
    """The structure of `arrays`, and their shapes and dtypes. Hashable."""
    types = [jax.typeof(x) for x in jtu.tree_leaves(arrays)]
    abstract = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types)
    return jtu.tree_structure(arrays), abstract


def _tangents(given: Any, inputs: tuple[Any, ...], what: str) -> Any:
    """`given` as tangents of `inputs`, with zeros for `None`. Modes may differ.

    JAX checks shapes and dtypes. Check the structure here: for two models JAX would
    print both in full, instead of the one field that differs.
    """
    structure, arrays = inputs
    given = same_modes(_without_zeros(given))
    like = same_modes(structure.unflatten(arrays))
    with contextlib.suppress(ValueError):  # the message below says where they differ
        given = eqx.combine(given, like)
    if jtu.tree_structure(given) != jtu.tree_structure(like):
        raise TypeError(_STRUCTURE.format(what, difference(like, given)))
    return structure.unflatten(
        jnp.zeros_like(x) if isinstance(x, jax.ShapeDtypeStruct) else x
        for x in jtu.tree_leaves(given)
    )


_STRUCTURE: Final = """The tangents for `{}` and the arguments of its function differ \
in structure, {}. Pass an array, or `None` for zeros, for each inexact array of the \
arguments, and `None` or zeros of dtype `float0` for everything else."""


class Pullback(eqx.Module):
    """The function that `es.vjp` returns: from cotangents of the output to those of
    the arguments."""

    vjp: Any

    @boundary
    def __call__(self, cotangents: Any) -> tuple[Any, ...]:
        return self.vjp(_without_zeros(cotangents))


class Pushforward(eqx.Module):
    """The function that `es.linearize` returns: from tangents of the arguments to
    those of the output."""

    jvp: Any
    inputs: tuple[Any, ...] = eqx.field(static=True)

    @boundary
    def __call__(self, *tangents: Any) -> Any:
        return self.jvp(*_tangents(tangents, self.inputs, "es.linearize"))


_A = TypeVar("_A")
_Linear = Callable[..., Any]


@overload
def vjp(
    fun: Callable[..., R], *primals: Any, has_aux: Literal[False] = False
) -> tuple[R, _Linear]: ...
@overload
def vjp(
    fun: Callable[..., tuple[R, _A]], *primals: Any, has_aux: Literal[True]
) -> tuple[R, _Linear, _A]: ...
@boundary
def vjp(fun: Any, *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """`jax.vjp` that also updates the state of modules.

    The call of `fun` updates state, once. Calls of `vjp_fn` do not change it. Inside
    `es.mutable`, the modules have their new state when `es.vjp` returns.

    **Arguments:**

    - `fun`: a function, a module, a bound method, or a partial.
    - `*primals`: its arguments, any pytrees. `fun` is differentiated with respect to
        all inexact arrays in them, including the parameters and the state of modules.
        Closed-over arrays are constants, even those of a module that is also an
        argument.
    - `has_aux`: whether `fun` returns `(out, aux)`. Only `out` is differentiated.

    **Returns:**

    `(out, vjp_fn)`, or `(out, vjp_fn, aux)`. `vjp_fn` takes the cotangents of `out` and
    returns a tuple with those of each argument: a tree like the argument, with `None`
    for every leaf that is not an inexact array. If `out` has such leaves, their
    cotangents are `None` or zeros of dtype `float0`. `vjp_fn` is a pytree, so `es.jit`
    can return it.

    **Raises:**

    - `TypeError`: with `has_aux=True`, `fun` did not return a pair.
    - `ValueError`: the cotangents do not fit `out`; or a state of an argument was also
        written through the closure.

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
    # Differentiate inexact outputs only: for an integer output JAX would require
    # cotangents of dtype float0, but we accept `None`, too.
    primal = Primal(fun, primals, {}, has_aux, which_inexact)
    out, pullback, rest = jax.vjp(primal.run, *primal.arrays, has_aux=True)
    out, *aux = primal.finish(out, rest)
    return out, Pullback(pullback), *aux


@overload
def jvp(
    fun: Callable[..., R],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: Literal[False] = False,
) -> tuple[R, Any]: ...
@overload
def jvp(
    fun: Callable[..., tuple[R, _A]],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    has_aux: Literal[True],
) -> tuple[R, Any, _A]: ...
@boundary
def jvp(
    fun: Any, primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False
) -> tuple[Any, ...]:
    """`jax.jvp` that also updates the state of modules.

    The primal computation updates state, once. The tangents of written state are
    dropped.

    **Arguments:**

    - `fun`: a function, a module, a bound method, or a partial.
    - `primals`: its arguments, a tuple or a list.
    - `tangents`: one tree for each argument, of its structure, with an array of the
        same shape and dtype for each inexact array. `None` means zeros, for an array or
        for a whole argument, so the gradients of `es.grad` are valid tangents. All
        other leaves are `None` or zeros of dtype `float0`.
    - `has_aux`: whether `fun` returns `(out, aux)`. Only `out` is differentiated.

    **Returns:**

    `(out, tangents_out)`, or `(out, tangents_out, aux)`. `tangents_out` is a tree like
    `out`, with zeros of dtype `float0` for arrays that are not inexact, and `None` for
    leaves that are not arrays.

    **Raises:**

    - `TypeError`: `primals` or `tangents` is not a tuple or a list; they differ in
        structure or dtype.
    - `ValueError`: they differ in shape.
    - Otherwise as [`es.vjp`][eqx_state.vjp].

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
    primal = Primal(fun, primals, {}, has_aux)
    tangents = _tangents(tuple(tangents), _abstract(primal.arrays), "es.jvp")
    out, moved, rest = jax.jvp(primal.run, primal.arrays, tangents, has_aux=True)
    out, *aux = primal.finish(out, rest)
    return out, moved, *aux


@overload
def linearize(
    fun: Callable[..., R], *primals: Any, has_aux: Literal[False] = False
) -> tuple[R, _Linear]: ...
@overload
def linearize(
    fun: Callable[..., tuple[R, _A]], *primals: Any, has_aux: Literal[True]
) -> tuple[R, _Linear, _A]: ...
@boundary
def linearize(fun: Any, *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """`jax.linearize` that also updates the state of modules.

    The call of `fun` updates state, once. Calls of `jvp_fn` do not change it.

    **Arguments:**

    - `fun`, `*primals`, `has_aux`: as for [`es.vjp`][eqx_state.vjp].

    **Returns:**

    `(out, jvp_fn)`, or `(out, jvp_fn, aux)`. `jvp_fn` takes a tangent for each argument
    and returns those of `out`, both as for [`es.jvp`][eqx_state.jvp]. `jvp_fn` is a
    pytree, so `es.jit` can return it.

    **Raises:**

    - `TypeError`: the tangents have the wrong structure.
    - `ValueError`: they have the wrong shape or dtype.
    - Otherwise as [`es.vjp`][eqx_state.vjp].

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp

        y, jvp_fn = es.linearize(jnp.sin, 1.0)
        assert jnp.allclose(jvp_fn(2.0), 2.0 * jnp.cos(1.0))
        ```
    """
    primal = Primal(fun, primals, {}, has_aux)
    out, pushforward, rest = jax.linearize(primal.run, *primal.arrays, has_aux=True)
    out, *aux = primal.finish(out, rest)
    return out, Pushforward(pushforward, _abstract(primal.arrays)), *aux


_NOT_A_TUPLE: Final = """`es.jvp(f, primals, tangents)`: `primals` and `tangents` must \
be tuples or lists with an entry for each argument of `f`, but one is of type `{}`. \
Write `es.jvp(f, (x,), (dx,))`."""
