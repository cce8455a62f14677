"""`es.jacfwd`, `es.jacrev` and `es.hessian`, for functions with state."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._typing import P
from .primal import Primal
from .target import as_argnums, positions
from .transform import Transform, wrap


class _Jacobian(Transform):
    """`es.jacfwd` or `es.jacrev`.

    JAX maps only the tangents over a basis, not the primal computation. The call
    therefore writes state and draws from keys once, whatever the size of the basis.
    """

    of_jax: Any = eqx.field(static=True)
    argnums: Any = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    holomorphic: bool = eqx.field(static=True)
    allow_int: bool = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        primal, name = Primal(self.f, args, kwargs, self.has_aux), _name(self.of_jax)
        named = positions(args, self.argnums, f"{name}(argnums={self.argnums})")
        empty = [i for i in named if not jtu.tree_leaves(primal.arrays[i])]
        # JAX needs at least one array to differentiate, even with `allow_int`.
        if empty and not (self.allow_int and len(empty) < len(named)):
            raise TypeError(_NO_ARRAYS.format(name, empty[0]))
        # `jax.jacfwd` does not have the option.
        options = {"allow_int": True} if self.allow_int else {}
        jacobian, rest = self.of_jax(
            primal.run, self.argnums, True, self.holomorphic, **options
        )(*primal.arrays)
        _, *aux = primal.finish(None, rest)
        return (jacobian, *aux) if self.has_aux else jacobian


_NO_ARRAYS: Final = """`{}`: argument {} has no inexact arrays. Convert it, \
`x.astype(jnp.float32)`, or name other arguments by `argnums=`."""


def jacfwd(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[P, Any]:
    """`jax.jacfwd` that also updates the state of modules.

    Forward-mode differentiation computes the Jacobian column by column. State is
    updated once, however many columns there are.

    **Arguments:**

    - `fun`: a function, a module, a bound method, or a partial. Its output is
        differentiated; with `has_aux`, only the first of its two outputs.
    - `argnums`: the positional arguments to differentiate with respect to: an integer,
        or a sequence of them. Every inexact array in them counts, including those of
        modules. `self` of a decorated method is not counted as an argument.
    - `has_aux`: whether `fun` returns `(out, aux)`.
    - `holomorphic`: as for `jax.jacfwd`.

    **Returns:**

    A function of the same arguments that returns the Jacobian, or `(jacobian, aux)`.
    The Jacobian is a tree like the output. Each array `out` in it becomes a tree like
    the argument, in which an array of shape `(*out.shape, *x.shape)` replaces `x`, and
    `None` replaces leaves that are not inexact arrays. With a sequence of `argnums`,
    that tree is a tuple. The function is a pytree, and can decorate methods.

    **Raises:**

    - `ValueError`: `argnums` names an argument twice; otherwise as
        [`es.vjp`][eqx_state.vjp].
    - `TypeError`: an argument is missing, has no inexact arrays, or has complex arrays
        without `holomorphic`; with `has_aux=True`, `fun` did not return a pair.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Square(es.Module):
            scale: es.Parameter
            calls: es.State = 0

            def __call__(self, x):
                self.calls = self.calls + 1
                return self.scale * x**2


        x = jnp.array([1.0, 2.0, 3.0])
        jacobian, square = es.mutable(es.jacfwd(Square(0.5)))(x)
        assert jacobian.tolist() == [[1, 0, 0], [0, 2, 0], [0, 0, 3]]
        assert square.calls == 1
        ```
    """
    return _jacobian(jax.jacfwd, fun, argnums, has_aux, holomorphic)


def jacrev(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]:
    """`jax.jacrev` that also updates the state of modules.

    Reverse-mode differentiation computes the Jacobian row by row. State is updated
    once, however many rows there are.

    **Arguments:**

    - `fun`, `argnums`, `has_aux`, `holomorphic`: as for
        [`es.jacfwd`][eqx_state.jacfwd].
    - `allow_int`: whether an argument may have no inexact arrays. Its Jacobian is then
        `None`. At least one of the arguments must have inexact arrays.

    **Returns:**

    A function of the same arguments, with the same result as that of `es.jacfwd`.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp

        model = {"w": jnp.array([1.0, 2.0]), "step": 3}
        jacobian = es.jacrev(lambda model: jnp.sum(model["w"]) ** 2)(model)
        assert jacobian["w"].tolist() == [6.0, 6.0] and jacobian["step"] is None
        ```
    """
    return _jacobian(jax.jacrev, fun, argnums, has_aux, holomorphic, allow_int)


def hessian(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[P, Any]:
    """`jax.hessian` that also updates the state of modules.

    As in JAX, it is `es.jacfwd` of `es.jacrev`. State is updated once.

    **Arguments:**

    - `fun`, `argnums`, `has_aux`, `holomorphic`: as for
        [`es.jacfwd`][eqx_state.jacfwd].

    **Returns:**

    A function of the same arguments. It returns the Hessian, which is the Jacobian of
    the Jacobian, or `(hessian, aux)`.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp

        hessian = es.hessian(lambda x: x[0] ** 2 * x[1])(jnp.array([1.0, 2.0]))
        assert hessian.tolist() == [[4.0, 2.0], [2.0, 0.0]]
        ```
    """
    inner = jacrev(fun, argnums, has_aux, holomorphic)
    return jacfwd(inner, argnums, has_aux, holomorphic)


def _name(of_jax: Any) -> str:
    return f"es.{of_jax.__name__}"


def _jacobian(
    of_jax: Any,
    fun: Any,
    argnums: Any,
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool = False,
) -> Any:
    return wrap(
        _Jacobian,
        fun,
        of_jax=of_jax,
        argnums=as_argnums(argnums, _name(of_jax)),
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
    )
