"""`es.vjp`, `es.jvp`, `es.linearize` and the Jacobians, for functions with state.

Each one gives JAX a `Primal`: a pure function of the inexact arrays of the arguments.
This function returns the new state as an auxiliary output. State is therefore written
once, however many tangents follow, and is never part of a tangent or a cotangent.
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
from .._typing import P, R
from .cut import cut, is_traced, Rest
from .lift import Lifted, Ran
from .reach import check_given
from .roots import Values
from .target import as_argnums, positions
from .transform import Transform, with_aux, wrap


def _is_inexact(tree: Any) -> Any:
    """For each leaf, whether it has tangents. An owned module counts as one leaf, which
    has none."""

    def is_inexact(is_traced: bool, x: Any) -> bool:
        return is_traced and jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.inexact)

    return jtu.tree_map(is_inexact, is_traced(tree), tree)


class PureCall:
    """Turns calls with these arguments into pure functions of some of their arrays.

    - `arrays`: for each argument, the leaves that `is_input` selects, and `None`
        elsewhere. They are the inputs of the pure function.

    Owned modules among the arguments are copied, because the same module in the closure
    of a function is a constant.
    """

    def __init__(
        self,
        functions: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        is_input: Callable[[Any], Any],
    ):
        check_given(*args, *kwargs.values())
        # In `es.vjp(f, (layer, layer))`, as in JAX, each place has its own cotangent.
        num_places = jtu.tree_structure(tuple(args)).num_leaves
        places = [*range(num_places), *(None for _ in jtu.tree_leaves(kwargs))]
        self.lifted = Lifted(functions, (tuple(args), kwargs), places)
        self.args, self.kwargs = self.lifted.arguments
        # The caller receives derivatives of this structure, which no scope owns.
        given = snapshot(self.args)
        self.arrays, self.rest = cut(given, is_input(given))

    def __call__(self, f: Any, arrays: Any) -> tuple[Ran, Values]:
        """The result of `f`, and the leaves of the argument copies before the call."""
        new = jtu.tree_leaves(self.rest.join(arrays))
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

    def run(self, *arrays: Any) -> tuple[Any, tuple[Ran, Rest]]:
        """The output to differentiate, and everything else as an auxiliary output."""
        ran, _ = self.call(self.f, arrays)
        out, aux = with_aux(ran.out) if self.has_aux else (ran.out, None)
        out, rest = eqx.partition(out, self.is_output(out))
        computed, static = cut((rest, aux))
        return out, (ran._replace(out=computed), static)

    def finish(self, out: Any, rest: tuple[Ran, Rest]) -> tuple[Any, ...]:
        """Commit the written state. Returns the whole output, and `aux` if any."""
        ran, static = rest
        self.call.lifted.commit(ran)
        out_rest, aux = static.join(ran.out)
        out = eqx.combine(out, out_rest)
        return (out, aux) if self.has_aux else (out,)


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


# --- Jacobians ------------------------------------------------------------------------


class _Jacobian(Transform):
    """`es.jacfwd` or `es.jacrev`.

    JAX maps only the tangents over a basis, not the primal computation. The call
    therefore writes state and draws from keys once, whatever the size of the basis.
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
        # JAX needs at least one array to differentiate, even with `allow_int`.
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
    return _jacobian("es.jacfwd", fun, argnums, has_aux, holomorphic)


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
    return _jacobian("es.jacrev", fun, argnums, has_aux, holomorphic, allow_int)


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
