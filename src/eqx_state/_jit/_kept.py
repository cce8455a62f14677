"""Loops and branches outside `jit`: traced once, and kept with their functions.

JAX traces the body of a loop once for each function object. Ours would be traced at
each call: the function that JAX sees is a new one, made for the modules of that call.
So outside `jit` the whole loop is a program of `es.jit`, and the arrays of the modules
that it reaches are inputs. What cannot be a program (a body that asks for the value of
a parameter, say) runs as it would without one.
"""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import is_staged, manual_axes
from .._state._scope import is_owned
from .._transforms._closures import owned_in
from .._transforms._stand_ins import owned_copy
from .._transforms._transform import Transform
from .._tree._base import is_eqx_module
from ._call import origins_of
from ._options import Options
from ._programs import Programs
from ._reads import Reads


def kept(
    run: Callable[..., Any],
    functions: tuple[Any, ...],
    operands: tuple[Any, ...],
    *,
    carries: bool = False,
    **settings: Any,
) -> Any:
    """`run(*functions, *operands, **settings)`; outside `jit` by a program.

    - `functions`: the user's. The program is kept for as long as they are.
    - `operands`: pytrees of what is traced. All else is static.
    - `carries`: whether the first operand is a carry, and the first output the last.
    """
    store = None
    is_eager = not (is_staged() or manual_axes() or jax.config.jax_disable_jit)
    if is_eager and (origins := origins_of(functions)):  # else an error of JAX
        store = _store_of(origins)
    if store is not None and store.is_of_use:
        try:
            out = store.call(functions, operands, run, settings)
        except (eqx.EquinoxRuntimeError, jax.errors.JaxRuntimeError):
            raise
        except _NotTraced:
            store = None
        except Exception:
            # It is raised again below, unless it is for want of a value.
            pass
        else:
            if carries and owned_in(operands[0]):
                out = _owned(operands[0], out[0]), *out[1:]
            return out
    out = run(*functions, *operands, **settings)
    if store is not None:
        store.is_of_use = False
    return out


class _NotTraced(Exception):
    """A model is being initialized, for which functions run without a trace."""


def _owned(init: Any, last: Any) -> Any:
    """The last carry, in which modules belong to the scope of those in the first."""

    def put(before: Any, new: Any) -> Any:
        is_own = is_owned(before)
        return owned_copy(before, iter(jtu.tree_leaves(new))) if is_own else new

    return jtu.tree_map(put, init, last, is_leaf=is_owned)


@dataclasses.dataclass(frozen=True)
class _Given:
    """Stands in an output for a leaf of the operands."""

    number: int


class _Body(Transform):
    """What is traced: `run` of the functions `f`, with these settings."""

    run: Callable[..., Any] = eqx.field(static=True)
    settings: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    def __call__(self, /, *operands: Any) -> Any:
        if not is_staged():
            raise _NotTraced
        out = self.run(*self.f, *operands, **dict(self.settings))
        # JAX returns what a loop leaves as it is, be it a number, instead of a copy.
        leaves = enumerate(_leaves(operands))
        given = {id(x): _Given(i) for i, x in leaves if eqx.is_array(x)}
        after = jtu.tree_map(lambda x: given.get(id(x), x), out)
        is_there = any(isinstance(x, _Given) for x in jtu.tree_leaves(after))
        return after, is_there


def _leaves(operands: Any) -> list[Any]:
    return jtu.tree_leaves(operands, is_leaf=is_owned)


# So many programs a function may have. A setting that is another at each call would
# otherwise fill the memory.
_MANY: Final = 64


class _Store:
    """The programs of one function, or of several that are called together."""

    def __init__(self) -> None:
        self.is_of_use = True
        self._start_anew()

    def _start_anew(self) -> None:
        self.programs, self.reads = Programs(Options()), None

    def call(
        self,
        functions: tuple[Any, ...],
        operands: tuple[Any, ...],
        run: Callable[..., Any],
        settings: dict[str, Any],
    ) -> Any:
        if self.reads is not None and not self.reads.are_same():
            self._start_anew()
        body = object.__new__(_Body)
        body.__dict__.update(f=functions, run=run, settings=tuple(settings.items()))
        programs, count = self.programs, len(self.programs.by_signature)
        arrays = jtu.tree_map(_as_array, operands, is_leaf=is_eqx_module)
        out, has_given = programs(body, arrays, {})
        if len(programs.by_signature) > count:
            self.reads = Reads(functions, operands)
            if count == _MANY:
                self._start_anew()
        if not has_given:
            return out
        leaves = _leaves(operands)
        return jtu.tree_map(
            lambda x: leaves[x.number] if isinstance(x, _Given) else x, out
        )


def _as_array(x: Any) -> Any:
    # What JAX traces, and `es.jit` does not. In a module numbers are static.
    return jnp.asarray(x) if type(x) in (bool, int, float, complex) else x


# By the number of functions: by the first of them, by the second, …
_STORES: Final[dict[int, weakref.WeakKeyDictionary[Any, Any]]] = {}


def _store_of(origins: tuple[Any, ...]) -> _Store:
    """Where the programs of functions with these origins are."""
    *outer, last = origins
    found = _STORES.setdefault(len(origins), weakref.WeakKeyDictionary())
    for origin in outer:
        found = found.setdefault(origin, weakref.WeakKeyDictionary())
    store = found.get(last)
    return found.setdefault(last, _Store()) if store is None else store
