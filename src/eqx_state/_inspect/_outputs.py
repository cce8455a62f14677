"""Which outputs `es.capture` keeps, and which it replaces: `outputs=`, `replace=`."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax.numpy as jnp
import jax.tree_util as jtu

from .._state._fit import fit_leaf, same_type
from .._state._sow import Called, keep
from .._transforms._arguments import why_not_called
from .._tree._base import is_eqx_module
from .._tree._filters import compiled_glob
from .._tree._observe import can_be_observed, Observer, OBSERVING
from .._tree._parts import parts
from .._tree._show import show
from .._tree._stacks import stacks_of
from .._tree._surgery import modules
from .._tree._weak_types import NUMBERS
from .._typing import PyTree


class Outputs(Observer):
    """Keeps the outputs of the modules that `which` selects."""

    def __init__(self, which: Any, replace: Mapping[str, Any]):
        self.selects = selector(which)
        self.which, self.replace = which, replace
        self.replaced: set[str] = set()
        depth = sum(isinstance(x.observer, Outputs) for x in OBSERVING.get().values())
        # Programs have what `replace` puts in the place of outputs as constants.
        self.key = ("es.capture", depth, object() if replace else which)

    def select(self, name: str, module: Any) -> tuple[str, bool] | None:
        shows = self.selects(name, module)
        return (name, shows) if shows or name in self.replace else None

    def called(self, scope: Any, mark: Any, call: Any, args: Any, kwargs: Any) -> Any:
        __tracebackhide__ = True
        name, shows = mark
        out = call(*args, **kwargs)
        if name in self.replace:
            out = _replaced(name, self.replace[name], out)
            self.replaced.add(name)
        if shows:
            keep(scope, Called(name), out)
        return out

    def check(self, model: PyTree) -> None:
        names = callable_names(model, "es.capture")
        for name in self.replace:
            if name not in names:
                raise ValueError(_UNKNOWN.format(name, _listed(names), _hint(model)))
        is_glob = isinstance(self.which, str)
        if is_glob and not any(self.selects(name, None) for name in names):
            raise ValueError(_NO_MATCH.format(self.which, _listed(names), _hint(model)))

    def check_replaced(self) -> None:
        """Raise `ValueError` after the call if `replace` has had no effect."""
        # Each call traces anew, since `key` is its own: whatever is called is seen.
        for name in self.replace:
            if name not in self.replaced:
                raise ValueError(_NEVER_CALLED.format(name, name or "the model"))

    def cannot_see(self, name: str, module: Any) -> None:
        raise TypeError(_CANNOT_SEE.format(name, type(module).__qualname__))


def callable_names(model: PyTree, what: str) -> list[str]:
    """The names of the modules whose calls are seen.

    `ValueError` if something else than modules was given.
    """
    names = [name for name, x in modules(model) if can_be_observed(x)]
    if jtu.tree_leaves(model) and not names:
        raise ValueError(_NO_MODULE.format(what, show(model)))
    return names


_MOST_NAMES: Final = 20


def _hint(model: PyTree) -> str:
    """Why there are no names with numbers for the layers of a stack."""
    return _STACKED if any(map(stacks_of, parts(model))) else ""


def _listed(names: list[str]) -> str:
    """Names in a message, but not those of a thousand layers."""
    shown = ", ".join(f'`"{name}"`' for name in names[:_MOST_NAMES])
    return f"{shown or 'none'}{', ...' if len(names) > _MOST_NAMES else ''}"


def selector(which: Any) -> Callable[[str, Any], bool]:
    """Whether `outputs=which` selects a module."""
    if which is None:
        return lambda name, module: False
    if isinstance(which, str):
        pattern = compiled_glob(which)
        return lambda name, module: pattern.fullmatch(name) is not None
    classes = which if isinstance(which, tuple) else (which,)
    if all(isinstance(cls, type) for cls in classes):
        return lambda name, module: isinstance(module, classes)
    if callable(which) and not is_eqx_module(which):
        if why_not_called(which, "", None) is not None:
            raise TypeError(_NOT_OF_TWO)
        return lambda name, module: bool(which(name, module))
    shown = f"{type(which).__name__}(...)" if is_eqx_module(which) else repr(which)
    raise TypeError(_NO_SELECTION.format(shown))


def _replaced(name: str, new: Any, out: Any) -> Any:
    """The output that `replace=` puts in the place of `out`."""
    if callable(new):
        return new(out)
    what = f"the output of `{name or 'the model'}`"
    given, structure = jtu.tree_flatten(new)
    leaves, expected = jtu.tree_flatten(out)
    fits = structure == expected
    if fits:
        try:
            given = [_as_output(x, y, what) for x, y in zip(given, leaves, strict=True)]
        except ValueError:  # in the words for state: a float for integers, say
            fits = False
        fits = fits and all(map(same_type, leaves, given))
    if not fits:
        raise ValueError(_OTHER_OUTPUT.format(what, show(out), show(new)))
    return jtu.tree_unflatten(structure, given)


def _as_output(new: Any, old: Any, what: str) -> Any:
    """`new` with the dtype of `old` if it has none of its own; a number fills it."""
    is_number = type(new) in NUMBERS
    new = fit_leaf(old, new, what)
    return jnp.broadcast_to(new, jnp.shape(old)) if is_number else new


def check_replace(replace: Any) -> None:
    """Raise `TypeError` if `replace` is not a mapping from names."""
    is_mapping = isinstance(replace, Mapping)
    if replace is not None and not (
        is_mapping and all(type(x) is str for x in replace)
    ):
        raise TypeError(_NO_REPLACEMENT.format(show(replace)))


_NO_MODULE: Final = """`{0}` looks into the model, the first argument unless \
`argnums=` names another, and that is `{1}` here. No module in it can be called, so \
nothing would be seen. Pass the model; a function that closes over it hides it, and so \
does a transform of JAX:

    {0}(jax.vmap(model))(xs)                                      # wrong
    {0}(es.vmap(model))(xs)                                       # right
    {0}(lambda model, xs: jax.vmap(model)(xs))(model, xs)         # right"""

