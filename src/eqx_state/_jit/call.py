"""One call of a function under `es.jit`: its arrays, its signature, its trace.

All arrays of a call are traced; the rest is its signature. The trace returns arrays and
an `Output`, which holds the rest and is kept with the compiled program.
"""

import functools as ft
import gc
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._errors import an, TraceError
from .._state.scope import is_owned, Sown
from .._transforms.lift import Lifted, Ran, Values
from .._transforms.mutable import is_bound_method
from .._transforms.reach import check_given, owned_in
from .._transforms.transform import Transform
from .._tree.base import keystr, ownership_of
from .._tree.walk import name_of
from .._typing import KeyPath
from .options import Options
from .plan import ArraySlot, builder
from .static import is_hashable, structure, typed


def bind(
    f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`f(x, y=1)` is `f(x, 1)`, by the signature of what is called.

    The function that it wraps does not count: a decorator's `def run(*args, **kwargs)`
    looks for `y` among the keywords, whatever `functools.wraps` shows; and `es.vmap(f)`
    maps `y` over its first axis, while `in_axes` says what is done with positions.
    """
    if not kwargs:
        return args, kwargs
    # Equinox's wrappers (a bound method, `eqx.debug.assert_max_traces(f)`) pass on what
    # they are given.
    while eqx.Module in type(f).__mro__ and hasattr(f, "__wrapped__"):
        if isinstance(f, Transform):
            return args, kwargs
        f = f.__wrapped__
    if hasattr(f, "__signature__"):  # which may show that of another function
        return args, kwargs
    try:
        signature = inspect.signature(f, follow_wrapped=False)
    except (TypeError, ValueError):  # such as `np.sum`
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    return bound.args, bound.kwargs


def origin_of(f: Any) -> Any:
    """The function in the source, or the object, whose programs those of `f` are.

    For a pytree, or an object recreated on each call: its class.
    """
    while isinstance(f, (Transform, eqx.Partial, jtu.Partial)) or is_bound_method(f):
        f = f.f if isinstance(f, Transform) else _function_of(f)
    # Objects that are equal to others share their programs.
    is_unique = type(f).__eq__ is object.__eq__ and type(f).__weakrefoffset__
    return f if is_unique and jtu.all_leaves([f]) else type(f)


def _function_of(f: Any) -> Any:
    return f.__func__ if is_bound_method(f) else f.func


class Call:
    """One call: its arrays, and its signature."""

    def __init__(
        self,
        f: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_array: Callable[[Any], bool] = eqx.is_array,
    ):
        self.given, self.is_array = (f, *args, *kwargs.values()), is_array
        self.origin = origin_of(f)
        self.lifted = Lifted(f, (args, kwargs))
        self.tree = f, *self.lifted.arguments
        self.leaves, self.treedef = jtu.tree_flatten(self.tree, is_leaf=is_owned)

    def inside(self) -> list[Any]:
        """The arrays of the owned modules."""
        return list(filter(self.is_array, self.lifted.values.values()))

    def arrays(self) -> list[Any]:
        """The arrays that are traced."""
        return [*filter(self.is_array, self.leaves), *self.inside()]

    @ft.cached_property
    def paths(self) -> list[KeyPath]:
        """Where each leaf is in `(f, args, kwargs)`."""
        entries, _ = jtu.tree_flatten_with_path(self.tree, is_leaf=is_owned)
        return [path for path, _ in entries]

    def names(self) -> list[str]:
        """The name of each array, for JAX's errors."""
        pairs = zip(self.paths, self.leaves, strict=True)
        inside = self.lifted.values.items()
        return [self.name(path) for path, x in pairs if self.is_array(x)] + [
            self.lifted.name(slot) for slot, x in inside if self.is_array(x)
        ]

    def name(self, path: KeyPath) -> str:
        """The name of a leaf, as if JAX had traced the function itself."""
        which, below = path[0].idx, path[1:]
        if which == 0:
            return name_of(below) or "the function"
        argument = below[0].key if which == 2 else f"args[{below[0].idx}]"
        if which == 1 and below[0].idx < len(self.parameters):
            argument = self.parameters[below[0].idx]
        return f"{argument}{keystr(below[1:])}"

    @ft.cached_property
    def parameters(self) -> list[str]:
        """The names of the positional parameters, if the function has a signature."""
        f = self.given[0]
        while isinstance(f, Transform):
            f = f.f
        if isinstance(f, eqx.Partial):  # into which `inspect` does not look
            f = ft.partial(f.func, *f.args, **f.keywords)
        try:
            found = inspect.signature(f).parameters.values()
        except (TypeError, ValueError):
            return []
        last = inspect.Parameter.POSITIONAL_OR_KEYWORD  # or a kind before it
        return [p.name for p in found if p.kind <= last]

    def donated(self, options: Options) -> list[int]:
        """Which of the arrays are donated."""
        pairs = zip(self.paths, self.leaves, strict=True)
        paths = [path for path, x in pairs if self.is_array(x)]
        are_first = [path[0].idx == 1 and path[1].idx == 0 for path in paths]
        return [i for i, is_first in enumerate(are_first) if options.donates(is_first)]

    def trace(self, *arrays: Any) -> "Result":
        """The call on these arrays, in the active trace."""
        # Only here, since the trace is what would see two modules instead of one.
        check_given(*self.given, may_initialize=True)
        rest = iter(arrays)
        leaves = [next(rest) if self.is_array(x) else x for x in self.leaves]
        values = {
            slot: next(rest) if self.is_array(x) else x
            for slot, x in self.lifted.values.items()
        }
        f, args, kwargs = jtu.tree_unflatten(self.treedef, leaves)
        ran = self.lifted.run(values, lambda: f(*args, **kwargs))
        if self.lifted.roots:
            self._check_static(ran.out)
        output = Output(ran.out, filter(eqx.is_array, values.values()))
        return Result(output.arrays(ran.out), ran.written, ran.sown, output)

    def _check_static(self, out: Any) -> None:
        """Static outputs must not lead to owned modules.

        They are the same objects in all calls, and live longer than the scope.
        """
        given = set(map(id, self.leaves))  # part of the signature, so these may
        static = [x for x in jtu.tree_leaves(out) if not eqx.is_array(x)]
        for module in owned_in([x for x in static if id(x) not in given]):
            name = name_of(ownership_of(module).path) or type(module).__qualname__
            raise TraceError(_HOLDS_OWNED.format(name))

    def finish(self, result: "Result") -> Any:
        """The output of the call, after its writes to the owned modules."""
        self.lifted.commit(Ran(None, result.written, result.sown))
        return result.output.put(result.arrays, self.inside())


_HOLDS_OWNED: Final = """`es.jit` was to return a function, or an object, that holds \
`{}`, which belongs to a scope of `es.mutable`. Only arrays are computed in each call, \
so later calls would get the module of the first one. Return arrays or the module, and \
make the function outside: `w = es.jit(lambda net: net.w)(self)`, `lambda x: w * x`."""


class Result(NamedTuple):
    """The output of a program."""

    arrays: list[Any]
    written: Values
    sown: list[Sown]
    output: "Output"


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
        slots = [
            ArraySlot(next(new) if is_new else first_kept + kept[id(x)])
            if eqx.is_array(x)
            else x
            for x, is_new in zip(leaves, self.is_new, strict=True)
        ]
        self.build = builder(jtu.tree_unflatten(treedef, slots))
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


# --- The signature of a call ----------------------------------------------------------


# In a signature instead of what is not part of it. All that is, is in tuples.
_ARRAY: Final = "array"
_ORIGIN: Final = "origin"


def cache_key_of(call: Call) -> tuple[Any, ...]:
    """All that is static in a call: equal, and hashable, for calls of one program.

    Shapes and dtypes are left to JAX. The function whose programs they are does not
    occur in it, and is not kept alive.
    """
    lifted = call.lifted
    inside = {
        id(visit.node): (i, k)
        for i, root in enumerate(lifted.roots)
        for k, visit in enumerate(root.modules)
    }

    def static(x: Any) -> Any:
        return _ORIGIN if x is call.origin else typed(x)

    def leaf(x: Any, name: Callable[[], str]) -> Any:
        if is_owned(x):
            return inside[id(x)]
        if call.is_array(x):
            return _ARRAY
        if not is_hashable(x):
            raise TypeError(_NO_HASH.format(name(), an(type(x).__name__)))
        return static(x)

    roots = []
    for root in lifted.roots:
        statics = tuple(
            leaf(visit.node, lambda visit=visit: visit.name) for visit in root.leaves
        )
        whose = lifted.scopes.index(root.place.scope)
        place = root.place.path, root.place.context, whose
        roots.append((structure(root.structure, static), statics, place))
    return (
        structure(call.treedef, static),
        tuple(
            leaf(x, lambda i=i: call.name(call.paths[i]))
            for i, x in enumerate(call.leaves)
        ),
        tuple(roots),
        tuple(inside[id(module)] for module in lifted.reached),
        tuple(scope.signature for scope in lifted.scopes),
    )


_NO_HASH: Final = """`es.jit`: `{}` is {}, which cannot be hashed. What is not an \
array is static, and its compiled program is looked up by hash. Pass a hashable value, \
such as a frozenset for a set; or an array, which is traced."""
