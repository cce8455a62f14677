"""Tangents and cotangents: which trees of them fit, and functions that take them."""

from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._compat import boundary
from .._state._fit import is_numeric
from .._state._nn_shared import closed_copy
from .._tree._compare import is_hole, leaves_like, same
from .._tree._walk import is_numpy, name_of
from ._arguments import is_traced


@jtu.register_static
class Mold:
    """The tree that tangents or cotangents have to fit.

    - `what`: what is given for the tree, in the words of an error.
    - `errors`: the class of JAX's error for another structure, and for another dtype.
    - `fills`: whether JAX wants zeros, of dtype float0, in place of the holes.
    """

    def __init__(
        self,
        tree: Any,
        what: str,
        errors: tuple[type[Exception], type[Exception]],
        fills: bool = False,
    ):
        flags = is_traced(tree)
        self.tree = jtu.tree_map(lambda x, f: _struct(x) if f else x, tree, flags)
        self.what, self.errors, self.fills = what, errors, fills

    def fit(self, given: Any) -> Any:
        """`given`, checked, with holes or zeros except for inexact arrays."""
        try:
            new = leaves_like(self.tree, closed_copy(given), self.what)
        except ValueError as error:
            raise self.errors[0](error.args[0]) from None
        old, treedef = jtu.tree_flatten_with_path(self.tree, is_leaf=is_hole)
        pairs = zip(old, new, strict=True)
        fitted = [self._fit(name_of(path), x, y) for (path, x), y in pairs]
        return jtu.tree_unflatten(treedef, fitted)

    def _fit(self, name: str, old: Any, new: Any) -> Any:
        where = self.what, name or "the output", _show(old)
        is_struct = isinstance(old, jax.ShapeDtypeStruct)
        if not is_struct or not jnp.issubdtype(old.dtype, jnp.inexact):
            is_zero = getattr(new, "dtype", None) == jax.dtypes.float0
            if not (is_hole(new) or is_zero) and (is_struct or not same(old, new)):
                raise self.errors[1](_NOT_INEXACT.format(*where))
            if is_struct and self.fills:
                return np.zeros(old.shape, jax.dtypes.float0)
            return None
        if not eqx.is_array_like(new):
            raise self.errors[1](_MISSING.format(*where))
        found = _struct(new)
        if found.shape != old.shape:
            raise ValueError(_OTHER.format(*where, _show(found)))
        if found.dtype != old.dtype:
            raise self.errors[1](_OTHER.format(*where, _show(found)))
        return new


def _struct(x: Any) -> Any:
    """The shape and dtype of an array; NumPy's strings are not arrays to JAX."""
    if is_numpy(x) and not is_numeric(x.dtype):
        return x
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _show(x: Any) -> str:
    return eqx.tree_pformat(x, short_arrays=True, struct_as_array=True)


_NOT_INEXACT: Final = """{0}: `{1}` is `{2}`, for which there are no tangents. Only \
inexact arrays have some; for everything else give `None`, as `es.filter` and \
`eqx.filter` leave it, or zeros of dtype `float0`."""

_MISSING: Final = """{0}: `{1}` is `{2}`, and nothing is given for it. Give an array \
for each inexact array, zeros if need be."""

_OTHER: Final = """{0}: `{1}` is `{2}`, and what is given for it is `{3}`. Give an \
array of the same shape and dtype."""


class Pullback(eqx.Module):
    """The function that `es.vjp` returns: from cotangents of the output to those of
    the arguments."""

    vjp: Any
    mold: Mold

    @boundary
    def __call__(self, cotangents: Any) -> tuple[Any, ...]:
        return self.vjp(self.mold.fit(cotangents))


class Pushforward(eqx.Module):
    """The function that `es.linearize` returns: from tangents of the arguments to
    those of the output."""

    jvp: Any
    mold: Mold

    @boundary
    def __call__(self, *tangents: Any) -> Any:
        return self.jvp(*self.mold.fit(tangents))
