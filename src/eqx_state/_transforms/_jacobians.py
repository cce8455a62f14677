"""`es.jacfwd`, `es.jacrev`, `es.hessian`: Jacobians of stateful functions.

The primal computation is one pure function, so JAX's own Jacobians do the work. They
map the tangents over a basis, and not the primal computation: state is written, and
keys are drawn from, once, and not once per vector of the basis.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, ParamSpec

import equinox as eqx
import jax
import jax.tree_util as jtu

from ._mutable import as_argnums
from ._primal import Primal
from ._transform import Transform, wrap


_P = ParamSpec("_P")


class AbstractJacobian(Transform):
    """The common part of `es.jacfwd` and `es.jacrev`."""

    argnums: Any = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    holomorphic: bool = eqx.field(static=True)
    allow_int: bool = eqx.field(static=True)
    name: ClassVar[str]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        is_one = isinstance(self.argnums, int)
        positions = self._positions((self.argnums,) if is_one else self.argnums, args)
        primal = Primal(self.f, args, kwargs, positions, self.has_aux)
        for i, diff in zip(positions, primal.diff, strict=True):
            if not (jtu.tree_leaves(diff) or self.allow_int):
                raise TypeError(_NOT_INEXACT.format(self.name, i))
        if jtu.tree_leaves(primal.diff):
            jacobian, rest = self.of_jax(
                primal.run,
                argnums=0 if is_one else range(len(positions)),
                has_aux=True,
                holomorphic=self.holomorphic,
            )(*primal.diff)
        else:  # JAX cannot transpose a tree without leaves
            out, rest = primal.run(*primal.diff)
            holes = primal.diff[0] if is_one else primal.diff
            jacobian = jtu.tree_map(lambda _: holes, out)
        _, *aux = primal.finish(rest)
        return (jacobian, *aux) if self.has_aux else jacobian

    def _positions(self, argnums: tuple[int, ...], args: tuple[Any, ...]) -> list[int]:
        """The positions of the chosen arguments, counted from the start."""
        for i in argnums:
            if not -len(args) <= i < len(args):
                raise ValueError(_NO_ARGUMENT.format(self.name, i, len(args)))
        positions = [i % len(args) for i in argnums]
        for i in positions:
            if positions.count(i) > 1:
                raise ValueError(_TWICE.format(self.name, argnums, i))
        return positions

    @abc.abstractmethod
    def of_jax(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """JAX's Jacobian of a pure function."""


class _Jacfwd(AbstractJacobian):
    name = "es.jacfwd"

    def of_jax(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return jax.jacfwd(fun, **options)


class _Jacrev(AbstractJacobian):
    name = "es.jacrev"

    def of_jax(self, fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return jax.jacrev(fun, **options, allow_int=self.allow_int)


_NOT_INEXACT: Final = """`{0}`: argument {1} has no inexact arrays, so there is \
nothing to differentiate with respect to. Convert it, `x.astype(jnp.float32)`, or name \
other arguments by `argnums=`."""

_NO_ARGUMENT: Final = """`{0}(argnums={1})`: the function was called with {2} \
positional arguments, so there is no argument {1}. Arguments are counted from 0. The \
`self` of a decorated method and arguments given by name are not among them."""

_TWICE: Final = """`{0}(argnums={1})` names argument {2} twice. Name each argument \
once."""


def jacfwd(
    fun: Callable[_P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[_P, Any]:
    """`jax.jacfwd` that carries the state of every module in reach.

    The Jacobian is computed column by column, by forward-mode differentiation. State is
    threaded once, however many columns there are.

    **Arguments:**

    - `fun`: a function, a module, a bound method, or a partial. Its output, or with
        `has_aux` the first of two, is differentiated.
    - `argnums`: the positional arguments to differentiate with respect to, that is, all
        inexact arrays in them, those of modules included. An integer, or a sequence of
        them. `self` of a decorated method does not count.
    - `has_aux`: whether `fun` returns `(out, aux)`.
    - `holomorphic`: as for `jax.jacfwd`.

    **Returns:**

    A function of the same arguments. It returns the Jacobian, or `(jacobian, aux)`: a
    tree like the output, with a tree like the argument in place of each array, in which
    an array of shape `(*out.shape, *x.shape)` takes the place of `x`. `None` for what
    is not an inexact array. With a sequence of `argnums` it is a tuple of such trees.
    It is a pytree, and can decorate methods.

    **Raises:**

    - `ValueError`: there is no such argument, or it is named twice; else as
        [`es.vjp`][eqx_state.vjp].
    - `TypeError`: an argument has no inexact arrays, or complex ones without
        `holomorphic`; with `has_aux=True`, `fun` did not return a pair.

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
    return _wrap(_Jacfwd, fun, argnums, has_aux, holomorphic)


def jacrev(
    fun: Callable[_P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[_P, Any]:
    """`jax.jacrev` that carries the state of every module in reach.

    The Jacobian is computed row by row, by reverse-mode differentiation. State is
    threaded once, however many rows there are.

    **Arguments:**

    - `fun`, `argnums`, `has_aux`, `holomorphic`: as for
        [`es.jacfwd`][eqx_state.jacfwd].
    - `allow_int`: whether an argument may have no inexact arrays; there is `None` in
        place of its Jacobian.

    **Returns:**

    A function of the same arguments, which returns what that of `es.jacfwd` returns.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp

        model = {"w": jnp.array([1.0, 2.0]), "step": 3}
        jacobian = es.jacrev(lambda model: jnp.sum(model["w"]) ** 2)(model)
        assert jacobian["w"].tolist() == [6.0, 6.0] and jacobian["step"] is None
        ```
    """
    return _wrap(_Jacrev, fun, argnums, has_aux, holomorphic, allow_int)


def hessian(
    fun: Callable[_P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[_P, Any]:
    """`jax.hessian` that carries the state of every module in reach.

    As in JAX, it is `es.jacfwd` of `es.jacrev`. State is threaded once.

    **Arguments:**

    - `fun`, `argnums`, `has_aux`, `holomorphic`: as for
        [`es.jacfwd`][eqx_state.jacfwd].

    **Returns:**

    A function of the same arguments. It returns the Hessian, or `(hessian, aux)`: the
    Jacobian of the Jacobian.

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


def _wrap(
    cls: type[AbstractJacobian],
    fun: Any,
    argnums: Any,
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool = False,
) -> Any:
    return wrap(
        cls,
        fun,
        argnums=as_argnums(argnums, cls.name),
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
    )
