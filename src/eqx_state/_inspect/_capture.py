"""`es.capture`: the values that layers sow on the way, besides a model's output."""

import functools as ft
from collections.abc import Callable
from typing import Any, Generic, overload, ParamSpec, TypeVar

import equinox as eqx

from .._kinds._kinds import State
from .._state._scope import Kinds, Scope
from .._transforms._grad import AbstractGrad
from .._transforms._mutable import Argnums, as_argnums, as_kinds, target, thread
from .._transforms._transform import Transform, wrap


_M = TypeVar("_M", bound=eqx.Module)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_M_co = TypeVar("_M_co", covariant=True)
_F_co = TypeVar("_F_co", covariant=True)


class _Capture(Transform):
    kinds: Kinds = eqx.field(static=True)
    argnums: Argnums = eqx.field(static=True)
    threads = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        __tracebackhide__ = True
        new_scope = ft.partial(Scope, self.kinds, captures=True)
        f, bound, options = _without_partials(self.f)
        if isinstance(f, AbstractGrad):
            result, sown = f.run((*bound, *args), {**options, **kwargs}, new_scope)
        else:
            call = target(self.f, args, kwargs, self.argnums, "es.capture")
            scope = new_scope()
            result = thread(call.model, scope, call.run, call)
            sown = scope.sown
        return result, {
            name: values[0] if len(values) == 1 else tuple(values)
            for name, values in sown.items()
        }


def _without_partials(f: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What a partial calls, and the arguments that it adds. A bound method is one."""
    args, kwargs = (), {}
    while isinstance(f, (ft.partial, eqx.Partial)):
        args, kwargs = (*f.args, *args), {**f.keywords, **kwargs}
        f = f.func
    return f, args, kwargs


_THREADED_ALREADY = """
`es.capture` threads the state itself, as `es.mutable` does. It was given a transform \
that does the same on its own copy, so nothing that is sown would come out:

    es.capture(es.mutable(model))(x)             # wrong
    (y, model), sown = es.capture(model)(x)      # right

    es.capture(es.jit(es.value_and_grad(loss)))(model, x)     # wrong
    es.jit(es.capture(es.value_and_grad(loss)))(model, x)     # right
"""

_ARGNUMS_OF_GRAD = """
`es.capture({grad}(...), argnums={argnums})`: here `{grad}` threads the model, so it \
takes `argnums=`:

    es.capture({grad}(loss), argnums={argnums})     # wrong
    es.capture({grad}(loss, argnums={argnums}))     # right
"""


def _check_sees_the_model(f: Any, argnums: Argnums) -> None:
    """Raise `TypeError` if `f` would run on its own copy, and sow nothing for us."""
    f = _without_partials(f)[0]
    if isinstance(f, AbstractGrad):
        if argnums is not None:
            text = _ARGNUMS_OF_GRAD.format(grad=f.name, argnums=argnums)
            raise TypeError(text.strip())
        return
    while isinstance(f, Transform):
        if f.threads:
            raise TypeError(_THREADED_ALREADY.strip())
        f = _without_partials(f.f)[0]


class _Captured(Generic[_M_co, _F_co]):
    """To a type checker, `capture(model)`: see `_Threaded` of `es.mutable`."""

    def __call__(
        self: "_Captured[_M_co, Callable[_P, _R]]", *args: _P.args, **kwargs: _P.kwargs
    ) -> tuple[tuple[_R, _M_co], dict[str, Any]]: ...


@overload
def capture(
    f: _M, *, kinds: Any = State, argnums: None = None
) -> _Captured[_M, _M]: ...
@overload
def capture(
    f: Callable[_P, _R], *, kinds: Any = State, argnums: int | None = None
) -> Callable[_P, tuple[tuple[_R, Any], dict[str, Any]]]: ...
@overload
def capture(
    f: Callable[_P, _R], *, kinds: Any = State, argnums: tuple[int, ...]
) -> Callable[_P, tuple[tuple[_R, tuple[Any, ...]], dict[str, Any]]]: ...
def capture(
    f: Any, *, kinds: Any = State, argnums: int | tuple[int, ...] | None = None
) -> Any:
    """`es.mutable(f)` that also returns what the modules sow: attention maps,
    activations, anything for a look inside.

    A layer calls `self.sow("attention", weights)`. Outside `es.capture` that does
    nothing and costs nothing, so it may stay in the code.

    **Arguments:**

    - `f`, `kinds`, `argnums`: as for [`es.mutable`][eqx_state.mutable]; `f` may also be
        an `es.value_and_grad` or an `es.grad`.

    **Returns:**

    A function of the same arguments that returns `((output, new_model), sown)`; for
    `es.value_and_grad(loss)`, `(((loss, new_model), grads), sown)`. `sown` is a
    dictionary. Its names are made of those of the module and of the value, such as
    `"layers[0].attention"`. Several values under one name come as a tuple. Under
    `es.vmap` and `es.scan` the values of all lanes or steps are stacked along a new
    first axis; they come out of `es.jit` and `es.checkpoint` unchanged. A copy that is
    made inside the call (`self.layer.eval()`, `eqx.filter_vmap(self.layer)`, an inner
    `es.mutable` or `es.value_and_grad`) sows nothing. For what is sown in a loss,
    capture the whole gradient: `es.capture(es.value_and_grad(loss))(model, x)`.

    **Raises:**

    - `ValueError`: something was sown in a step of `es.while_loop` or `es.fori_loop`,
        or only in some branches of `es.cond` or `es.switch`.
    - `es.TraceError`: something was sown inside a plain JAX transform.
    - `TypeError`: a sown value is not a pytree of arrays; or `f` is already an
        `es.mutable`, or a gradient inside another transform. Otherwise as `es.mutable`.

    It follows `sow` of Flax Linen.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Layer(es.Module):
            scale: es.Parameter

            def __call__(self, x):
                x = self.scale * x
                self.sow("mean", jnp.mean(x))
                return x


        class Net(es.Module):
            layers: list[Layer]

            def __call__(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x


        net = Net([Layer(2.0), Layer(3.0)])
        xs = jnp.array([[1.0, 3.0], [5.0, 7.0]])
        (ys, net), sown = es.capture(es.vmap(net))(xs)
        assert list(sown) == ["layers[0].mean", "layers[1].mean"]
        assert sown["layers[0].mean"].tolist() == [4.0, 12.0]
        ```
    """
    argnums = as_argnums(argnums, "es.capture")
    _check_sees_the_model(f, argnums)
    return wrap(_Capture, f, kinds=as_kinds(kinds, "es.capture"), argnums=argnums)
