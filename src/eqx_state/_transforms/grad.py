"""Gradients of stateful functions: `es.value_and_grad` and `es.grad`.

The leaves to differentiate are the inputs of a function that makes a model of them and
of the others, and runs the call as `es.mutable` does. The new model is an auxiliary
output. So is what the call writes to other modules of an outer scope (`lift`).
"""

from collections.abc import Callable
from typing import Any, Concatenate, Final, Literal, overload, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._errors import show
from .._kinds.kinds import State
from .._state.codecs import snapshot
from .._state.lazy import check_ready
from .._state.lost import note_written
from .._state.scope import as_kinds, is_any_open, Kinds, Scope, Sown
from .._state.sow import reporting
from .._tree.combinators import trainable
from .._tree.filters import bind_to_visits, check_filter, Filter, TO_TRAIN
from .._tree.parts import is_inexact
from .._tree.rules import check_names, nothing_selected
from .._typing import P, R
from .cast import as_cast, Cast, CastLike, codecs_of
from .clashes import check_not_replaced
from .lift import Lifted
from .mutable import run_on_copy
from .target import Argnums, as_argnums, target
from .transform import Transform, with_aux, wrap


_M = TypeVar("_M")
_A = TypeVar("_A")


ObservedScope = Callable[..., Scope]


class Gradient(Transform):
    """`es.value_and_grad` or `es.grad`; `name` says which."""

    wrt: Filter = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    argnums: Argnums = eqx.field(static=True)
    kinds: Kinds = eqx.field(static=True)
    cast: Cast | None = eqx.field(static=True)
    name: str = eqx.field(static=True)
    returns_model = True

    def run(
        self, args: Any, kwargs: Any, observed: ObservedScope = Scope
    ) -> tuple[Any, Sown]:
        """The result of a call, and the values sown in it.

        `observed` creates the scope of the call. `es.capture` passes it if it is to
        record the sown values of this call itself.
        """
        model, call = target(self.f, args, kwargs, self.argnums, self.name)
        # Check before unflattening: a module that occurs twice would become two
        # modules, and the mistake could not be detected there.
        given = check_ready(model)
        reports = reporting(model)
        # The model of the call is copied, and the call returns a new one. All other
        # modules that it reaches, in closures and in the other arguments, are the
        # objects themselves. The model is also among them: `f` may close over it.
        lifted, original = Lifted((self.f, args, kwargs)), model
        if is_any_open():  # the gradients belong to no scope
            model = snapshot(model)
            given = given.again(model)
        selects = bind_to_visits((self.wrt, is_inexact), model)
        selected = [selects(visit) for visit in given.visits if visit.is_leaf]
        if not any(selected):
            raise nothing_selected(f"{self.name}(wrt", self.wrt, model)
        check_names(self.wrt, [model], f"`{self.name}(wrt=…)`")

        def filled(inputs: list[Any]) -> list[Any]:
            """The leaves of the model, with these instead of the selected ones."""
            pairs = zip(inputs, given.leaves, strict=True)
            return [old if new is None else new for new, old in pairs]

        def differentiated(inputs: list[Any]) -> tuple[Any, Any]:
            # Here, because a scope belongs to the trace in which it was created.
            codecs = codecs_of(self.cast)
            scope = observed(self.kinds, reports=reports, codecs=codecs)
            here = given.with_leaves(filled(inputs))

            def run(*_: Any) -> Any:  # `call` has the arguments
                return run_on_copy(model, scope, call, here)

            ran = lifted.run(lifted.values, run, (self.f, args, kwargs))
            out, new = ran.out
            loss = with_aux(out)[0] if self.has_aux else out
            _check_loss(loss, self.name)
            return loss, (out, new, scope.sown, ran._replace(out=None))

        value_and_grad = eqx.filter_value_and_grad(differentiated, has_aux=True)
        # Of a NumPy array JAX would return a literal of a private class.
        pairs = zip(given.leaves, selected, strict=True)
        inputs = [jnp.asarray(x) if is_input else None for x, is_input in pairs]
        (_, (out, new, sown, ran)), gradient = value_and_grad(inputs)
        returned = jtu.tree_leaves(new)
        pairs = zip(returned, filled(inputs), strict=True)
        is_new = [x is not old for x, old in pairs]
        if ran.written:
            written_too = lifted.by_slot(original, is_new)
            check_not_replaced(lifted.leaves, ran.written, written_too)
        lifted.commit(ran)
        # What was not written is the caller's own.
        triples = zip(is_new, returned, given.leaves, strict=True)
        leaves = (new if changed else own for changed, new, own in triples)
        new = given.structure.unflatten(leaves)
        grads = given.structure.unflatten(gradient)
        names = _UNPACKED[self.name, self.has_aux]
        note_written(grads, model, new, f"{names} = {self.name}(loss_fn)(model)")
        if self.name == "es.value_and_grad":
            return ((out, new), grads), sown
        return (grads, (out[1], new) if self.has_aux else new), sown

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.run(args, kwargs)[0]


