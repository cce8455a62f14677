"""What functions read by name, of which a program that is kept has the old values.

A loop may be called at the top of a script or in a notebook, where a model is a global
variable, and functions are defined anew. A program would go on with what there was when
it was traced. So names are looked up again before it is used: global names, those in
closures, and attributes of classes, of objects and of Python modules.
"""

import builtins
import dis
import functools as ft
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeGuard

import equinox as eqx

from .._transforms.lift import ATOMS, models_in, owned_in, reach
from .._tree.base import is_eqx_module
from .._tree.walk import walk
from .call import origins_of


class Reads:
    """What was read by name, as it was after the traces that read it.

    Left out are arrays, as in JAX; the modules that the functions close over, which are
    inputs of the program; what lists and dicts hold; and names that the functions
    assign themselves, such as those of counters.
    """

    def __init__(self) -> None:
        self.seen: dict[Any, _Seen] = {}

    def add(self, functions: tuple[Any, ...], operands: Any) -> None:
        """All that these may have read in a trace that is over."""
        new: dict[Any, _Seen] = {}

        def note(holder: Any, look: _Look, name: Any) -> None:
            if not eqx.is_array(x := look(holder, name)):
                seen = weakref.ref(holder), look, name, _is(x)
                new[id(holder), look, name] = seen

        found = _found((functions, operands))
        own = filter(_is_function, origins_of(functions))
        left_out = {name for f in own for name in _assigned(f)}
        left_out |= {id(x) for x in reach(functions) if _is_input(x)}
        for x in found:
            if _is_function(x):
                _note_function(note, x, left_out)
            elif isinstance(x, type):
                note(x, _of_class, None)
        for x, name in _attributes(found):
            note(x, _of_object, name)
        self.seen = self.seen | new  # another one, since other threads may look

    def are_same(self) -> bool:
        """Whether all of it would be read again."""
        try:
            return all(
                is_same(look(holder(), name))
                for holder, look, name, is_same in self.seen.values()
            )
        except (AttributeError, TypeError):  # a holder is gone
            return False


# --- How something is looked up -------------------------------------------------------

_Look = Callable[[Any, Any], Any]
# Its holder, how to look it up there, by which name, and whether it is the same.
_Seen = tuple[Any, _Look, Any, Callable[[Any], bool]]
_NOTHING: Final = object()


def _is_input(x: Any) -> bool:
    return type(x) is types.CellType and bool(models_in(x))


def _note_function(
    note: Callable[[Any, _Look, Any], None], f: types.FunctionType, left_out: set[Any]
) -> None:
    note(f, _of_function, None)
    for name in _names(f.__code__).read:
        if (id(f.__globals__), name) not in left_out:
            note(f, _global, name)
    for i, cell in enumerate(f.__closure__ or ()):
        if id(cell) not in left_out:
            note(f, _in_cell, i)


def _global(f: Any, name: str) -> Any:
    return f.__globals__.get(name, _NOTHING)


def _in_cell(f: Any, i: int) -> Any:
    try:
        return f.__closure__[i].cell_contents
    except ValueError:  # the name is not assigned yet
        return _NOTHING


def _of_object(x: Any, name: str) -> Any:
    return vars(x).get(name, _NOTHING)


def _of_function(f: Any, _: None) -> "_All":
    return _All((f.__code__, f.__defaults__, f.__kwdefaults__))


def _of_class(cls: Any, _: None) -> "_All":
    return _All(vars(cls).values())


class _All(tuple[Any, ...]):
    """Several things, each of which is to be the same. They are kept alive."""

    def are(self, ys: tuple[Any, ...]) -> bool:
        return len(self) == len(ys) and all(map(operator.is_, self, ys))


def _is(x: Any) -> Callable[[Any], bool]:
    """Whether something is `x`, which is not kept alive if that can be."""
    if type(x) is _All:
        return x.are
    if owned_in(x):  # which are written in place
        return lambda y: False
    try:
        ref = weakref.ref(x)
    except TypeError:
        return lambda y: y is x
    return lambda y: y is ref() and y is not None


# --- What a trace may read ------------------------------------------------------------


