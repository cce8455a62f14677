"""One call of a function under `es.jit`: its arrays, its signature, its trace.

All arrays of a call are traced; the rest is its signature. The trace returns arrays and
an `Output`, which holds the rest and is kept with the compiled program.
"""

import functools as ft
import gc
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._errors import TraceError
from .._state._scope import is_owned, Sown
from .._transforms._arguments import check_given
from .._transforms._closures import owned_in
from .._transforms._copies import Opened
from .._transforms._lift import Lifted, Ran
from .._transforms._mutable import is_bound_method
from .._transforms._root import Values
from .._transforms._transform import Transform
from .._tree._base import get_place
from .._tree._walk import name_of
from .._typing import KeyPath
from ._donation import Donate, donates
from ._form_of import ArraySlot
from ._names import parameters
from ._plan import builder


@jtu.register_static
class Output:
    """The static part of a program's output, with slots where the arrays go.

    `inside`: the arrays of the owned modules. Where the function returns one of them as
    it was, the caller's own comes back, and not a copy: a module that comes back with
    its own parameters may be assigned.
    """

    def __init__(self, out: Any, inside: Iterable[Any]):
        leaves, treedef = jtu.tree_flatten(out)
        kept = {id(x): i for i, x in enumerate(inside)}
        self.is_new = [eqx.is_array(x) and id(x) not in kept for x in leaves]
        new, first_kept = itertools.count(), sum(self.is_new)
        self.slots = [
            ArraySlot(next(new) if is_new else first_kept + kept[id(x)])
            if eqx.is_array(x)
            else x
            for x, is_new in zip(leaves, self.is_new, strict=True)
        ]
        self.build = builder(jtu.tree_unflatten(treedef, self.slots))
        # Found in the program after its first run; `None` before.
        self.callbacks: frozenset[str] | None = None

    def arrays(self, out: Any) -> list[Any]:
        """The arrays that the program has computed."""
        leaves = zip(jtu.tree_leaves(out), self.is_new, strict=True)
        return [x for x, is_new in leaves if is_new]

    def put(self, arrays: list[Any], inside: list[Any]) -> Any:
        """The output of the call."""
        build, given = self.build, [*arrays, *inside]
        if len(given) < _MANY or not gc.isenabled():
            return build(given)
        # Each module in it counts as two objects towards the next collections, which
        # would come in the middle, and go through all that is there already. The caller
        # is about to drop as many, those of the tree that this one replaces. So let
        # Python count the difference.
        gc.disable()
        try:
            return build(given)
        finally:
            gc.enable()


_MANY: Final = 100


class Result(NamedTuple):
    """The output of a program."""

    arrays: list[Any]
    written: Values
    sown: list[Sown]
    output: Output