_UNKNOWN: Final = """`es.capture(..., replace={{"{}": ...}})`: the model has no module \
of this name that can be called. Names are given in full, and globs are for `outputs`. \
The names are {}.{}"""

_NEVER_CALLED: Final = """`es.capture(..., replace={{"{0}": ...}})`: `{1}` was never \
called, so nothing took the place of its output. What counts is a call of the module \
itself, `self.layer(x)`, and not of another method, nor the use of its arrays:

    x @ self.layer.weight.T      # the layer is not called
    self.layer(x)                # it is

Name the module around it, or one that the model calls."""

_NOT_OF_TWO: Final = """`es.capture(..., outputs=f)`: `f` is called with the name of a \
module and the module, and returns a bool:

    es.capture(model, outputs=lambda m: isinstance(m, Block))          # wrong
    es.capture(model, outputs=lambda name, m: isinstance(m, Block))    # right"""

_STACKED: Final = """ The layers of an `es.nn.Stacked` have one name, `blocks.layers`, \
as one program runs them all; their outputs are stacked along an axis for the layers. \
To replace what one of them returns, hold them in a list and call them in a loop: a \
list loads the files of a stack."""

_NO_MATCH: Final = """`es.capture(..., outputs="{}")` matches no module that can be \
called. In this glob `*` stands for any characters and `?` for one. The names are \
{}.{}"""

_NO_SELECTION: Final = """`es.capture(..., outputs={})`: `outputs` is a module class \
or a tuple of them, a glob on names such as `"layers*"`, or a function of `(name, \
module)` that returns a bool."""

_NO_REPLACEMENT: Final = """`es.capture(..., replace={})`: `replace` is a mapping from \
names of modules, such as `"layers[0]"`, to values or functions of the output."""

_OTHER_OUTPUT: Final = """`es.capture(..., replace=...)`: {} is `{}`, and a value in \
its place has the same structure, shapes and dtypes. This is `{}`. Under a transform \
that is the output of one call, in one lane or step. Convert the value; or give a \
function of the output, which may return anything."""

_CANNOT_SEE: Final = """`es.capture` cannot see the calls of `{}`, a `{}`: the \
metaclass of this class forbids subclasses. Sow the output instead, `self.sow("name", \
value)`, or leave the module out of `outputs`."""
