"""`es.vjp`, `es.jvp`, `es.linearize`: their namesakes in JAX, which carry state."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Literal, overload, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._compat import boundary
from .._errors import show
from .._state.scope import closed_copy
from .._tree.compare import is_hole, leaves_like, same
from .._tree.dtypes import is_numeric
from .._tree.walk import is_numpy, map_leaves, name_of, Visit
from .lift import check_given, is_mappable, is_traced, Lifted, Static
from .mutable import as_argnums
from .transform import Transform, wrap


# --- The primal computation: a call as a pure function of inexact arrays.
#
# `es.vjp`, `es.jvp`, `es.linearize` and the Jacobians hand one such function to their
# namesakes in JAX. State leaves it as an auxiliary output, so it is threaded once,
# however many tangents follow, and no tangent or cotangent ever sees it.


class Primal:
    """A call of `f`, as a function of the inexact arrays in some of its arguments.

    - `chosen`: these arguments. Owned modules among them have stand-ins, since an
        argument and a closure are two values: what `f` closes over is a constant.
    - `given`: the same as an ordinary tree, which no scope owns.
    - `diff`: the inexact arrays of `given`, with holes elsewhere.
    """

    def __init__(
        self,
        f: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        positions: Sequence[int],
        has_aux: bool,
    ):
        self.f, self.args, self.kwargs = f, tuple(args), kwargs
        self.positions, self.has_aux = positions, has_aux
        check_given(*args, *kwargs.values())
        self._reach()
        if self.lifted.is_initializing:
            f(*args, **kwargs)  # makes what is missing
            self._reach()
        self.given = tuple(closed_copy(self.chosen))
        self.diff, self.rest = eqx.partition(
            self.given, map_leaves(_is_inexact, self.given)
        )

    def _reach(self) -> None:
        # An argument that is given twice is differentiated twice.
        treatments = [
            i if i in self.positions else None
            for i, x in enumerate(self.args)
            for _ in jtu.tree_leaves(x)
        ]
        treatments += [None for _ in jtu.tree_leaves(self.kwargs)]
        self.lifted = Lifted(self.f, (self.args, self.kwargs), treatments)
        self.args, self.kwargs = self.lifted.arguments
        self.chosen = [self.args[i] for i in self.positions]

    def _args(self, chosen: Sequence[Any]) -> list[Any]:
        """All arguments, with these in place of the chosen ones."""
        args = list(self.args)
        for i, x in zip(self.positions, chosen, strict=True):
            args[i] = x
        return args

    def run(self, *diff: Any) -> tuple[Any, Any]:
        """The arrays of the output, and as an auxiliary output everything else."""
        new = jtu.tree_leaves(eqx.combine(diff, self.rest))
        chosen, values = self.lifted.fill(self.chosen, new)
        args = self._args(chosen)
        ran = self.lifted.run(
            {**self.lifted.values, **values}, lambda: self.f(*args, **self.kwargs)
        )
        out, aux = _two(ran.out) if self.has_aux else (ran.out, None)
        out, static = eqx.partition(out, is_traced(out))
        aux, kept = self.lifted.split(aux)
        return out, (aux, ran._replace(out=None), Static((static, kept)))

    def finish(self, rest: Any) -> tuple[Any, ...]:
        """Commit what was written. Returns the output's rest, and `aux` if there is."""
        aux, ran, kept = rest
        self.lifted.commit(ran)
        static, aux_static = kept.value
        return (static, eqx.combine(aux, aux_static)) if self.has_aux else (static,)


def _is_inexact(visit: Visit) -> bool:
    dtype = getattr(visit.node, "dtype", type(visit.node))
    return is_mappable(visit) and jnp.issubdtype(dtype, jnp.inexact)


def _two(out: Any) -> Any:
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(_NOT_A_PAIR.format(show(out)))
    return out


_NOT_A_PAIR: Final = """With `has_aux=True` the function returns a pair, `(out, aux)`, \
of which `out` is differentiated, and it returned `{}`. Put what else it returns into \
`aux`: `return out, (logits, metrics)`."""


# --- Tangents and cotangents: which trees of them fit, and functions that take them.