def _gradient(
    name: str, f: Any, wrt: Any, kinds: Any, argnums: Any, cast: Any, has_aux: bool
) -> Any:
    check_filter(wrt, TO_TRAIN)
    return wrap(
        Gradient,
        f,
        wrt=wrt,
        has_aux=has_aux,
        kinds=as_kinds(kinds, name),
        argnums=as_argnums(argnums, name),
        cast=as_cast(cast, name),
        name=name,
    )


def _check_loss(loss: Any, caller: str) -> None:
    # `.item()` of a tracer of JAX is a number, whose gradient would be zero.
    is_number = isinstance(loss, float)
    is_scalar = eqx.is_array_like(loss) and jnp.shape(loss) == ()
    is_floating = is_scalar and jnp.issubdtype(jnp.result_type(loss), jnp.floating)
    if is_number or not is_floating:
        raise TypeError(_NOT_A_LOSS.format(caller, show(loss)))


_UNPACKED: Final = {  # by name and `has_aux`
    ("es.value_and_grad", False): "(loss, model), grads",
    ("es.value_and_grad", True): "((loss, aux), model), grads",
    ("es.grad", False): "grads, model",
    ("es.grad", True): "grads, (aux, model)",
}

_NOT_A_LOSS: Final = """The function under `{}` returned `{}` as its loss, and a \
gradient needs one real number, as an array of floats. Reduce it, `jnp.mean(loss)`; \
leave out `.item()`; if the function returns more than the loss, `(loss, aux)`, pass \
`has_aux=True`. Comparisons, `argmax` and rounding have no gradient, so converting an \
integer loss would give zeros: use a loss without them."""