class Call:
    """One call: its arrays, and its signature."""

    def __init__(
        self,
        f: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_array: Callable[[Any], bool] = eqx.is_array,
    ):
        self.f, self.origins = f, origins_of(f)
        self.args, self.kwargs, self.is_array = args, kwargs, is_array
        self.lifted = Lifted(f, args, kwargs, may_initialize=True)
        self.opened = Opened(f)
        self.tree = self.opened.tree, args, kwargs
        self.leaves, self.treedef = jtu.tree_flatten(self.tree, is_leaf=is_owned)

    def inside(self) -> list[Any]:
        """The arrays of the owned modules."""
        return list(filter(self.is_array, self.lifted.values.values()))

    def arrays(self) -> list[Any]:
        """The arrays that are traced."""
        return [*filter(self.is_array, self.leaves), *self.inside()]

    @ft.cached_property
    def paths(self) -> list[KeyPath]:
        """Where each leaf is in `(function, args, kwargs)`."""
        entries, _ = jtu.tree_flatten_with_path(self.tree, is_leaf=is_owned)
        return [path for path, _ in entries]

    def array_paths(self) -> list[KeyPath]:
        leaves = zip(self.paths, self.leaves, strict=True)
        return [path for path, x in leaves if self.is_array(x)]

    def donated(self, donate: Donate) -> list[int]:
        """Which of the arrays are donated."""

        def is_donated(path: KeyPath) -> bool:
            if path[0].idx == 0 and self.opened.is_copied:
                return False  # the function only closes over it
            return donates(donate, path[0].idx == 1 and path[1].idx == 0)

        return [i for i, path in enumerate(self.array_paths()) if is_donated(path)]

    def seen(self) -> tuple[Any, list[str]]:
        """The function, and the name of each array, for JAX's errors."""
        inside = self.lifted.values.items()
        of_roots = [self.lifted.name(slot) for slot, x in inside if self.is_array(x)]
        return self.origins[0], [*parameters(self.f, self.array_paths()), *of_roots]

    def trace(self, *arrays: Any) -> Result:
        """The call on these arrays, in the active trace."""
        # Only here, since the trace is what would see two modules instead of one.
        check_given(*self.args, *self.kwargs.values(), *self.opened.values)
        rest = iter(arrays)
        leaves = [next(rest) if self.is_array(x) else x for x in self.leaves]
        values = {
            slot: next(rest) if self.is_array(x) else x
            for slot, x in self.lifted.values.items()
        }
        function, args, kwargs = jtu.tree_unflatten(self.treedef, leaves)
        copy = self.opened.copy(function)
        ran = self.lifted.run(values, lambda: copy.f(*args, **kwargs))
        out = copy.finish(ran.out)
        if self.lifted.roots:
            self._check_static(out)
        output = Output(out, filter(eqx.is_array, values.values()))
        return Result(output.arrays(out), ran.written, ran.sown, output)

    def _check_static(self, out: Any) -> None:
        """Static outputs must not lead to owned modules.

        They are the same objects in all calls, and live longer than the scope.
        """
        given = set(map(id, self.leaves))  # part of the signature, so these may
        static = [x for x in jtu.tree_leaves(out) if not eqx.is_array(x)]
        for module in owned_in([x for x in static if id(x) not in given], objects=True):
            place = get_place(module)
            if place.scope in self.lifted.scopes:
                name = name_of(place.path) or type(module).__qualname__
                raise TraceError(_HOLDS_OWNED.format(name))

    def finish(self, result: Result) -> Any:
        """The output of the call, after its writes to the owned modules."""
        self.lifted.commit(Ran(None, result.written, result.sown))
        return result.output.put(result.arrays, self.inside())


_HOLDS_OWNED: Final = """`es.jit` was to return a function, or an object, that holds \
`{}`, which belongs to a scope of `es.mutable`. What is not an array comes out as it \
was when the function was traced, so later calls would get the module of the first \
one. Return arrays or the module, and make the function outside:

    head = es.jit(lambda net: lambda x: net.w * x)(self)     # wrong
    w = es.jit(lambda net: net.w)(self)                      # right
    head = lambda x: w * x"""


def bind(
    f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`f(x, y=1)` is `f(x, 1)`."""
    if not kwargs:
        return args, kwargs
    bound = inspect.signature(f).bind(*args, **kwargs)
    return bound.args, bound.kwargs


def origins_of(f: Any) -> tuple[Any, ...]:
    """The functions in the source, or the objects, by which programs are kept.

    One, unless `f` is a transform of several. For a pytree, or an object recreated on
    each call: its class.
    """
    if type(f) is types.FunctionType:  # as most are: the rest takes long
        return (f,)
    return tuple(origin for x in called_by(f) for origin in _origins(x))


def called_by(f: Any) -> Iterator[Any]:
    """What `f` calls in the end: below transforms and partials."""
    if type(f) is tuple:
        for x in f:
            yield from called_by(x)
    elif isinstance(f, Transform):
        yield from called_by(f.f)
    elif isinstance(f, (ft.partial, jtu.Partial, eqx.Partial)):
        yield from called_by(f.func)
    else:
        yield f


def _origins(f: Any) -> tuple[Any, ...]:
    if is_bound_method(f):
        return origins_of(f.__func__)
    # Objects that are equal to others share their programs.
    is_unique = type(f).__eq__ is object.__eq__ and type(f).__weakrefoffset__
    return (f if is_unique and jtu.all_leaves([f]) else type(f),)
