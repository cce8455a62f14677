"""`es.mutable`: run on a private copy, return the result and the new model.

It has two halves. `target` finds the model of a call: the object that the function is
bound to, or some of the arguments. `thread` opens a scope, runs the call on a private
copy of the model, and closes the scope.
"""

import functools as ft
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, overload, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._errors import an, show
from .._kinds.kinds import is_kind, State
from .._state.collect import enter, given_back, leave, Snapshot
from .._state.init import check_initialized, check_none_missing
from .._state.scope import Kinds, Scope
from .._tree.base import is_eqx_module
from .._tree.filters import written
from .._tree.observe import untagged
from .._tree.rules import check_rules, choose
from .._tree.walk import is_array, is_numpy, leaves, name_of, Visit
from .._typing import P, R
from .transform import Transform, wrap


# --- `cast=`: dtypes of a model inside a call.
#
# The selected arrays are cast when the private copy is created, inside the
# differentiated function, so gradients pass back through the cast. After the call,
# unwritten arrays are the caller's own again, and written arrays are cast back.


class Cast(NamedTuple):
    """Rules from filters to dtypes, as a static value; `what` names them in errors."""

    rules: tuple[tuple[Any, Any], ...]
    what: str

    def inside(self, model: Any, given: Snapshot, scope: Scope) -> Snapshot:
        """The snapshot `given` of a model, with the dtypes inside the call.

        Stores in the scope the outer dtype of each array that was cast.
        """
        check_initialized(model)  # filters cannot match missing arrays
        rules = dict(self.rules)
        own, new = {}, []
        # Do not cast moments and averages: the forward pass does not compute with them.
        keys = choose(rules, model, self.what, per_parameter=False)
        for visit, key in zip(leaves(model), keys, strict=True):
            x, dtype = visit.node, None if key is None else rules[key]
            if dtype is not None and _is_real(x) and x.dtype != dtype:
                own[visit.path] = x.dtype
                x = jnp.asarray(x).astype(dtype)
            new.append(x)
        scope.outer_dtypes = own
        return given._replace(leaves=new)


def as_cast(cast: Any, what: str) -> Cast | None:
    """The argument `cast=` of a transform, checked; `None` if it was not given."""
    if cast is None:
        return None
    what = f"`{what}(cast=...)`"
    if not isinstance(cast, Mapping):
        raise TypeError(_NOT_RULES.format(what, show(cast)))
    check_rules(cast, what)
    return Cast(tuple((key, _as_dtype(cast, key, what)) for key in cast), what)


def _as_dtype(cast: Mapping[Any, Any], key: Any, what: str) -> Any:
    if cast[key] is None:
        return None
    try:
        # `jnp.dtype` would accept an array, and return its dtype.
        dtype = None if is_array(cast[key]) else jnp.dtype(cast[key])
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(_NOT_A_DTYPE.format(what, written(key), show(cast[key])))
    return dtype


def restore_dtypes(new: Any, inside: Snapshot, given: Snapshot) -> Any:
    """The model after a call, with the caller's dtypes and the caller's arrays."""
    out = []
    for x, cast, own in zip(
        jtu.tree_leaves(new), inside.leaves, given.leaves, strict=True
    ):
        # Compare leaf by leaf: after `self.a = self.b`, the cast array of `b` is at the
        # position of `a`, and counts as written there.
        if x is cast:
            out.append(own)
        else:
            dtype = None if cast is own else jax.dtypes.canonicalize_dtype(own.dtype)
            out.append(x if dtype is None else x.astype(dtype))
    return jtu.tree_unflatten(jtu.tree_structure(new), out)


def _is_real(x: Any) -> bool:
    is_values = is_numpy(x) or isinstance(x, jax.Array)
    return is_values and jnp.issubdtype(x.dtype, jnp.floating)


_NOT_RULES: Final = """{}: rules are a mapping from filters to dtypes, such as \
`cast={{es.Parameter: jnp.bfloat16}}`, but this is `{}`, which selects no arrays."""

_NOT_A_DTYPE: Final = """{0}: the value for `{1}` is `{2}`, but it must be a real \
floating dtype, or `None` to leave the arrays unchanged: `cast={{es.Parameter: \
jnp.bfloat16}}`. Integers, bools and complex arrays are never cast."""


_M = TypeVar("_M", bound=eqx.Module)
_M_co = TypeVar("_M_co", covariant=True)
_F_co = TypeVar("_F_co", covariant=True)


def thread(
    model: Any, scope: Scope, run: Callable[[Any], Any], cast: Cast | None = None
) -> tuple[Any, Any]:
    """Call `run` on a private copy of the model. Returns the output and the new model.

    `cast`: the dtypes of the private copy.
    """
    with scope:
        given = inside = Snapshot.of(model)
        if cast is not None:
            inside = cast.inside(model, given, scope)
        owned, visits = enter(inside, scope)
        check_none_missing(visits)
        if scope.observer is not None:
            scope.observer.check(owned.tree)
        try:
            out = run(owned.tree)
        except AttributeError as error:
            if (message := _state_message(error, visits)) is None:
                raise
            raise TypeError(message) from error
        out, (after,) = leave(out, [owned])
    new = given_back(inside, owned, after)
    if scope.observer is not None:
        out, new = untagged((out, new), scope.observer.key)
    return out, new if cast is None else restore_dtypes(new, inside, given)


