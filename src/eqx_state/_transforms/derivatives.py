"""`es.vjp`, `es.jvp`, `es.linearize` and the Jacobians: those of JAX, with state.

They hand JAX one pure function of the inexact arrays of the arguments, a `Primal`.
State leaves that function as its auxiliary output, so the call writes it once, however
many tangents follow, and no tangent or cotangent ever contains it.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, overload, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import boundary
from .._state.scope import closed_copy
from .._tree.compare import difference, same_modes
from .._typing import P, R
from .lift import Lifted, Ran, StaticOutput, Values
from .mutable import as_argnums, positions
from .reach import check_given, is_traced
from .transform import Transform, with_aux, wrap


def _is_inexact(tree: Any) -> Any:
    """For each leaf whether it has tangents. Those of owned modules have none."""

    def is_inexact(is_traced: bool, x: Any) -> bool:
        return is_traced and jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.inexact)

    return jtu.tree_map(is_inexact, is_traced(tree), tree)


class PureCall:
    """Calls of `functions` with these arguments, as functions of some of their arrays.

    - `arrays`: for each argument the leaves that `is_input` selects, and holes.

    Owned modules among the arguments are copies: what a function closes over is the
    object outside, and a constant.
    """

    def __init__(
        self,
        functions: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        is_input: Callable[[Any], Any],
    ):
        check_given(*args, *kwargs.values())
        # An argument that is given twice is differentiated twice, as in JAX.
        treatments = [
            i for i, x in enumerate((*args, kwargs)) for _ in jtu.tree_leaves(x)
        ]
        self.lifted = Lifted(functions, (tuple(args), kwargs), treatments)
        self.args, self.kwargs = self.lifted.arguments
        # The derivatives are trees like this one. They go to the caller, who shall not
        # get modules that a scope owns, nor the class of an `eqx.nn.Shared` in a scope.
        given = closed_copy(self.args)
        self.arrays, self.rest = eqx.partition(given, is_input(given))

    def __call__(self, f: Any, arrays: Any) -> tuple[Ran, Values]:
        """The result of `f`, and the leaves of the argument copies before the call."""
        new = jtu.tree_leaves(eqx.combine(arrays, self.rest))
        args, before = self.lifted.fill(self.args, new)
        values = {**self.lifted.values, **before}
        return self.lifted.run(values, lambda: f(*args, **self.kwargs)), before


class Primal:
    """A call of `f` as a pure function of the inexact arrays of its arguments.

    `is_output` selects the part of the output that JAX differentiates.
    """

    def __init__(
        self,
        f: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        has_aux: bool,
        is_output: Callable[[Any], Any] = is_traced,
    ):
        self.f, self.has_aux, self.is_output = f, has_aux, is_output
        self.call = PureCall(f, args, kwargs, _is_inexact)
        self.arrays = self.call.arrays

    def run(self, *arrays: Any) -> tuple[Any, tuple[Ran, StaticOutput]]:
        """The output to differentiate, and as an auxiliary output everything else."""
        ran, _ = self.call(self.f, arrays)
        out, aux = with_aux(ran.out) if self.has_aux else (ran.out, None)
        out, rest = eqx.partition(out, self.is_output(out))
        rest = rest, aux
        computed, static = eqx.partition(rest, is_traced(rest))
        return out, (ran._replace(out=computed), StaticOutput(static))

    def finish(self, out: Any, rest: tuple[Ran, StaticOutput]) -> tuple[Any, ...]:
        """Commit what was written. Returns the whole output, and `aux` if there is."""
        ran, static = rest
        self.call.lifted.commit(ran)
        out_rest, aux = eqx.combine(ran.out, static.value)
        out = eqx.combine(out, out_rest)
        return (out, aux) if self.has_aux else (out,)


# --- Tangents and cotangents ----------------------------------------------------------


def _without_zeros(tree: Any) -> Any:
    """`tree` with holes for zeros of dtype float0. No scope owns its modules."""
    return jtu.tree_map(
        lambda x: None if getattr(x, "dtype", None) == jax.dtypes.float0 else x,
        closed_copy(tree),
    )


def _abstract(arrays: Any) -> tuple[Any, ...]:
    """The structure of `arrays`, and each of them without its values: hashable."""
    types = [jax.typeof(x) for x in jtu.tree_leaves(arrays)]
    abstract = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types)
    return jtu.tree_structure(arrays), abstract


def _tangents(given: Any, inputs: tuple[Any, ...], what: str) -> Any:
    """`given` as tangents of these inputs, with zeros for holes; modes may differ.

    JAX checks shapes and dtypes. Of a wrong structure it prints all of both; in that of
    a model nobody finds the one field that differs.
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
in structure, {}. Give an array for each inexact array of the arguments, or `None` \
for zeros, and `None`, or zeros of dtype `float0`, for everything else."""


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
    - `ValueError`: cotangents do not fit `out`; a state of an argument was also written
        through the closure.

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
    # JAX wants zeros of dtype float0 as cotangents of a counter that comes out. As it
    # is no part of the output to JAX, `None` will do.
    primal = Primal(fun, primals, {}, has_aux, _is_inexact)
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
    """`jax.jvp` that carries the state of every module in reach.

    State is threaded by the primal computation, once, and has no tangents: a tangent of
    what `fun` writes is dropped.

    **Arguments:**

    - `fun`: a function, a module, a bound method, or a partial.
    - `primals`: its arguments, a tuple or a list.
    - `tangents`: as many trees like them, with an array of the same shape and dtype for
        each inexact array, those of modules among them. `None` means zeros, for an
        array or for a whole argument, so a gradient of `es.grad` is a tangent, too.
        `None` or zeros of dtype `float0` for everything else.
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
    primal = Primal(fun, primals, {}, has_aux)
    out, pushforward, rest = jax.linearize(primal.run, *primal.arrays, has_aux=True)
    out, *aux = primal.finish(out, rest)
    return out, Pushforward(pushforward, _abstract(primal.arrays)), *aux


