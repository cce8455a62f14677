"""The base class of all transforms; and callables taken apart, one layer at a time.

A transform is a callable pytree that wraps a callable. A wrapped model is a node of
this pytree, so the transforms of JAX and Equinox see its arrays:
`eqx.filter_jit(es.mutable(model))` traces the parameters.

A user calls `es.mutable(ft.partial(es.vmap(model.encode), scale=2))`. Everything that
looks into such a callable does so here: which model it is bound to (`receiver`), and
what is inside (`layer_of`).
"""

import functools as ft
import inspect
import types
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, Final, NamedTuple, TYPE_CHECKING

import equinox as eqx
import jax.tree_util as jtu

from .._compat import boundary, BoundMethod
from .._errors import an, show
from .._tree.base import is_eqx_module, is_module
from .._tree.rules import misplaced
from .._typing import P


class Transform(eqx.Module):
    """A callable that wraps a callable `f`: a pytree, and a decorator for methods."""

    f: Any
    # Whether a call runs on a private copy of the model, and returns a new model.
    returns_model: ClassVar[bool] = False
    # Whether `__call__` removes our frames from tracebacks itself, and so needs no
    # `boundary`.
    hides_frames: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in cls.__dict__ and not cls.hides_frames:
            cls.__call__ = boundary(cls.__call__)

    if not TYPE_CHECKING:
        # Equinox's `__getattribute__` wraps each bound method in a module. The creation
        # of that module would warn about an `f` such as `jax.jit(model)`.
        __getattribute__ = object.__getattribute__

    @property
    def __wrapped__(self) -> Any:
        return self.f

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        # Bind `instance` to the innermost function. Otherwise, in `@es.jit @es.vmap
        # def f(self, x)`, `es.vmap` would map over `self`.
        if isinstance(self.f, Transform):
            return self.of(self.f.__get__(instance, owner))
        return self.of(Bound(self.f, instance))

    def of(self, f: Any) -> Any:
        """The same transform of a different function."""
        return made(type(self), {**self.__dict__, "f": f})


class Bound(eqx.Partial[Any]):
    """A decorated method that is bound to its object, `args[0]`."""


class Unbound(Transform):
    """A transform `f` of a method, as a function whose first argument is the object."""

    def __call__(self, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.f.__get__(instance)(*args, **kwargs)


def unbound(f: Any) -> Any:
    """A method as a function whose first argument is the object."""
    return made(Unbound, {"f": f}) if isinstance(f, Transform) else f


def check_callable(f: Any) -> None:
    """Raise `TypeError` unless `f` can be called."""
    if (said := misplaced(f)) or not callable(f):
        raise TypeError(said or _NOT_A_FUNCTION.format(an(type(f).__name__)))


def made(cls: Any, fields: dict[str, Any]) -> Any:
    """A module with these fields, created without `__init__`.

    In `__init__`, Equinox warns about a field such as `jax.vmap(model)`, because that
    function hides the parameters of `model`. The warning is meant for layers, and a
    transform is not a layer.
    """
    new = object.__new__(cls)
    new.__dict__.update(fields)
    return new


def wrap(
    cls: Callable[Concatenate[Any, P], Transform],
    f: Any,
    *args: P.args,
    **options: P.kwargs,
) -> Any:
    """A transform of `f`, with the name and the docstring of `f`.

    `cls`: its class. `options` are the fields of this class besides `f`, by name.
    """
    assert isinstance(cls, type)
    assert not args
    check_callable(f)
    f = method_as_pytree(f)
    if cls.returns_model and isinstance(f, type) and issubclass(f, eqx.Module):
        raise TypeError(_A_CLASS.format(f.__name__))
    transform = made(cls, {"f": f, **options})
    if jtu.all_leaves([f]):
        return eqx.module_update_wrapper(transform)
    # `eqx.module_update_wrapper` would copy `f` if it is a model. A model has no name,
    # but a transform of a function has: copy that.
    named = f.__dict__ if is_eqx_module(f) else {}
    names = {name: named[name] for name in ft.WRAPPER_ASSIGNMENTS if name in named}
    transform.__dict__.update(names)
    return transform


def method_as_pytree(f: Any) -> Any:
    """`f`, but `model.__call__` as a pytree, as all other methods of a module are."""
    is_method = type(f) is types.MethodType and is_eqx_module(f.__self__)
    return BoundMethod(f.__func__, f.__self__) if is_method else f


def with_aux(out: Any) -> Any:
    """The output of a function with `has_aux=True`, which has to be a pair."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(_NOT_A_PAIR.format(show(out)))
    return out


# --- Callables taken apart ------------------------------------------------------------


PARTIALS: Final = (ft.partial, jtu.Partial, eqx.Partial)


class Layer(NamedTuple):
    """One layer of a callable.

    - `inner`: the callable inside.
    - `args`, `keywords`: the arguments that this layer binds.
    """

    inner: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]


def layer_of(f: Any) -> Layer | None:
    """The outermost layer of a callable; `None` for a plain function or a model."""
    if isinstance(f, Transform):
        return Layer(f.f, (), {})
    if isinstance(f, PARTIALS):
        return Layer(f.func, f.args, f.keywords)
    if is_bound_method(f):
        return Layer(f.__func__, (f.__self__,), {})
    return None


def with_inner(f: Any, inner: Any) -> Any:
    """The same transform or partial, of a different callable."""
    if isinstance(f, Transform):
        return f.of(inner)
    if is_bound_method(f):  # of a model or a partial, to an object that is no module
        return types.MethodType(inner, f.__self__)
    return type(f)(inner, *f.args, **f.keywords)


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
        return Receiver(inner.model, lambda model: with_inner(f, inner.bind(model)))
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


_NOT_A_FUNCTION: Final = """A transform was given {}, which cannot be called. It \
takes a function, a callable module, or a bound method: `es.mutable(model.encode)(x)`. \
To transform a property, write the transform below `@property`."""

_NOT_A_PAIR: Final = """With `has_aux=True` the function must return a pair, `(out, \
aux)`, but it returned `{}`. Return all other values in `aux`: `return loss, (logits, \
metrics)`."""

_A_CLASS: Final = """A transform that returns a new model was given the class `{0}`. \
It needs an instance, which has the state. Create one, and assign the new model: \
`model = {0}(...)`, and then `y, model = es.mutable(model)(x)`."""
