"""What functions read by name, of which a program that is kept has the old values.

A loop may be called at the top of a script or in a notebook, where a model is a global
variable, and functions are defined anew. A program would go on with what there was when
it was traced. So the names are looked up again before it is used: the global names in
the code of the functions, in functions of the same file that these call, and in methods
of the modules in reach; and the names in closures.
"""

import dis
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeGuard

import equinox as eqx

from .._transforms._closures import models_in, reach
from .._tree._base import is_eqx_module
from .._tree._walk import walk


class Reads:
    """What was read by name, as it was when the functions had been traced.

    Left out are arrays, as in JAX; the modules in closures, which are inputs of the
    program; and names that the code itself assigns, such as those of counters.
    """

    def __init__(self, functions: Any, operands: Any):
        running = [*_running((functions, operands))]
        codes = [code for f in running for code in _codes(f.__code__)]
        assigned = {name for code in codes for name in _names(code, "STORE_GLOBAL")}
        read = {
            (id(f.__globals__), name): f
            for f in running
            for name in _globals(f)
            if name not in assigned and name in f.__globals__
        }
        self.globals = [
            (weakref.ref(f), name, _is(f.__globals__[name]))
            for (_, name), f in read.items()
            if not eqx.is_array(f.__globals__[name])
        ]
        assigned = {
            name
            for code in codes
            for name in _names(code, "STORE_DEREF") & {*code.co_freevars}
        }
        self.closed_over = [
            (weakref.ref(f), i, _is(_in_cell(f, i)))
            for f in running
            for i, name in enumerate(f.__code__.co_freevars)
            if name not in assigned and not _is_input(_in_cell(f, i))
        ]

    def are_same(self) -> bool:
        """Whether all of it would be read again."""
        try:
            return all(
                is_same(f().__globals__.get(name, _NOTHING))
                for f, name, is_same in self.globals
            ) and all(is_same(_in_cell(f(), i)) for f, i, is_same in self.closed_over)
        except AttributeError:  # a function is gone
            return False


_NOTHING: Final = object()


def _in_cell(f: Any, i: int) -> Any:
    """What a function has in a cell of its closure."""
    try:
        return f.__closure__[i].cell_contents
    except ValueError:  # the name is not assigned yet
        return _NOTHING


def _is(x: Any) -> Callable[[Any], bool]:
    """Whether something is `x`, which is not kept alive."""
    try:
        ref = weakref.ref(x)
    except TypeError:
        return lambda y: y is x
    return lambda y: y is ref() and y is not None


def _is_input(x: Any) -> bool:
    return eqx.is_array(x) or bool(models_in(x))


def _running(tree: Any) -> Iterator[types.FunctionType]:
    """The functions in reach, and the methods of the modules in reach."""
    classes: dict[type, None] = {}
    for x in reach(tree):
        if _is_function(x):
            yield from _with_callees(x)
        elif is_eqx_module(x):
            for visit in walk(x):
                if is_eqx_module(visit.node):
                    classes |= dict.fromkeys(type(visit.node).__mro__)
    for cls in classes:
        for name in vars(cls) if not _is_of_library(cls.__module__) else ():
            method = inspect.unwrap(getattr(cls, name))
            method = getattr(method, "fget", method)  # of a property
            if _is_function(method):
                yield from _with_callees(method)


def _with_callees(f: types.FunctionType) -> Iterator[types.FunctionType]:
    """A function, and those that it calls by the names of its own file."""
    seen, todo, space = set[int](), [f], f.__globals__
    while todo:
        f = todo.pop()
        if id(f) in seen or _is_of_library(f.__module__):
            continue
        seen.add(id(f))
        yield f
        read = map(inspect.unwrap, map(space.get, _globals(f)))
        todo += [x for x in read if _is_function(x) and x.__globals__ is space]


def _is_function(x: Any) -> TypeGuard[types.FunctionType]:
    return isinstance(x, types.FunctionType)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of the functions that are defined in it."""
    yield code
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            yield from _codes(x)


def _globals(f: types.FunctionType) -> set[str]:
    """The global names that a function reads."""
    return {name for x in _codes(f.__code__) for name in _names(x, "LOAD_GLOBAL")}


def _names(code: types.CodeType, operation: str) -> set[str]:
    """The names in the code for which it has this operation."""
    return {x.argval for x in dis.get_instructions(code) if x.opname == operation}


def _is_of_library(module: str | None) -> bool:
    # Nobody rebinds their names.
    return (module or "").partition(".")[0] in _LIBRARIES


_LIBRARIES: Final = frozenset({"jax", "equinox", "eqx_state", "optax", "numpy"})