def _state_message(error: AttributeError, visits: list[Visit]) -> str | None:
    """The message if a layer with Equinox's state was called without its state.

    `None` for any other error. We recognize the error by the bare `object()` that an
    `eqx.nn.Sequential` without a state passes to its layers as their state.
    """
    layers = [v for v in visits if isinstance(v.node, eqx.nn.StateIndex)]
    if type(error.obj) is not object or not layers:
        return None
    name, owner = name_of(layers[0].path[:-1]), layers[0].context.owner
    layer = getattr(owner, "__name__", "layer")
    return _NO_STATE.format(name or "the model", layer, an(layer))


Lens = tuple[Any, Callable[[Any], Any]]


def carried(f: Any) -> Lens | None:
    """The object that a callable is bound to, and a function that binds a new one.

    `None` for a plain function, whose model is an argument.
    """
    if isinstance(f, Transform):
        if (inner := carried(f.f)) is None:
            return None
        return inner[0], lambda model: f.of(inner[1](model))
    if isinstance(f, (ft.partial, jtu.Partial, eqx.Partial)):
        new = type(f)
        if (inner := carried(f.func)) is not None:
            return inner[0], lambda m: new(inner[1](m), *f.args, **f.keywords)
        if f.args:
            return f.args[0], lambda m: new(f.func, m, *f.args[1:], **f.keywords)
        return None
    if is_bound_method(f):
        return f.__self__, lambda model: types.MethodType(f.__func__, model)
    if is_eqx_module(f):
        # `eqx.filter_jit(f)` is a module, too; the model of a function is an argument.
        wrapped = getattr(f, "__wrapped__", None)
        is_function = callable(wrapped) and carried(wrapped) is None
        return None if is_function else (f, lambda model: model)
    return None


def is_bound_method(f: Any) -> bool:
    """Whether `f` is a bound method: Python's, or Equinox's, which is a pytree."""
    if isinstance(f, types.MethodType):
        return True
    return is_eqx_module(f) and {"__func__", "__self__"} <= f.__dict__.keys()


Argnums = int | tuple[int, ...] | None


def as_argnums(argnums: Any, what: str) -> Argnums:
    """`argnums` as an integer or a tuple of integers; `None` if it was not given."""
    if argnums is None:
        return None
    try:
        if isinstance(argnums, (tuple, list)):
            return tuple(operator.index(i) for i in argnums)
        return operator.index(argnums)
    except TypeError:
        raise TypeError(_ARGNUMS.format(what, repr(argnums))) from None


def positions(args: tuple[Any, ...], argnums: Any, what: str) -> list[int]:
    """The positions that `argnums` names, as nonnegative integers."""
    found: list[int] = []
    for i in argnums if isinstance(argnums, tuple) else (argnums,):
        if not -len(args) <= i < len(args):
            raise TypeError(_NO_ARGUMENT.format(what, len(args), i))
        if i % len(args) in found:
            raise ValueError(_NAMED_TWICE.format(what, i % len(args)))
        found.append(i % len(args))
    return found


def target(
    f: Any, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Argnums, what: str
) -> tuple[Any, Callable[[Any], Any]]:
    """The model of `f(*args, **kwargs)`, and the call as a function of the model."""
    name = getattr(f, "__name__", "f")
    # Not `<lambda>`; and the wrappers of Equinox have a sentinel there.
    name = name if isinstance(name, str) and name.isidentifier() else "f"
    if argnums is None:
        if (lens := carried(f)) is not None:
            model, put = lens
            return model, lambda model: put(model)(*args, **kwargs)
        if not args:
            raise TypeError(_NO_MODEL.format(what, name))
        argnums = 0
    named = positions(args, argnums, f"{what}({name}, argnums={argnums})")
    is_one = not isinstance(argnums, tuple)

    def run(models: Any) -> Any:
        filled = list(args)
        new = (models,) if is_one else models
        for i, model in zip(named, new, strict=True):
            filled[i] = model
        return f(*filled, **kwargs)

    models = tuple(args[i] for i in named)
    return models[0] if is_one else models, run


def as_kinds(kinds: Any, what: str) -> Kinds:
    """The kinds that may be written, as a tuple."""
    given = tuple(kinds) if isinstance(kinds, (tuple, list)) else (kinds,)
    for kind in given:
        if not is_kind(kind):
            raise TypeError(_KINDS.format(what, repr(kind)))
    return given


_NO_STATE: Final = """`{0}` is {2} whose state is in an `eqx.nn.State`, but it was \
called without one. Pass the state yourself, `model(x, state)`; or store it in the \
model: `eqx.nn.Sequential([..., es.nn.Stateful({1}(...))])`."""

