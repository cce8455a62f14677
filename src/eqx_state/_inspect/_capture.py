"""`es.capture`: the values that layers sow on the way, besides a model's output."""

import functools as ft
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, overload, ParamSpec, TypeVar

import equinox as eqx

from .._kinds._kinds import State
from .._state._scope import Kinds, Scope, Sown
from .._state._sow import Called
from .._transforms._grad import AbstractGrad
from .._transforms._mutable import Argnums, as_argnums, as_kinds, target, thread
from .._transforms._transform import of_one, Transform, wrap
from .._tree._observe import unmarked
from ._outputs import check_replace, Outputs, selector


_M = TypeVar("_M", bound=eqx.Module)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_M_co = TypeVar("_M_co", covariant=True)
_F_co = TypeVar("_F_co", covariant=True)


class _Capture(Transform):
    replace: Any
    outputs: Any = eqx.field(static=True)
    kinds: Kinds = eqx.field(static=True)
    argnums: Argnums = eqx.field(static=True)
    threads = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        __tracebackhide__ = True
        observer = None
        if self.outputs is not None or self.replace:
            observer = Outputs(self.outputs, self.replace)
        new_scope = ft.partial(Scope, self.kinds, captures=True, observer=observer)
        f, bound, options = _without_partials(self.f)
        if isinstance(f, AbstractGrad):
            result, sown = f.run((*bound, *args), {**options, **kwargs}, new_scope)
        else:
            call = target(self.f, args, kwargs, self.argnums, "es.capture")
            scope = new_scope()
            result = thread(call.model, scope, call.run, call)
            sown = scope.sown
        found = _by_name(sown)
        if observer is not None:
            observer.check_replaced()
            found = {name: unmarked(x, observer.key) for name, x in found.items()}
        return result, found


def _by_name(sown: Sown) -> dict[str, Any]:
    """The values by name; several under one name are a tuple."""
    found: dict[str, Any] = {}
    for key, values in sown.items():
        name = key.name if isinstance(key, Called) else key
        if name in found:
            raise ValueError(_BOTH.format(name))
        found[name] = values[0] if len(values) == 1 else tuple(values)
    return found


