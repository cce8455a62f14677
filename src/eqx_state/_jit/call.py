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
from .._state.scope import is_owned, Sown
from .._transforms.lift import check_given, Lifted, owned_in, Ran, Values
from .._transforms.mutable import is_bound_method
from .._transforms.transform import argument_name, positional_names, Transform
from .._tree.base import get_place
from .._tree.walk import name_of
from .._typing import KeyPath
from .options import Donate, donates
from .plan import ArraySlot, builder
from .static import is_hashable, structure, typed


# --- Names of the leaves of a call, for our errors and for those of JAX.
#
# The key paths are those in `(function, args, kwargs)`.


def _split(path: KeyPath) -> tuple[int | str | None, KeyPath]:
    """An argument by position or keyword (`None`: the function), and the path in it."""
    which = path[0].idx
    if which == 0:
        return None, path[1:]
    return path[1].idx if which == 1 else path[1].key, path[2:]


def where(path: KeyPath) -> str:
    """A place in a call, for an error of ours."""
    argument, below = _split(path)
    name = f"argument `{argument}`" if isinstance(argument, str) else "the function"
    if isinstance(argument, int):
        name = f"argument {argument}"
    return f"{name}, at `{name_of(below)}`," if below else name


def parameters(f: Any, paths: list[KeyPath]) -> list[str]:
    """The names that JAX would give these leaves if it jitted `f` itself."""
    names = positional_names(f)

    def name(path: KeyPath) -> str:
        argument, below = _split(path)
        if argument is None:
            return name_of(below)
        return argument_name(argument, below, names)

    return [name(path) for path in paths]


def present(run: Any, name: str, origin: Any, names: list[str]) -> None:
    """Let JAX's errors name the user's function and arguments instead of `run`.

    JAX reads the source of a function off what `__wrapped__` leads to, and the names of
    the arguments off the signature. Only the code is needed: `origin` itself would be
    kept alive by its own programs.
    """
    run.__name__ = run.__qualname__ = name
    is_function = isinstance(origin, types.FunctionType)
    source = origin if is_function else origin.__call__  # of an object or of its class
    if (code := getattr(source, "__code__", None)) is not None:
        run.__wrapped__ = types.SimpleNamespace(__name__=name, __code__=code)
    if len(set(names)) == len(names):  # else JAX counts: `arrays[0]`
        kind = inspect.Parameter.POSITIONAL_ONLY
        run.__signature__ = inspect.Signature(
            [inspect.Parameter(_Name(name), kind) for name in names]
        )


class _Name(str):
    """A name that `inspect.Parameter` accepts though it is not an identifier."""

    def isidentifier(self) -> bool:
        return True


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
        """Where each leaf is in `(function, args, kwargs)`."""
        entries, _ = jtu.tree_flatten_with_path(self.tree, is_leaf=is_owned)
        return [path for path, _ in entries]

    def array_paths(self) -> list[KeyPath]:
        leaves = zip(self.paths, self.leaves, strict=True)
        return [path for path, x in leaves if self.is_array(x)]

    def donated(self, donate: Donate) -> list[int]:
        """Which of the arrays are donated."""

        def is_donated(path: KeyPath) -> bool:
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
        check_given(self.f, *self.args, *self.kwargs.values(), may_initialize=True)
        rest = iter(arrays)
        leaves = [next(rest) if self.is_array(x) else x for x in self.leaves]
        values = {
            slot: next(rest) if self.is_array(x) else x
            for slot, x in self.lifted.values.items()
        }
        function, args, kwargs = jtu.tree_unflatten(self.treedef, leaves)
        ran = self.lifted.run(values, lambda: function(*args, **kwargs))
        out = ran.out
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
        for module in owned_in([x for x in static if id(x) not in given]):
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
    """`f(x, y=1)` is `f(x, 1)`, by the signature of what is called.

    The function that it wraps does not count: a decorator's `def run(*args, **kwargs)`
    looks for `y` among the keywords, whatever `functools.wraps` shows; and `es.vmap(f)`
    maps `y` over its first axis, while `in_axes` says what is done with positions.
    """
    if not kwargs:
        return args, kwargs
    # Equinox's wrappers (a bound method, `eqx.debug.assert_max_traces(f)`) pass on what
    # they are given.
    while isinstance(f, eqx.Module) and hasattr(f, "__wrapped__"):
        if isinstance(f, Transform):
            return args, kwargs
        f = f.__wrapped__
    bound = inspect.signature(f, follow_wrapped=False).bind(*args, **kwargs)
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


# --- The signature of a call: all that is static in it.


# Stand in a signature for what is not part of it; all that is, is in tuples.
_ARRAY: Final = "array"
_ORIGIN: Final = "origin"


class Signature(NamedTuple):
    """Hashable; equal for calls that one program serves, up to shapes and dtypes."""

    structure: Any
    leaves: tuple[Any, ...]
    roots: tuple[Any, ...]
    reached: tuple[Any, ...]
    scopes: tuple[Any, ...]


def signature_of(call: Call) -> Signature:
    """The signature of a call, owned modules among its leaves.

    The function whose programs they are does not occur in it, and is not kept alive.
    """
    lifted, origins = call.lifted, _numbered(call.origins)
    inside = {
        id(visit.node): (i, k)
        for i, root in enumerate(lifted.roots)
        for k, visit in enumerate(root.modules)
    }

    def static(x: Any) -> Any:
        return origins.get(id(x)) or typed(x)

    def leaf(x: Any, place: Callable[[], str]) -> Any:
        if is_owned(x):
            return inside[id(x)]
        if call.is_array(x):
            return _ARRAY
        if not is_hashable(x):
            raise TypeError(
                f"`es.jit`: {place()} is a `{type(x).__name__}`, which cannot be"
                " hashed. What is not an array is static: there is one compiled program"
                " for each value, and it is looked up by hash. Pass a hashable value,"
                " such as a frozenset for a set; or an array, which is traced."
            )
        return static(x)

    roots = []
    for root in lifted.roots:
        statics = tuple(
            leaf(visit.node, lambda visit=visit: f"`{visit.name}`")
            for visit in root.leaves
        )
        whose = lifted.scopes.index(root.place.scope)
        place = root.place.path, root.place.context, whose
        roots.append((structure(root.structure, static), statics, place))
    leaves = tuple(
        leaf(x, lambda i=i: where(call.paths[i])) for i, x in enumerate(call.leaves)
    )
    reached = tuple(inside[id(module)] for module in lifted.reached)
    tree = structure(call.treedef, static)
    scopes = tuple(scope.signature for scope in lifted.scopes)
    return Signature(tree, leaves, tuple(roots), reached, scopes)


def _numbered(origins: tuple[Any, ...]) -> dict[int, Any]:
    return {id(x): (_ORIGIN, i) for i, x in enumerate(origins)}
