"""One call of a function under `es.jit`: its arrays, its cache key, its trace.

All arrays of a call are traced; the rest is its cache key. The trace returns arrays,
and an `Output` with the static rest, which JAX stores with the compiled program.
"""

import functools as ft
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._errors import an, TraceError
from .._state.scope import is_any_open, is_owned
from .._transforms.callables import is_wrapper_of_equinox, layer_of
from .._transforms.lift import Lifted, Ran
from .._transforms.reach import check_given, owned_in
from .._transforms.transform import Transform
from .._tree.base import keystr, ownership_of
from .._tree.walk import name_of
from .._typing import KeyPath
from .flattening import SLOT
from .options import Options
from .results import ResultBuilder
from .static import is_hashable, structure, typed


def bind(
    f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn `f(x, y=1)` into `f(x, 1)`, by the signature of the called function.

    Use its own signature, not that of a function that it wraps: a decorator's `def
    run(*args, **kwargs)` looks for `y` among the keywords, whatever `functools.wraps`
    shows; and `es.vmap(f)` maps keywords over their first axis, but positional
    arguments by `in_axes`.
    """
    if not kwargs:
        return args, kwargs
    # As `eqx.filter_jit`, look into Equinox's own wrappers: `eqx.filter_vmap(f)` takes
    # no keywords.
    while is_wrapper_of_equinox(f):
        f = f.__wrapped__
    if hasattr(f, "__signature__"):  # may be the signature of a wrapped function
        return args, kwargs
    try:
        signature = inspect.signature(f, follow_wrapped=False)
    except (TypeError, ValueError):  # `np.sum` has no signature
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    return bound.args, bound.kwargs


def origin_of(f: Any) -> Any:
    """The key under which the programs of `f` are stored: the innermost function.

    Other callable objects are their own key, too. But for a pytree, for an object with
    its own `__eq__`, and for one without weak references, the key is the class.
    """
    # A `functools.partial` is a static value, and its programs end with it.
    while not isinstance(f, ft.partial) and (layer := layer_of(f)) is not None:
        f = layer.inner
    # Each call may create a new model, or a new object that is equal to the last one.
    is_unique = type(f).__eq__ is object.__eq__ and type(f).__weakrefoffset__
    return f if is_unique and jtu.all_leaves([f]) else type(f)


class JitCall:
    """One call: its arrays, and its static data."""

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
        """The path of each leaf in `(f, args, kwargs)`."""
        entries, _ = jtu.tree_flatten_with_path(self.tree, is_leaf=is_owned)
        return [path for path, _ in entries]

    def names(self) -> list[str]:
        """The name of each array, for errors of JAX."""
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
        """The positions of the donated arrays."""
        pairs = zip(self.paths, self.leaves, strict=True)
        paths = [path for path, x in pairs if self.is_array(x)]
        are_first = [path[0].idx == 1 and path[1].idx == 0 for path in paths]
        return [i for i, is_first in enumerate(are_first) if options.donates(is_first)]

    def trace(self, *arrays: Any) -> "Result":
        """Run the call on these arrays, in the active trace."""
        # Check only while tracing: to walk the model in each call would be slow. The
        # `tree_unflatten` below would turn a repeated module into two.
        check_given(*self.given, may_initialize=True)
        rest = iter(arrays)
        leaves = [next(rest) if self.is_array(x) else x for x in self.leaves]
        values = {
            slot: next(rest) if self.is_array(x) else x
            for slot, x in self.lifted.values.items()
        }
        f, args, kwargs = jtu.tree_unflatten(self.treedef, leaves)
        call = lambda: f(*args, **kwargs)  # noqa: E731
        ran = self.lifted.run(values, call, (f, args, kwargs))
        if self.lifted.roots:
            self._check_static(ran.out)
        inside = filter(eqx.is_array, values.values())
        output = Output(ran.out, inside, self.origin)
        return Result(ran._replace(out=output.arrays(ran.out)), output)

    def _check_static(self, out: Any) -> None:
        """Raise `TraceError` if an owned module is reachable from a static output.

        Static outputs are the same objects in all calls, and outlive the scope.
        """
        given = set(map(id, self.leaves))  # allowed: they are part of the cache key
        static = [x for x in jtu.tree_leaves(out) if not eqx.is_array(x)]
        for module in owned_in([x for x in static if id(x) not in given]):
            name = name_of(ownership_of(module).path) or type(module).__qualname__
            raise TraceError(_HOLDS_OWNED.format(name))

    def finish(self, result: "Result") -> Any:
        """The output of the call, after its writes to the owned modules."""
        self.lifted.commit(result.ran)
        return result.output.put(result.ran.out, self.inside(), is_any_open())


_HOLDS_OWNED: Final = """A function under `es.jit` returned a function or an object \
that contains `{}`, a module of an `es.mutable` scope. Outputs that are not arrays are \
fixed when the function is traced, so later calls would return the module of the first \
call. Return arrays or the module itself, and create the function outside: `w = \
es.jit(lambda net: net.w)(self)`, `lambda x: w * x`."""


class Result(NamedTuple):
    """What a program returns; `ran.out` are the arrays of the output."""

    ran: Ran
    output: "Output"


@jtu.register_static
class Output:
    """The static part of a program's output.

    `inside`: the arrays of the owned modules. If the function returns one of them
    unchanged, the call returns the caller's array and not a copy. Otherwise assigning a
    returned module, `self.layer = layer`, would count as a write to its parameters.
    """

    def __init__(self, out: Any, inside: Iterable[Any], origin: Any):
        leaves, treedef = jtu.tree_flatten(out)
        slots = [SLOT if eqx.is_array(x) else x for x in leaves]
        self.build = ResultBuilder(jtu.tree_unflatten(treedef, slots), origin)
        # For each array its number in `inside`, or `None` if it is new.
        numbers = {id(x): i for i, x in enumerate(inside)}
        self.kept = [numbers.get(id(x)) for x in leaves if eqx.is_array(x)]
        # Set after the first run of the program; `None` before.
        self.callbacks: frozenset[str] | None = None

    def arrays(self, out: Any) -> list[Any]:
        """The arrays that the program has computed."""
        arrays = filter(eqx.is_array, jtu.tree_leaves(out))
        return [x for x, i in zip(arrays, self.kept, strict=True) if i is None]

    def put(self, arrays: list[Any], inside: list[Any], at_once: bool) -> Any:
        """The output of the call. `at_once`: whether to leave no module unbuilt."""
        if inside:
            new = iter(arrays)
            arrays = [next(new) if i is None else inside[i] for i in self.kept]
        return self.build(arrays, at_once)


# --- The cache key of a call ----------------------------------------------------------


# Sentinels in a cache key. They equal no other value in it, because those are tuples.
_ARRAY: Final = "array"
_ORIGIN: Final = "origin"


def cache_key_of(call: JitCall) -> tuple[Any, ...]:
    """The static data of a call: hashable, and equal for calls that share a program.

    JAX distinguishes shapes and dtypes. The key does not contain the called function,
    so it does not keep the function alive.
    """
    lifted = call.lifted
    inside = {
        id(module): (i, k)
        for i, root in enumerate(lifted.roots)
        for k, module in enumerate(root.traversal.modules)
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
            leaf(x, ft.partial(lifted.name, slot))
            for slot, x in zip(root.slots, root.traversal.leaves, strict=True)
        )
        whose = lifted.scopes.index(root.ownership.scope)
        ownership = root.ownership.path, root.ownership.context, whose
        roots.append((structure(root.traversal.structure, static), statics, ownership))
    return (
        structure(call.treedef, static),
        tuple(
            leaf(x, lambda i=i: call.name(call.paths[i]))
            for i, x in enumerate(call.leaves)
        ),
        tuple(roots),
        tuple(inside[id(module)] for module in lifted.reached),
        tuple(scope.cache_key for scope in lifted.scopes),
    )


_NO_HASH: Final = """`es.jit`: `{}` is {}, which cannot be hashed. Values that are not \
arrays are static, and `es.jit` looks up the compiled program by their hash. Pass a \
hashable value, such as a frozenset instead of a set; or an array, which is traced."""