def _without_partials(f: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What a partial calls, and the arguments that it adds. A bound method is one."""
    args, kwargs = (), {}
    while isinstance(f, (ft.partial, eqx.Partial)):
        args, kwargs = (*f.args, *args), {**f.keywords, **kwargs}
        f = f.func
    return f, args, kwargs


_BOTH: Final = """`es.capture(..., outputs=...)`: `{}` is a module whose output was \
captured, and a value was sown under the same name. Sow it under another name."""

_THREADED_ALREADY: Final = """
`es.capture` threads the state itself, as `es.mutable` does. It was given a transform \
that does the same on its own copy, so nothing that is sown would come out:

    es.capture(es.mutable(model))(x)             # wrong
    (y, model), sown = es.capture(model)(x)      # right

    es.capture(es.jit(es.value_and_grad(loss)))(model, x)     # wrong
    es.jit(es.capture(es.value_and_grad(loss)))(model, x)     # right
"""

_ARGNUMS_OF_GRAD: Final = """
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
    f: _M,
    *,
    outputs: Any = None,
    replace: Mapping[str, Any] | None = None,
    kinds: Any = State,
    argnums: None = None,
) -> _Captured[_M, _M]: ...
@overload
def capture(
    f: Callable[_P, _R],
    *,
    outputs: Any = None,
    replace: Mapping[str, Any] | None = None,
    kinds: Any = State,
    argnums: int | None = None,
) -> Callable[_P, tuple[tuple[_R, Any], dict[str, Any]]]: ...
@overload
def capture(
    f: Callable[_P, _R],
    *,
    outputs: Any = None,
    replace: Mapping[str, Any] | None = None,
    kinds: Any = State,
    argnums: tuple[int, ...],
) -> Callable[_P, tuple[tuple[_R, tuple[Any, ...]], dict[str, Any]]]: ...
@of_one
def capture(
    f: Any,
    *,
    outputs: Any = None,
    replace: Mapping[str, Any] | None = None,
    kinds: Any = State,
    argnums: int | tuple[int, ...] | None = None,
) -> Any:
    """`es.mutable(f)` that also returns values from inside: what modules sow, and the
    outputs of modules that you name.

    A layer calls `self.sow("attention", weights)`. Outside `es.capture` that does
    nothing and costs nothing, so it may stay in the code. The output of a layer needs
    no code in the layer: `outputs=eqx.nn.Linear`.

    **Arguments:**

    - `f`, `kinds`, `argnums`: as for [`es.mutable`][eqx_state.mutable]; `f` may also be
        an `es.value_and_grad` or an `es.grad`.
    - `outputs`: the modules whose outputs are wanted, those of every call of their
        `__call__`. A module class or a tuple of them; a glob on names, in which `*`
        stands for any characters and `?` for one, `"layers[*].attention"`; or a
        function of `(name, module)` that returns a bool. The name of the root is `""`.
        There need not be a module of a class.
    - `replace`: a mapping from names of modules to what the rest of the model sees in
        place of their outputs: a value, or a function of the output. A value has the
        structure, shapes and dtypes of the output (under a transform, of the output of
        one lane or step), and a number fills it. The module itself still runs.

    **Returns:**

    A function of the same arguments that returns `((output, new_model), found)`; for
    `es.value_and_grad(loss)`, `(((loss, new_model), grads), found)`. `found` is a
    dictionary. The name of an output is that of its module, `"layers[0]"`; to what is
    sown the name of the value is added, `"layers[0].attention"`. Several values under
    one name come as a tuple. Under `es.vmap`, `es.scan` and plain `jax.vmap` the values
    of all lanes or steps are stacked along a new first axis; they come out of `es.jit`,
    `es.checkpoint` and an inner `es.value_and_grad` unchanged. With `replace`, `found`
    has what was put in the place of the output.

    A copy that is made inside the call (`self.layer.eval()`, `eqx.filter_vmap(
    self.layer)`, an inner `es.mutable`) sows nothing; its outputs are found.

    While it runs, a module that is selected is an instance of a subclass of its class,
    which knows its name. The functions of `es`, an `es.Optimizer` among them, take such
    a tree and an ordinary one together. `jax.tree.map`, and so plain optax, does not;
    nor does it stack two selected layers.

    **Raises:**

    - `ValueError`: something was found in a step of `es.while_loop` or `es.fori_loop`,
        or only in some branches of `es.cond` or `es.switch`; `replace` has a name that
        no module has, or whose module was not called, or a value that does not fit;
        `outputs` is a glob that matches no
        module; an output and a sown value have the same name.
    - `es.TraceError`: something was sown inside a plain JAX transform; a module was
        called inside one other than `jax.vmap`.
    - `TypeError`: a value is not a pytree of arrays; or `f` is already an `es.mutable`,
        or a gradient inside another transform. Otherwise as `es.mutable`.

    It follows `sow` and `capture_intermediates` of Flax Linen, and the hooks of
    PyTorch.

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

        _, found = es.capture(es.vmap(net), outputs="layers[?]")(xs)
        assert found["layers[1]"].tolist() == [[6.0, 18.0], [30.0, 42.0]]

        patch = {"layers[0]": jnp.zeros_like}
        (ys, _), found = es.capture(es.vmap(net), outputs=Net, replace=patch)(xs)
        assert (found[""] == 0).all() and (ys == 0).all()
        ```
    """
    argnums = as_argnums(argnums, "es.capture")
    _check_sees_the_model(f, argnums)
    selector(outputs)  # for its error
    check_replace(replace)
    return wrap(
        _Capture,
        f,
        replace=dict(replace or {}),
        outputs=outputs,
        kinds=as_kinds(kinds, "es.capture"),
        argnums=argnums,
    )