@jtu.register_static
class Mold:
    """The tree that tangents or cotangents have to fit.

    - `what`: what is given for the tree, in the words of an error.
    - `errors`: the class of JAX's error for another structure, and for another dtype.
    - `fills`: whether JAX wants zeros, of dtype float0, in place of the holes.
    """

    def __init__(
        self,
        tree: Any,
        what: str,
        errors: tuple[type[Exception], type[Exception]],
        fills: bool = False,
    ):
        flags = is_traced(tree)
        self.tree = jtu.tree_map(lambda x, f: _struct(x) if f else x, tree, flags)
        self.what, self.errors, self.fills = what, errors, fills

    def fit(self, given: Any) -> Any:
        """`given`, checked, with holes or zeros except for inexact arrays."""
        try:
            new = leaves_like(self.tree, closed_copy(given), self.what)
        except ValueError as error:
            raise self.errors[0](error.args[0]) from None
        old, treedef = jtu.tree_flatten_with_path(self.tree, is_leaf=is_hole)
        pairs = zip(old, new, strict=True)
        fitted = [self._fit(name_of(path), x, y) for (path, x), y in pairs]
        return jtu.tree_unflatten(treedef, fitted)

    def _fit(self, name: str, old: Any, new: Any) -> Any:
        where = self.what, name or "the output", _show(old)
        is_struct = isinstance(old, jax.ShapeDtypeStruct)
        if not is_struct or not jnp.issubdtype(old.dtype, jnp.inexact):
            is_zero = getattr(new, "dtype", None) == jax.dtypes.float0
            if not (is_hole(new) or is_zero) and (is_struct or not same(old, new)):
                raise self.errors[1](_NOT_INEXACT.format(*where))
            if is_struct and self.fills:
                return np.zeros(old.shape, jax.dtypes.float0)
            return None
        if not eqx.is_array_like(new):
            raise self.errors[1](_MISSING.format(*where))
        found = _struct(new)
        if found.shape != old.shape:
            raise ValueError(_OTHER.format(*where, _show(found)))
        if found.dtype != old.dtype:
            raise self.errors[1](_OTHER.format(*where, _show(found)))
        return new


def _struct(x: Any) -> Any:
    """The shape and dtype of an array; NumPy's strings are not arrays to JAX."""
    if is_numpy(x) and not is_numeric(x.dtype):
        return x
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _show(x: Any) -> str:
    return eqx.tree_pformat(x, short_arrays=True, struct_as_array=True)


_NOT_INEXACT: Final = """{0}: `{1}` is `{2}`, for which there are no tangents. Only \
inexact arrays have some; for everything else give `None`, as `es.filter` and \
`eqx.filter` leave it, or zeros of dtype `float0`."""

_MISSING: Final = """{0}: `{1}` is `{2}`, and nothing is given for it. Give an array \
for each inexact array, zeros if need be."""

_OTHER: Final = """{0}: `{1}` is `{2}`, and what is given for it is `{3}`. Give an \
array of the same shape and dtype."""


class Pullback(eqx.Module):
    """The function that `es.vjp` returns: from cotangents of the output to those of
    the arguments."""

    vjp: Any
    mold: Mold

    @boundary
    def __call__(self, cotangents: Any) -> tuple[Any, ...]:
        return self.vjp(self.mold.fit(cotangents))


class Pushforward(eqx.Module):
    """The function that `es.linearize` returns: from tangents of the arguments to
    those of the output."""

    jvp: Any
    mold: Mold

    @boundary
    def __call__(self, *tangents: Any) -> Any:
        return self.jvp(*self.mold.fit(tangents))


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


# --- `es.jacfwd`, `es.jacrev`, `es.hessian`: Jacobians of stateful functions.
#
# The primal computation is one pure function, so JAX's own Jacobians do the work. They
# map the tangents over a basis, and not the primal computation: state is written, and
# keys are drawn from, once, and not once per vector of the basis.


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
                raise TypeError(_NO_ARRAYS.format(self.name, i))
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


_NO_ARRAYS: Final = """`{0}`: argument {1} has no inexact arrays, so there is \
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