_ARGNUMS: Final = """`{}(..., argnums={})`: `argnums` is the position of a positional \
argument, an integer, or a tuple of them."""

_NO_ARGUMENT: Final = """`{}` was called with {} positional arguments, so argument {} \
does not exist. Positions count from 0, without the `self` of a decorated method, and \
without arguments passed by name."""

_NAMED_TWICE: Final = """`{}` names argument {} twice. Name each argument once."""

_NO_MODEL: Final = """`{0}({1})` was called without a positional argument, and a model \
that is passed by keyword cannot be written. Pass the model by position, \
`{0}({1})(model, ...)`, or call its method, `{0}(model.{1})(...)`."""

_KINDS: Final = """`{}(..., kinds={})`: `kinds` must be a kind such as `es.State`, or \
a tuple of kinds; `es.TreePart` allows all."""


class _Mutable(Transform):
    kinds: Kinds = eqx.field(static=True)
    argnums: Argnums = eqx.field(static=True)
    cast: Cast | None = eqx.field(static=True)
    threads = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        model, run = target(self.f, args, kwargs, self.argnums, "es.mutable")
        return thread(model, Scope(self.kinds), run, self.cast)


class _Threaded(Generic[_M_co, _F_co]):
    """The type of `mutable(model)`, for type checkers.

    It has the signature of the model, and also returns the new model. `_F_co` is the
    type of the model as a callable.
    """

    def __call__(
        self: "_Threaded[_M_co, Callable[P, R]]", *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, _M_co]: ...


@overload
def mutable(
    f: _M,
    *,
    kinds: Any = State,
    argnums: None = None,
    cast: Mapping[Any, Any] | None = None,
) -> _Threaded[_M, _M]: ...
@overload
def mutable(
    f: Callable[P, R],
    *,
    kinds: Any = State,
    argnums: int | tuple[int, ...] | None = None,
    cast: Mapping[Any, Any] | None = None,
) -> Callable[P, tuple[R, Any]]: ...
def mutable(
    f: Any,
    *,
    kinds: Any = State,
    argnums: int | tuple[int, ...] | None = None,
    cast: Mapping[Any, Any] | None = None,
) -> Any:
    """A function like `f` that can write state, and returns `(output, new_model)`.

    `f` runs on a private copy of the model, in which `self.field = value` is allowed.
    The model that you pass in does not change.

    **Arguments:**

    - `f`: the function to call. The model is `f` itself if `f` is a module, the bound
        object if `f` is a method, and the model of `g` if `f` is a transform such as
        `es.vmap(g)`. Otherwise the model is the first positional argument: any pytree
        with `es.Module`s in it.
    - `kinds`: the kind, or tuple of kinds, that may be written. `es.TreePart`: all.
    - `argnums`: the positions of the arguments that are models; this replaces the rule
        above. An integer, counted from 0 or from the end as in `jax.grad`, or a tuple
        of integers. With a tuple, the new models are a tuple, too. With `argnums`, the
        object that `f` is bound to cannot be written.
    - `cast`: the dtypes of the model inside the call: rules, as for `es.spec`, from
        filters to real floating dtypes, or to `None` for arrays that do not change.
        `{es.Parameter: jnp.bfloat16}` computes with parameters in half precision. Only
        real floating arrays are cast. Outside the call nothing changes: unwritten
        arrays are the same objects, and written arrays have their old dtype. A narrower
        float that is written inside is widened to the dtype of its field. The other
        arguments are not cast.

    **Returns:**

    A function of the same arguments that returns `(output, new_model)`. The new model
    has the structure, shapes and dtypes of the old one. The function is a pytree, and
    `eqx.filter_jit(es.mutable(model))` traces the parameters.

    **Raises:**

    - `dataclasses.FrozenInstanceError`: a write to a different kind, to a static field,
        to a copy, or after the scope has closed.
    - `es.TraceError`: a write inside a plain JAX transform.
    - `ValueError`: a changed structure, shape or dtype; an integer that the dtype
        cannot represent (a traced one has no value yet, and wraps around as in JAX);
        one stateful module that occurs twice; `argnums` names one argument twice; a
        filter in `cast` matches nothing.
    - `es.NotInitializedError`: the model still contains an `es.Initializer`.
    - `TypeError`: the call has no positional argument, or not the one that `argnums`
        names; `cast` is not a mapping from filters to real floating dtypes.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Counter(es.Module):
            count: es.State

            def step(self, by):
                self.count = self.count + by
                return self.count


        counter = Counter(0)
        y, new = es.mutable(counter.step)(2)
        assert (y, new.count, counter.count) == (2, 2, 0)


        def step_both(a, by, b):
            return a.step(by) + b.step(by)


        y, (a, b) = es.mutable(step_both, argnums=(0, 2))(counter, 3, new)
        assert (y, a.count, b.count) == (8, 3, 5)
        ```
    """
    return wrap(
        _Mutable,
        f,
        kinds=as_kinds(kinds, "es.mutable"),
        argnums=as_argnums(argnums, "es.mutable"),
        cast=as_cast(cast, "es.mutable"),
    )
