"""The target of a call: the model that the call threads.

It is the object that the function is bound to (`receiver`), or some of the arguments:
those that `argnums` names, or else the first.
"""

import operator
from collections.abc import Callable
from typing import Any, Final

from .._tree.walk import all_modules
from .transform import bound_arguments, receiver


Argnums = int | tuple[int, ...] | None


def target(
    f: Any, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Argnums, caller: str
) -> tuple[Any, Callable[[Any], Any]]:
    """The model of `f(*args, **kwargs)`, and the call as a function of the model."""
    name = getattr(f, "__name__", "f")
    # Not `<lambda>`; and the wrappers of Equinox have a sentinel there.
    name = name if isinstance(name, str) and name.isidentifier() else "f"
    if argnums is None:
        if (found := receiver(f)) is not None:
            return found.model, lambda model: found.bind(model)(*args, **kwargs)
        if not args:
            raise TypeError(_NO_MODEL.format(caller, name))
        _check_has_a_model(f, args[0], caller)
        argnums = 0
    named = positions(args, argnums, f"{caller}({name}, argnums={argnums})")
    is_one = not isinstance(argnums, tuple)

    def run(models: Any) -> Any:
        filled = list(args)
        new = (models,) if is_one else models
        for i, model in zip(named, new, strict=True):
            filled[i] = model
        return f(*filled, **kwargs)

    models = tuple(args[i] for i in named)
    return models[0] if is_one else models, run


def _check_has_a_model(f: Any, first: Any, caller: str) -> None:
    """Raise `TypeError` if only a partial has a model, which it binds."""
    modules = all_modules(bound_arguments(f))
    if modules and not all_modules(first):
        raise TypeError(_BOUND.format(caller, type(modules[0]).__name__))


def as_argnums(argnums: Any, caller: str) -> Argnums:
    """`argnums` as an integer or a tuple of integers; `None` if it was not given."""
    if argnums is None:
        return None
    try:
        if isinstance(argnums, (tuple, list)):
            return tuple(operator.index(i) for i in argnums)
        return operator.index(argnums)
    except TypeError:
        raise TypeError(_ARGNUMS.format(caller, repr(argnums))) from None


def positions(args: tuple[Any, ...], argnums: Any, caller: str) -> list[int]:
    """The positions that `argnums` names, as nonnegative integers."""
    numbers: list[int] = []
    for i in argnums if isinstance(argnums, tuple) else (argnums,):
        if not -len(args) <= i < len(args):
            raise TypeError(_NO_ARGUMENT.format(caller, len(args), i))
        if i % len(args) in numbers:
            raise ValueError(_NAMED_TWICE.format(caller, i % len(args)))
        numbers.append(i % len(args))
    return numbers


_ARGNUMS: Final = """`{}(..., argnums={})`: `argnums` is the position of a positional \
argument, an integer, or a tuple of them."""

_NO_ARGUMENT: Final = """`{}` was called with {} positional arguments, so argument {} \
does not exist. Positions count from 0, without the `self` of a decorated method, and \
without arguments passed by name."""

_NAMED_TWICE: Final = """`{}` names argument {} twice. Name each argument once."""

_NO_MODEL: Final = """`{0}({1})` was called without a positional argument, and a model \
that is passed by keyword, or that a partial binds, cannot be written. Pass the model \
by position, `{0}({1})(model, ...)`, or call its method, `{0}(model.{1})(...)`."""

_BOUND: Final = """`{0}`: the function is a partial that binds the `{1}`, and the \
first argument of the call has no module. As in `jax.grad`, the model is the first \
argument of the call, and what a partial binds does not count:

    {0}(ft.partial(f, model))(x)          # wrong
    {0}(f)(model, x)                      # right
    {0}(ft.partial(f, x=x))(model)        # right: the partial binds the rest

If the first argument is the model, although it has no module, say so: `argnums=0`."""