def _found(tree: Any) -> list[Any]:
    """The user's functions, classes, Python modules and objects in reach.

    Functions lead to what they hold and read by global names, classes to their methods,
    and objects and Python modules to the attributes whose names are in the functions.
    """
    found: dict[int, Any] = {}
    todo = [*reach(tree)]
    while todo:
        _find(todo, found)
        read = (vars(x)[name] for x, name in _attributes(found.values()))
        todo = [x for x in read if _is_of_user(x) and id(x) not in found]
    return [x for x in found.values() if not is_eqx_module(x)]


def _find(todo: list[Any], found: dict[int, Any]) -> None:
    """Add `todo`, and what they lead to but for attributes, to `found`, by `id`."""
    while todo:
        x = todo.pop()
        if id(x) in found or not _is_of_user(x):
            continue
        found[id(x)] = x
        if is_eqx_module(x):
            nodes = [visit.node for visit in walk(x)]
            modules = [*filter(is_eqx_module, nodes)]
            found |= {id(module): module for module in modules}
            todo += [x for x in nodes if not is_eqx_module(x)]
            for module in modules:
                todo += [type(module), *vars(module).values()]
        elif isinstance(x, type):
            todo += [*x.__mro__, *(_function_in(x, name) for name in vars(x))]
        elif _is_function(x):
            todo += reach(x)
            todo += (_global(x, name) for name in _names(x.__code__).read)
        else:
            todo += [type(x), *reach(x)]


def _attributes(found: Iterable[Any]) -> list[tuple[Any, str]]:
    """The objects and Python modules, each with the names that functions may read."""
    functions, objects = [], []
    for x in found:
        if _is_function(x):
            functions.append(x)
        elif not (isinstance(x, type) or is_eqx_module(x)):
            objects.append(x)
    names = {name for f in functions for name in _names(f.__code__).attributes}
    return [(x, name) for x in objects for name in names & vars(x).keys()]


def _is_function(x: Any) -> TypeGuard[types.FunctionType]:
    return isinstance(x, types.FunctionType)


def _is_of_user(x: Any) -> bool:
    """Whether it may change: nobody rebinds the names of a library."""
    if type(x) in ATOMS or eqx.is_array(x) or not hasattr(x, "__dict__"):
        return False
    if is_eqx_module(x):
        return True
    if isinstance(x, (type, types.FunctionType)):
        is_builtin = x is getattr(builtins, x.__name__, None)
        return not (is_builtin or _is_library(x.__module__))
    if isinstance(x, types.ModuleType):
        return not _is_library(x.__name__)
    return type(x).__module__.partition(".")[0] not in _LIBRARIES


_LIBRARIES: Final = {"jax", "jaxlib", "equinox", "eqx_state", "optax", "numpy"}


@ft.cache
def _is_library(module: str | None) -> bool:
    name = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    is_standard = name in sys.stdlib_module_names and name != "builtins"
    return is_standard or name in _LIBRARIES or "site-packages" in file


def _function_in(cls: type, name: str) -> Any:
    """The function of a method, of a property, or of another descriptor."""
    x: Any = getattr(cls, name, None)
    return inspect.unwrap(getattr(getattr(x, "fget", x), "__func__", x))


# --- Names in code --------------------------------------------------------------------


class _Names(NamedTuple):
    """The names in the code of a function, and of the functions defined in it."""

    read: frozenset[str]  # global ones
    attributes: frozenset[str]
    assigned: frozenset[str]
    nonlocals: frozenset[str]  # which are assigned


@ft.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> _Names:
    by_operation: dict[str, set[str]] = {}
    for x in dis.get_instructions(code):
        by_operation.setdefault(x.opname, set()).add(x.argval)
    names = _Names(
        frozenset(by_operation.get("LOAD_GLOBAL", ())),
        frozenset(code.co_names),
        frozenset(by_operation.get("STORE_GLOBAL", ())),
        frozenset(by_operation.get("STORE_DEREF", ())) & {*code.co_freevars},
    )
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            names = _Names(*map(operator.or_, names, _names(x)))
    return names


def _assigned(f: types.FunctionType) -> Iterator[Any]:
    """What stands for the names that a function assigns, other than its own."""
    names = _names(f.__code__)
    yield from ((id(f.__globals__), name) for name in names.assigned)
    cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    yield from (id(cell) for name, cell in cells if name in names.nonlocals)
