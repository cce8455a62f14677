"""Loops and branches outside `jit`: traced once, and kept with their functions.

JAX traces the body of a loop once for each function object. Ours would be traced at
each call: the function that JAX sees is a new one, made for the modules of that call.
So outside `jit` the whole loop is a program of `es.jit`, and the arrays of the modules
that it reaches are inputs. What cannot be a program (a body that asks for the value of
a parameter, say) runs as it would without one.
"""

import dataclasses
import functools as ft
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import is_staged, manual_axes
from .._state.scope import is_owned
from .._transforms.lift import owned_copy, owned_in
from .._transforms.mutable import is_bound_method
from .._transforms.transform import Transform
from .._tree.base import is_eqx_module
from ._reads import Reads
from .call import called_by, origins_of
from .options import Options
from .programs import Programs


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
    if is_eager and all(map(_is_kept, called_by(functions))):
        store = _store_of(origins_of(functions))
    if store is not None and store.is_of_use:
        try:
            out = store.call(functions, operands, carries, run, settings)
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
        store.start_anew()  # what there was is not used again
    return out


def _is_kept(f: Any) -> bool:
    """Whether calls of `f` may share a program.

    As for JAX, not those of a method of an object: its attributes may be others.
    """
    if is_bound_method(f):
        return is_eqx_module(f.__self__)
    return isinstance(f, types.FunctionType) or is_eqx_module(f)


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

    carries: bool = eqx.field(static=True)
    run: Callable[..., Any] = eqx.field(static=True)
    settings: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    def __call__(self, /, *operands: Any) -> Any:
        if not is_staged():
            raise _NotTraced
        _LAST.trace = object()
        out = self.run(*self.f, *operands, **dict(self.settings))
        if not self.carries:
            return out, False
        # JAX returns what a loop leaves as it is, be it a number, instead of a copy.
        leaves = enumerate(_leaves(operands[0]))
        given = {id(x): _Given(i) for i, x in leaves if eqx.is_array(x)}
        last = jtu.tree_map(lambda x: given.get(id(x), x), out[0])
        is_there = any(isinstance(x, _Given) for x in jtu.tree_leaves(last))
        return (last, *out[1:]), is_there


def _leaves(operands: Any) -> list[Any]:
    return jtu.tree_leaves(operands, is_leaf=is_owned)


# So many programs a function may have. A setting that is another at each call would
# otherwise fill the memory.
_MANY: Final = 64


class _Last(threading.local):
    """Stands for the last trace in this thread."""

    trace: object = None


_LAST: Final = _Last()


class _Store:
    """The programs of one function, or of several that are called together."""

    def __init__(self) -> None:
        self.is_of_use = True
        self.start_anew()

    def start_anew(self) -> None:
        self.kept = Programs(Options()), Reads()

    def call(
        self,
        functions: tuple[Any, ...],
        operands: tuple[Any, ...],
        carries: bool,
        run: Callable[..., Any],
        settings: dict[str, Any],
    ) -> Any:
        programs, reads = self.kept
        if len(programs.by_signature) > _MANY or not reads.are_same():
            self.start_anew()
            programs, reads = self.kept
        body = object.__new__(_Body)
        body.__dict__.update(
            f=jtu.tree_map(_as_tree, functions, is_leaf=is_eqx_module),
            carries=carries,
            run=run,
            settings=tuple(settings.items()),
        )
        arrays = jtu.tree_map(_as_array, operands, is_leaf=is_eqx_module)
        before = _LAST.trace
        out, has_given = programs(body, arrays, {})
        if _LAST.trace is not before:
            try:
                reads.add(functions, operands)
            except Exception:  # of a descriptor, say; the loop itself has run
                self.start_anew()
        if not has_given:
            return out
        leaves, (last, *rest) = _leaves(operands[0]), out
        last = jtu.tree_map(
            lambda x: leaves[x.number] if isinstance(x, _Given) else x, last
        )
        return last, *rest


def _as_tree(f: Any) -> Any:
    """A partial as a pytree: its arrays are inputs, and no program keeps them."""
    is_hidden = type(f) is ft.partial
    return eqx.Partial(f.func, *f.args, **f.keywords) if is_hidden else f


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
