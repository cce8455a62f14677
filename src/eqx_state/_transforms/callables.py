"""Callables taken apart: partials, bound methods and transforms, one layer at a time.

A user calls `es.mutable(ft.partial(es.vmap(model.encode), scale=2))`. Everything that
looks into such a callable does so here: which model it is bound to (`receiver`), and
what is inside (`layer_of`).
"""

import functools as ft
import inspect
import types
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._compat import BoundMethod
from .._tree.base import is_eqx_module, is_module
from .transform import Bound, made, Transform


PARTIALS: Final = (ft.partial, jtu.Partial, eqx.Partial)


class Layer(NamedTuple):
    """One layer of a callable.

    - `inner`: the callable inside.
    - `args`, `keywords`: the arguments that this layer binds.
    - `around`: puts the same layer around a different callable.
    """

    inner: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    around: Callable[[Any], Any]


def layer_of(f: Any) -> Layer | None:
    """The outermost layer of a callable; `None` for a plain function or a model."""
    if isinstance(f, Transform):
        return Layer(f.f, (), {}, f.of)
    if isinstance(f, PARTIALS):
        new = type(f)
        around = lambda inner: new(inner, *f.args, **f.keywords)  # noqa: E731
        return Layer(f.func, f.args, f.keywords, around)
    if is_bound_method(f):
        bind = lambda inner: types.MethodType(inner, f.__self__)  # noqa: E731
        return Layer(f.__func__, (f.__self__,), {}, bind)
    return None


def with_origin_as_leaf(f: Any, origin: Any) -> Any:
    """`f` as a pytree in which its innermost function, `origin`, is not static data.

    It is static data only in a bound method of Equinox's. Replace just this
    method, by its object. All other layers decide what `f` does, so they stay: the
    same object may have two methods with one `origin`, below different decorators.
    """
    if BoundMethod in type(f).__mro__:
        return (f.__self__,) if f.__func__ is origin else f
    if not isinstance(f, (Transform, eqx.Partial)):
        return f
    name = "f" if isinstance(f, Transform) else "func"
    old = getattr(f, name)
    new = with_origin_as_leaf(old, origin)
    return f if new is old else made(type(f), {**vars(f), name: new})


def is_bound_method(f: Any) -> bool:
    """Whether `f` is a bound method: Python's, or Equinox's, which is a pytree."""
    return isinstance(f, types.MethodType) or BoundMethod in type(f).__mro__


class Receiver(NamedTuple):
    """The model that a callable is bound to; `bind` binds it to a different one."""

    model: Any
    bind: Callable[[Any], Any]


def receiver(f: Any) -> Receiver | None:
    """The model that a callable is bound to; `None` if it is an argument of the call.

    A model is bound to itself, and a method of a model to the model. Transforms and
    partials are bound to what is inside them. But `ft.partial(distill, teacher)` is
    like `lambda student: distill(teacher, student)`, whose model is the student. The
    object of `trainer.loss` is not a model, so the model is an argument, too.
    """
    if _is_decorated_method(f) and is_eqx_module(f.args[0]):
        return Receiver(f.args[0], lambda model: type(f)(f.func, model))
    if is_bound_method(f) and is_eqx_module(f.__self__):
        return Receiver(f.__self__, lambda model: types.MethodType(f.__func__, model))
    if (layer := layer_of(f)) is not None:
        if (inner := receiver(layer.inner)) is None:
            return None
        return Receiver(inner.model, lambda model: layer.around(inner.bind(model)))
    if is_eqx_module(f):
        # `eqx.filter_jit(f)` is a module, too; the model of a function is an argument.
        wrapped = getattr(f, "__wrapped__", None)
        is_function = callable(wrapped) and receiver(wrapped) is None
        is_function &= not is_module(f)  # a user's own model
        return None if is_function else Receiver(f, lambda model: model)
    return None


def _is_decorated_method(f: Any) -> bool:
    """Whether `f` is a method that a transform of `es` or of Equinox decorates.

    Equinox binds a method below `@eqx.filter_jit` by an `eqx.Partial`, as a user may do
    with any function.
    """
    if isinstance(f, Bound):
        return True
    is_one = type(f) is eqx.Partial and len(f.args) == 1 and not f.keywords
    if not is_one or not is_wrapper_of_equinox(f.func):
        return False
    name = getattr(f.func, "__name__", "")
    return inspect.getattr_static(type(f.args[0]), name, None) is f.func


def is_wrapper_of_equinox(f: Any) -> bool:
    """Whether `f` is the result of `eqx.filter_jit`, `eqx.filter_vmap` and the like."""
    return type(f).__module__.startswith("equinox.") and hasattr(f, "__wrapped__")


def without_partials(f: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What is inside nested partials, and all arguments that they bind."""
    args, kwargs = (), {}
    while isinstance(f, PARTIALS):
        args, kwargs = (*f.args, *args), {**f.keywords, **kwargs}
        f = f.func
    return f, args, kwargs


def bound_arguments(f: Any) -> tuple[Any, ...]:
    """The arguments that the partials around a callable bind."""
    bound: list[Any] = []
    while (layer := layer_of(f)) is not None:
        bound += [*layer.args, *layer.keywords.values()]
        f = layer.inner
    return tuple(bound)