_NOT_A_TUPLE: Final = """`es.jvp(f, primals, tangents)`: `primals` and `tangents` are \
tuples or lists, with an entry for each argument of `f`, and one is of type `{}`: \
`es.jvp(f, (x,), (dx,))`."""


# --- Jacobians ------------------------------------------------------------------------


class _Jacobian(Transform):
    """`es.jacfwd` or `es.jacrev`.

    JAX maps the tangents over a basis, and not the primal computation: the call writes
    state and draws from keys once, however many vectors the basis has.
    """

    name: str = eqx.field(static=True)
    argnums: Any = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    holomorphic: bool = eqx.field(static=True)
    allow_int: bool = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        primal = Primal(self.f, args, kwargs, self.has_aux)
        named = positions(args, self.argnums, f"{self.name}(argnums={self.argnums})")
        empty = [i for i in named if not jtu.tree_leaves(primal.arrays[i])]
        # JAX differentiates with respect to one array at least, also with `allow_int`.
        if empty and not (self.allow_int and len(empty) < len(named)):
            raise TypeError(_NO_ARRAYS.format(self.name, empty[0]))
        is_forward = self.name == "es.jacfwd"
        of_jax: Any = jax.jacfwd if is_forward else jax.jacrev
        options = {} if is_forward else {"allow_int": self.allow_int}
        jacobian, rest = of_jax(
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

    - `ValueError`: `argnums` names an argument twice; else as
        [`es.vjp`][eqx_state.vjp].
    - `TypeError`: an argument is not there, has no inexact arrays, or complex ones
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
    return _jacobian("es.jacfwd", fun, argnums, has_aux, holomorphic)


def jacrev(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]:
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
    return _jacobian("es.jacrev", fun, argnums, has_aux, holomorphic, allow_int)


def hessian(
    fun: Callable[P, Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[P, Any]:
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


def _jacobian(
    name: str,
    fun: Any,
    argnums: Any,
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool = False,
) -> Any:
    return wrap(
        _Jacobian,
        fun,
        name=name,
        argnums=as_argnums(argnums, name),
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
    )