@overload
def value_and_grad(
    f: Callable[Concatenate[_M, P], R],
    *,
    wrt: Filter = trainable,
    has_aux: Literal[False] = False,
    kinds: Any = State,
    argnums: Literal[0] | None = None,
    cast: CastLike = None,
) -> Callable[Concatenate[_M, P], tuple[tuple[R, _M], _M]]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[_M, P], tuple[R, _A]],
    *,
    wrt: Filter = trainable,
    has_aux: Literal[True],
    kinds: Any = State,
    argnums: Literal[0] | None = None,
    cast: CastLike = None,
) -> Callable[Concatenate[_M, P], tuple[tuple[tuple[R, _A], _M], _M]]: ...
@overload
def value_and_grad(
    f: Callable[P, R],
    *,
    wrt: Filter = trainable,
    has_aux: bool = False,
    kinds: Any = State,
    argnums: int | tuple[int, ...],
    cast: CastLike = None,
) -> Callable[P, tuple[tuple[R, Any], Any]]: ...
def value_and_grad(
    f: Any,
    *,
    wrt: Any = trainable,
    has_aux: bool = False,
    kinds: Any = State,
    argnums: int | tuple[int, ...] | None = None,
    cast: CastLike = None,
) -> Any:
    """A function that returns the value of `f`, the new model, and the gradients.

    **Arguments:**

    - `f`: returns a scalar loss, or `(loss, aux)`. Its model is found as in
        `es.mutable`, usually as the first argument. `f` may write the model's state.
    - `wrt`: the filter for the arrays to differentiate with respect to. Only inexact
        arrays count. Default: `es.trainable`, every `Parameter` that is not frozen.
    - `has_aux`: whether `f` returns `(loss, aux)`.
    - `kinds`: the kind, or tuple of kinds, that `f` may write, as for `es.mutable`. A
        teacher whose running statistics change in a `target: es.Buffer[Encoder]` needs
        `kinds=(es.State, es.Buffer)`.
    - `argnums`: the positions of the arguments that are models, as for `es.mutable`.
        With a tuple, the new models and the gradients are tuples. An argument need not
        be a model: if `argnums=1` names an array, `grads` is the gradient with respect
        to that array.
    - `cast`: the dtypes of the model inside the call, as for `es.mutable`. The
        gradients have the dtypes of the parameters outside.

    **Returns:**

    A function of the same arguments that returns `((loss, model), grads)`, or
    `(((loss, aux), model), grads)`: the result of `es.mutable(f)`, and the gradients.
    `grads` has the structure of the model, with `None` outside `wrt`, as optax,
    `eqx.apply_updates` and `es.Optimizer` expect it.

    Called inside a scope of `es.mutable`, it also updates the state of the other
    modules that `f` uses, once, like every transform: those that it closes over, and
    those in other arguments. In a model, `es.grad(lambda x: self.critic(x))(x)` gives
    the gradients of a critic by its input, for a gradient penalty.

    **Raises:**

    - `TypeError`: the loss is not a real scalar, or is a Python number; or `wrt` is not
        a filter.
    - `ValueError`: `wrt` selects no inexact array, or no array has a name in it; or
        inside a scope, `f` writes a module that is part of the model also through its
        closure or through a different argument.
    - All errors of `es.mutable`.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Scale(es.Module):
            factor: es.Parameter
            calls: es.State

            def __call__(self, x):
                self.calls = self.calls + 1
                return self.factor * x


        def loss_fn(model, x):
            return model(x) ** 2


        (loss, model), grads = es.value_and_grad(loss_fn)(Scale(3.0, 0), 2.0)
        assert (loss, model.calls, grads.factor, grads.calls) == (36.0, 1, 24.0, None)
        ```
    """
    return _gradient("es.value_and_grad", f, wrt, kinds, argnums, cast, has_aux)


@overload
def grad(
    f: Callable[Concatenate[_M, P], Any],
    *,
    wrt: Filter = trainable,
    has_aux: Literal[False] = False,
    kinds: Any = State,
    argnums: Literal[0] | None = None,
    cast: CastLike = None,
) -> Callable[Concatenate[_M, P], tuple[_M, _M]]: ...
@overload
def grad(
    f: Callable[Concatenate[_M, P], tuple[Any, _A]],
    *,
    wrt: Filter = trainable,
    has_aux: Literal[True],
    kinds: Any = State,
    argnums: Literal[0] | None = None,
    cast: CastLike = None,
) -> Callable[Concatenate[_M, P], tuple[_M, tuple[_A, _M]]]: ...
@overload
def grad(
    f: Callable[P, Any],
    *,
    wrt: Filter = trainable,
    has_aux: bool = False,
    kinds: Any = State,
    argnums: int | tuple[int, ...],
    cast: CastLike = None,
) -> Callable[P, tuple[Any, Any]]: ...
def grad(
    f: Any,
    *,
    wrt: Any = trainable,
    has_aux: bool = False,
    kinds: Any = State,
    argnums: int | tuple[int, ...] | None = None,
    cast: CastLike = None,
) -> Any:
    """A function that returns the gradients of `f`, and the new model.

    The arguments are those of [`es.value_and_grad`][eqx_state.value_and_grad]. A call
    of the function returns `(grads, model)`; with `has_aux=True`, `(grads, (aux,
    model))`.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp

        model = {"w": jnp.array(3.0)}
        grads, model = es.grad(lambda model, x: model["w"] * x)(model, 2.0)
        assert grads["w"] == 2.0
        ```
    """
    return _gradient("es.grad", f, wrt, kinds, argnums, cast, has_aux)
