"""One call of a function under `es.jit`: its arrays, its signature, its trace.

All arrays of a call are traced; the rest is its signature. What comes out of the trace
besides arrays is an `Output`, which the compiled program keeps.
"""

import functools as ft
import types
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._errors import TraceError
from .._state._scope import is_owned, Sown
from .._transforms._closures import owned_in
from .._transforms._copies import Opened
from .._transforms._lift import Lifted, Ran
from .._transforms._mutable import is_bound_method
from .._transforms._root import Values
from .._transforms._transform import Transform
from .._tree._base import get_place
from .._tree._walk import name_of
from .._typing import KeyPath
from ._plan import ArraySlot, builder
from ._signature import Signature, signature_of


@jtu.register_static
class Output:
    """What a program returns besides arrays, and where the arrays go."""

    def __init__(self, out: Any, written: Values, values: Values):
        leaves, self.treedef = jtu.tree_flatten(out)
        # Arrays that the function has not touched do not go through the program: a
        # module that comes back with its own parameters may be assigned.
        inside = filter(eqx.is_array, values.values())
        kept = {id(x): i for i, x in enumerate(inside)}
        self.kept = [kept.get(id(x)) for x in leaves]
        self.rest = [None if eqx.is_array(x) else x for x in leaves]
        self.is_array = [eqx.is_array(x) for x in leaves]
        self.slots = list(written)
        self.build: Callable[[Callable[[], Any], list[Any]], Any] | None = None
        # Those of the program; `None`: not looked at yet.
        self.callbacks: frozenset[str] | None = None

    def arrays(self, out: Any) -> list[Any]:
        """The arrays that the program has computed."""
        leaves = zip(jtu.tree_leaves(out), self.is_array, self.kept, strict=True)
        return [x for x, flag, kept in leaves if flag and kept is None]

    def put(self, arrays: list[Any], inside: list[Any]) -> Any:
        """The output of the call."""
        if self.build is None:
            slots = [
                ArraySlot(kept) if flag else x
                for x, flag, kept in zip(
                    self.rest, self.is_array, self.kept, strict=True
                )
            ]
            self.build = builder(jtu.tree_unflatten(self.treedef, slots))
        return self.build(iter(arrays).__next__, inside)


class Call:
    """One call: its arrays, and its signature."""

    def __init__(
        self,
        f: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_array: Callable[[Any], bool] = eqx.is_array,
    ):
        self.origin = origin_of(f)
        self.args, self.kwargs, self.is_array = args, kwargs, is_array
        self.lifted = Lifted(f, args, kwargs, may_initialize=True)
        self.opened = Opened(f, self.origin)
        tree = (args[:1], (self.opened.tree, args[1:], kwargs))
        self.entries, self.treedef = jtu.tree_flatten_with_path(tree, is_leaf=is_owned)
        # An array is of the first argument, of the others, or is never donated: one of
        # a module that a function only closes over.
        self.groups = [self._group(path) for path, _ in self.entries]

    def _group(self, path: KeyPath) -> int:
        in_function = path[0].idx == 1 and path[1].idx == 0
        return 2 if in_function and self.opened.is_copied else path[0].idx

    def inside(self) -> list[Any]:
        """The arrays of the owned modules."""
        return list(filter(self.is_array, self.lifted.values.values()))

    def arrays(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Those of the first argument, of the others, and those never donated."""
        groups: tuple[list[Any], ...] = [], [], []
        for i, (_, x) in zip(self.groups, self.entries, strict=True):
            if self.is_array(x):
                groups[i].append(x)
        first, rest, kept = groups
        return first, rest, kept + self.inside()

    @ft.cached_property
    def signature(self) -> Signature:
        """What is equal for two calls that one program serves."""
        return signature_of(
            self.entries,
            self.treedef,
            self.lifted,
            self.origin,
            self.opened.shape,
            self.is_array,
        )

    def trace(
        self, first: list[Any], rest: list[Any], kept: list[Any]
    ) -> tuple[list[Any], tuple[list[Any], list[Sown]], Output]:
        """The call on these arrays, in the active trace."""
        # Here, as the trace will see two modules where there is one.
        self.lifted.check_apart(*self.args, *self.kwargs.values(), *self.opened.values)
        sources = iter(first), iter(rest), iter(kept)
        leaves = [
            next(sources[i]) if self.is_array(x) else x
            for i, (_, x) in zip(self.groups, self.entries, strict=True)
        ]
        values = {
            slot: next(sources[2]) if self.is_array(x) else x
            for slot, x in self.lifted.values.items()
        }
        head, (function, args, kwargs) = jtu.tree_unflatten(self.treedef, leaves)
        copy = self.opened.copy(function)
        ran = self.lifted.run(values, lambda: copy.f(*head, *args, **kwargs))
        out = copy.finish(ran.out)
        if self.lifted.roots:
            self._check_static(out)
        output = Output(out, ran.written, values)
        return output.arrays(out), (list(ran.written.values()), ran.sown), output

    def _check_static(self, out: Any) -> None:
        """What is not an array is one object for all calls, and outlives a scope."""
        given = {id(x) for _, x in self.entries}  # others are another signature
        static = [x for x in jtu.tree_leaves(out) if not eqx.is_array(x)]
        for module in owned_in([x for x in static if id(x) not in given], objects=True):
            place = get_place(module)
            if place.scope in self.lifted.scopes:
                name = name_of(place.path) or type(module).__qualname__
                raise TraceError(_HOLDS_OWNED.format(name))

    def finish(
        self, result: tuple[list[Any], tuple[list[Any], list[Sown]], Output]
    ) -> Any:
        """The output of the call, after its writes to the owned modules."""
        arrays, (state, sown), output = result
        written = dict(zip(output.slots, state, strict=True))
        self.lifted.commit(Ran(None, written, sown))
        return output.put(arrays, self.inside())


_HOLDS_OWNED: Final = """`es.jit` was to return a function, or an object, that holds \
`{}`, which belongs to a scope of `es.mutable`. What is not an array comes out as it \
was when the function was traced, so later calls would get the module of the first \
one. Return arrays or the module, and make the function outside:

    head = es.jit(lambda net: lambda x: net.w * x)(self)     # wrong
    w = es.jit(lambda net: net.w)(self)                      # right
    head = lambda x: w * x"""


def origin_of(f: Any) -> Any:
    """What has the programs of a callable: the function in the source, or the object.

    Of an object that has a structure, and of one that is made anew and anew, its class.
    """
    if isinstance(f, Transform):
        return origin_of(f.f)
    if isinstance(f, (ft.partial, jtu.Partial, eqx.Partial)):
        return origin_of(f.func)
    if is_bound_method(f):
        return origin_of(f.__func__)
    if isinstance(f, types.FunctionType):
        return f
    # Objects that are equal to others share their programs.
    is_unique = type(f).__eq__ is object.__eq__ and type(f).__weakrefoffset__
    return f if is_unique and jtu.all_leaves([f]) else type(f)
