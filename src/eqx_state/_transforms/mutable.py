"""`es.mutable`: run on a private copy, return the result and the new model."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Generic, overload, TypeVar

import equinox as eqx

from .._errors import an
from .._kinds.kinds import State
from .._state.copy import PrivateCopy
from .._state.lazy import check_usable
from .._state.scope import as_kinds, Kinds, Scope
from .._tree.base import BaseModule
from .._tree.walk import name_of, Traversal, Visit
from .._typing import P, R
from .cast import as_cast, Cast, CastLike, codecs_of
from .target import Argnums, as_argnums, target
from .transform import Transform, wrap


_M = TypeVar("_M", bound=eqx.Module)
_M_co = TypeVar("_M_co", covariant=True)
_F_co = TypeVar("_F_co", covariant=True)


def run_on_copy(
    model: Any,
    scope: Scope,
    run: Callable[[Any], Any],
    given: Traversal | None = None,
) -> tuple[Any, Any]:
    """Call `run` on a private copy of the model.

    Returns the output and the new model. `given` is that of `PrivateCopy`.
    """
    with scope:
        private = PrivateCopy(model, scope, given)
        visits = private.before.visits
        check_usable(visits)
        if scope.observer is not None:
            scope.observer.check(private.tree)
        try:
            out = run(private.tree)
        except AttributeError as error:
            if (message := _state_message(error, visits)) is not None:
                raise TypeError(message) from error
            if note := _note(error, visits, scope):
                error.add_note(note)
            raise
        except NameError as error:
            note_axis(error)
            raise
        return private.leave(out)


def note_axis(error: NameError) -> None:
    """Add to JAX's error for a collective over an axis that nobody has named."""
    # Python's own errors have the name of a variable.
    if error.name is None and _NAME_IT not in getattr(error, "__notes__", ()):
        error.add_note(_NAME_IT)


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


def _note(error: AttributeError, visits: list[Visit], scope: Scope) -> str:
    """What to add to Equinox's error for a field that only an `es.Module` can write."""
    # All errors of ours begin with "Cannot".
    if type(error) is dataclasses.FrozenInstanceError and "Cannot" not in str(error):
        for visit in visits:
            owner, kind = visit.context.owner, visit.context.spec.kind
            if kind and scope.allows(kind) and not issubclass(owner, BaseModule):
                return _NOT_WRITABLE.format(owner.__name__, visit.context.field)
    return ""


_NAME_IT: Final = """A collective such as `jax.lax.pmean(x, "batch")` needs lanes \
with this name: `es.vmap(f, axis_name="batch")(xs)`, and for a model that writes state \
`es.mutable(es.vmap(model, axis_name="batch"))(xs)`."""

_NOT_WRITABLE: Final = """Only an `es.Module` can write its fields, and `{0}`, which \
declares `{1}`, is not one: `class {0}(es.Module)`."""

_NO_STATE: Final = """`{0}` is {2} whose state is in an `eqx.nn.State`, but it was \
called without one. Pass the state yourself, `model(x, state)`; or store it in the \
model: `eqx.nn.Sequential([..., es.nn.Stateful({1}(...))])`."""


class Mutable(Transform):
    """The result of `mutable`: a function that returns its output and the new model."""

    kinds: Kinds = eqx.field(static=True)
    argnums: Argnums = eqx.field(static=True)
    cast: Cast | None = eqx.field(static=True)
    returns_model = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        model, run = target(self.f, args, kwargs, self.argnums, "es.mutable")
        return run_on_copy(model, Scope(self.kinds, codecs=codecs_of(self.cast)), run)


class _WithModel(Generic[_M_co, _F_co]):
    """The type of `mutable(model)`, for type checkers.

    It has the signature of the model, and also returns the new model. `_F_co` is the
    type of the model as a callable.
    """

    def __call__(
        self: "_WithModel[_M_co, Callable[P, R]]", *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, _M_co]: ...


@overload
def mutable(
    f: _M,
    *,
    kinds: Any = State,
    argnums: None = None,
    cast: CastLike = None,
) -> _WithModel[_M, _M]: ...
@overload
def mutable(
    f: Callable[P, R],
    *,
    kinds: Any = State,
    argnums: int | tuple[int, ...] | None = None,
    cast: CastLike = None,
) -> Callable[P, tuple[R, Any]]: ...
def mutable(
    f: Any,
    *,
    kinds: Any = State,
    argnums: int | tuple[int, ...] | None = None,
    cast: CastLike = None,
) -> Any:
    """A function like `f` that can write state, and returns `(output, new_model)`.

    `f` runs on a private copy of the model, in which `self.field = value` is allowed.
    The model that you pass in does not change. NumPy arrays of the model are JAX arrays
    in the copy.

    **Arguments:**

    - `f`: the function to call. The model is `f` itself if `f` is a module, the bound
        object if `f` is a method of a module, and the model of `g` if `f` is a
        transform or a partial of such a `g`: `es.vmap(g)`. Otherwise the model is the
        first positional argument of the call: any pytree with `es.Module`s in it. As in
        `jax.grad`, what a partial of a function binds does not count.
    - `kinds`: the kind, or tuple of kinds, that may be written. `es.TreePart`: all.
    - `argnums`: the positions of the arguments that are models; this replaces the rule
        above. An integer, counted from 0 or from the end as in `jax.grad`, or a tuple
        of integers. With a tuple, the new models are a tuple, too. With `argnums`, the
        object that `f` is bound to cannot be written.
    - `cast`: the dtypes of the model inside the call: a real floating dtype for all
        parameters and buffers, such as `jnp.bfloat16`; or rules, as for `es.spec`, from
        filters to such dtypes, or to `None` for arrays that do not change. The dtype
        alone means `{es.Parameter: dtype, es.Buffer: dtype}`: beside a float32 buffer,
        everything that follows would be float32. Only real floating arrays are cast.
        Outside the call nothing changes: unwritten arrays are the same objects, and
        written arrays have their old dtype. A narrower float that is written inside is
        widened to the dtype of its field. The other arguments are not cast.

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
        one stateful module that occurs twice; a Python number in a field that declares
        a kind; `argnums` names one argument twice; a filter in `cast` matches nothing.
    - `es.NotInitializedError`: the model still contains an `es.Initializer`.
    - `TypeError`: the call has no positional argument, or not the one that `argnums`
        names, or no module although a partial binds one; `cast` is neither a real
        floating dtype nor a mapping from filters to such dtypes.

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
        Mutable,
        f,
        kinds=as_kinds(kinds, "es.mutable"),
        argnums=as_argnums(argnums, "es.mutable"),
        cast=as_cast(cast, "es.mutable"),
    )
