"""Lazy models: placeholders for values, and what is still missing.

A placeholder is an ordinary leaf of the pytree, so a lazy model already has its final
structure, as far as that is known. The key of each value is folded from its path, so
values do not depend on the order of initialization or on the rest of the model.

The checks of a model before it is used, each a part of the next one:

- `check_initialized`, or `check_none_missing` for visits: nothing is left for `init`.
- `check_usable`, to run or to store it: no number is in the place of an array.
- `check_ready`, to take it apart and rebuild it: no stateful module occurs twice.

`check_given` (`_transforms/reach`) is for functions and arguments of a transform: the
first and the last of these, except for what a scope owns and has checked.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, Final, overload, TYPE_CHECKING, TypeVar

import jax.tree_util as jtu

from .._errors import an, NotInitializedError
from .._kinds.kinds import kind_name, TreePart
from .._tree.base import (
    BaseModule,
    INIT_DONE,
    is_eqx_module,
    is_module,
    keystr,
    Placeholder,
)
from .._tree.compare import check_apart
from .._tree.context import Context, ROOT
from .._tree.dtypes import dtype_for, NUMBERS, strengthen
from .._tree.followers import AbstractPerParameter
from .._tree.keys import key_at
from .._tree.walk import name_of, occurs_twice, Traversal, traverse, Visit, walk
from .._typing import KeyPath


_T = TypeVar("_T")


if TYPE_CHECKING:
    from jaxtyping import PRNGKeyArray

    class Initializer:
        """A placeholder for the value `f(key)`, which `init` draws."""

        # To a type checker, an Initializer is the value that it becomes.
        def __new__(cls, f: Callable[[PRNGKeyArray], _T], /) -> _T: ...  # type: ignore[misc]

else:

    class Initializer(Placeholder):
        """A placeholder for the value `f(key)`, which `init` draws.

        **Arguments:**

        - `f`: takes a PRNG key; returns an array, a pytree, or a whole module. `init`
            calls it once, with a key folded from the placeholder's path in the tree.

        !!! example

            ```python
            import eqx_state as es
            import jax.random as jr


            class Scale(es.Module):
                factor: es.Parameter

                def __init__(self, size):
                    self.factor = es.Initializer(lambda key: jr.normal(key, (size,)))


            scale = Scale(3)
            assert not scale.initialized
            assert scale.init(42).factor.shape == (3,)
            ```
        """

        __slots__ = ("f",)

        def __init__(self, f):
            if not callable(f):
                raise TypeError(
                    f"`es.Initializer` was given {an(type(f).__name__)}: it takes a"
                    " function, `es.Initializer(lambda key: jr.normal(key, (3,)))`."
                )
            self.f = f

        def __repr__(self):
            return "Initializer"

        def _raise(self, *args, **kwargs):
            raise NotInitializedError(_PLACEHOLDER)

        def __call__(self, *args, **kwargs):
            raise NotInitializedError(_PLACEHOLDER + _ARGUMENTS)

        # Using a placeholder as an array or a layer raises our error. JAX looks up
        # `dtype` on its operands.
        dtype = shape = ndim = property(_raise, doc="Not available before `init`.")
        __getitem__ = __iter__ = __len__ = __neg__ = _raise
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _raise
        __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = _raise


@overload
def lazy(cls: type[_T], /, *args: Any, **kwargs: Any) -> _T: ...
@overload
def lazy(cls: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T: ...
def lazy(cls: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
    """A placeholder for `cls(*args, key=key, **kwargs)`, a layer that `init` creates.

    **Raises:**

    - `TypeError`: `cls` is a layer rather than its class, or you passed a `key`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es


        class Net(es.Module):
            linear: eqx.nn.Linear

            def __init__(self, size):
                self.linear = es.lazy(eqx.nn.Linear, size, 2)


        assert Net(3).init(0).linear.weight.shape == (2, 3)
        ```
    """
    if is_eqx_module(cls) or "key" in kwargs:
        raise TypeError(
            "`es.lazy` takes a class and its arguments without the key; `init` creates"
            " the layer, and passes the key:\n\n"
            "    es.lazy(eqx.nn.Linear(2, 3, key=key))        # wrong\n"
            "    es.lazy(eqx.nn.Linear, 2, 3)                 # right"
        )
    return Initializer(ft.partial(_construct, cls, args, kwargs))


def _construct(cls: Any, args: Any, kwargs: Any, key: Any) -> Any:
    return cls(*args, key=key, **kwargs)


def needs_module_init(module: BaseModule) -> bool:
    """Whether a module overrides `module_init`, and the hook has not run."""
    overridden = type(module).module_init is not BaseModule.module_init
    return overridden and not getattr(module, INIT_DONE)


def missing(tree: Any) -> str | None:
    """Describe the first part that is not initialized; `None` if there is none."""
    return _missing(walk(tree))


def _missing(visits: list[Visit]) -> str | None:
    for path, node, _, is_leaf in visits:
        if isinstance(node, Initializer):
            return f"`{name_of(path) or 'the value itself'}` is an `es.Initializer`"
        if not is_leaf and is_module(node) and needs_module_init(node):
            name = name_of(path) or type(node).__qualname__
            return f"`module_init` of `{name}` has not run"
    return None


def check_initialized(tree: Any) -> None:
    """Raise `NotInitializedError` unless everything in `tree` is initialized."""
    check_none_missing(walk(tree))


def check_none_missing(visits: list[Visit]) -> None:
    """`check_initialized` for the visits of a walk."""
    if (what := _missing(visits)) is not None:
        raise NotInitializedError(
            f"The model is used before it is initialized: {what}. Draw the values"
            " first; `init` returns a new model:\n\n    model = model.init(42)"
        )


def check_not_a_class(tree: Any) -> None:
    """Raise `TypeError` for a class, which is a pytree without arrays."""
    if isinstance(tree, type):
        raise TypeError(_A_CLASS.format(tree.__qualname__))


_PLACEHOLDER: Final = """This is an `es.Initializer`, a placeholder for a value. Draw \
the values first: `model = model.init(42)`."""

_ARGUMENTS: Final = """ If you meant to create the layer, pass its arguments to \
`es.lazy`: `es.lazy(eqx.nn.Linear, 4, 2)`."""

_A_CLASS: Final = """`{0}` is a class, which has no arrays. Pass an instance: \
`model = {0}(...)`."""


def check_usable(visits: list[Visit]) -> None:
    """Raise if a model cannot be run, trained or stored; for the visits of a walk.

    Because it is not initialized, or because it has a number where an array should be.
    """
    check_none_missing(visits)
    for path, node, context, is_leaf in visits:
        if is_leaf and context.is_own and type(node) in NUMBERS:
            # An `es.Ema` has the numbers of the model, which may be a plain dict.
            if not issubclass(context.owner or object, AbstractPerParameter):
                raise _number_error(node, context, path)


def _number_error(number: Any, context: Context, path: KeyPath) -> ValueError:
    name, owner, kind = name_of(path), context.owner, context.kind
    field = name if owner is None else f"{owner.__qualname__}.{context.field}"
    dtype = dtype_for(number, kind).name
    said = name, number, field, kind_name(kind or TreePart), keystr(path), dtype
    text = _NUMBER.format(*said)
    if owner is not None and not issubclass(owner, BaseModule):
        text += _NOT_OURS.format(field, owner.__qualname__)
    return ValueError(text)


_NUMBER: Final = """`{0}` is the Python number {1!r}, but `{2}` declares `{3}`, and \
only arrays have a kind. A number would not be trained or saved, and a new one would \
recompile the step. Put in an array:

    model = eqx.tree_at(lambda m: m{4}, model, {1!r})                           # wrong
    model = eqx.tree_at(lambda m: m{4}, model, jnp.asarray({1!r}, "{5}"))   # right

`replace` makes an array of a number, and keeps the dtype."""

_NOT_OURS: Final = """

A call can write `{0}` only if `{1}` is an `es.Module`, which also makes arrays of \
numbers: `class {1}(es.Module)`."""


def check_ready(tree: Any) -> Traversal:
    """Raise if a model is not usable, or contains one stateful module twice."""
    traversal = traverse(tree)
    check_usable(traversal.visits)
    if occurs_twice(traversal.modules):
        check_apart(traversal.visits)
    return traversal


def draw(tree: Any, key: Any, path: KeyPath = (), context: Context = ROOT) -> Any:
    """`tree` with each Initializer replaced by a value, also inside drawn values."""
    visits = [v for v in walk(tree, path, context) if v.is_leaf]
    if not any(isinstance(v.node, Initializer) for v in visits):
        return tree
    new = []
    for visit in visits:
        value = visit.node
        if isinstance(value, Initializer):
            value = value.f(key_at(key, visit.name))
            if issubclass(visit.context.owner or object, BaseModule):
                value = strengthen(value, visit.context.spec)
            value = draw(value, key, visit.path, visit.context)
        new.append(value)
    return jtu.tree_unflatten(jtu.tree_structure(tree), new)
