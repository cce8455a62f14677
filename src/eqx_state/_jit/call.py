"""One call of a function under `es.jit`: its arrays, its cache key, its trace.

All arrays of a call are traced; the rest is its cache key. The trace returns arrays,
and an `Output` with the static rest, which JAX stores with the compiled program.
"""

import functools as ft
import inspect
import types
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._errors import an, TraceError
from .._state.scope import is_any_open, is_owned
from .._transforms.lift import Lifted
from .._transforms.reach import check_given, owned_in
from .._transforms.transform import is_wrapper_of_equinox, layer_of
from .._tree.base import is_eqx_module, keystr, ownership_of
from .._tree.walk import name_of
from .options import Donate
from .results import Output, Result
from .static import is_hashable, key_of_treedef, typed


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


def is_of_plain_object(f: Any) -> bool:
    """Whether `f` is a bound method of an object that is not a module.

    An object without weak references does not count: nothing can be freed with it.
    """
    if type(f) is not types.MethodType or is_eqx_module(f.__self__):
        return False
    return type(f.__self__).__weakrefoffset__ != 0


def origin_of(f: Any) -> Any:
    """What decides which programs `f` has: the innermost function that it calls.

    Other callable objects have their own programs, too. But the programs of a pytree,
    of an object with its own `__eq__`, and of one without weak references are those of
    its class.
    """
    if type(f) is types.FunctionType:  # as in most calls
        return f
    # A `functools.partial` is a static value, and its programs end with it. So do those
    # of `trainer.step` with `trainer`.
    while not (isinstance(f, ft.partial) or is_of_plain_object(f)):
        if (layer := layer_of(f)) is None:
            # Each call may create a new model, or a new object that equals the last.
            is_unique = type(f).__eq__ is object.__eq__ and type(f).__weakrefoffset__
            return f if is_unique and jtu.all_leaves([f]) else type(f)
        f = layer.inner
    return f


class JitCall:
    """One call: its arrays, and its static data.

    `is_array`: a wider one for `.lower`, which accepts `jax.ShapeDtypeStruct`s.
    """

    def __init__(
        self,
        f: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_array: Callable[[Any], bool] = eqx.is_array,
    ):
        self.is_array, self.origin = is_array, origin_of(f)
        self.lifted = Lifted(f, (args, kwargs))
        self.tree = f, *self.lifted.arguments
        self.leaves, self.treedef = jtu.tree_flatten(self.tree, is_leaf=is_owned)

    def owned_arrays(self) -> list[Any]:
        """The arrays of the owned modules."""
        return list(filter(self.is_array, self.lifted.values.values()))

    def arrays(self) -> list[Any]:
        """The arrays that are traced."""
        return [*filter(self.is_array, self.leaves), *self.owned_arrays()]

    def place(self, number: int) -> str:
        """The place of a leaf, in JAX's words."""
        found, _ = jtu.tree_flatten_with_path(self.tree, is_leaf=is_owned)
        which, *below = found[number][0]
        if which.idx == 0:
            return name_of(tuple(below)) or "the function"
        return ("args", "kwargs")[which.idx - 1] + keystr(tuple(below))

    def donated(self, donate: Donate) -> list[int]:
        """The positions of the donated arrays."""
        if donate == "none":
            return []
        f, args, _ = self.tree
        leaves = [
            jtu.tree_leaves(x, is_leaf=is_owned) for x in (f, args[:1], self.tree)
        ]
        start, first, every = (sum(map(self.is_array, x)) for x in leaves)
        kept = range(start, start + first) if donate.endswith("first") else ()
        return [i for i in range(every) if i not in kept]

    def trace(self, *arrays: Any) -> Result:
        """Run the call on these arrays, in the active trace."""
        # Check only while tracing: to walk the model in each call would be slow. The
        # `tree_unflatten` below would turn a repeated module into two.
        f, (args, kwargs) = self.lifted.given
        check_given(f, *args, *kwargs.values(), may_initialize=True)
        rest = iter(arrays)
        leaves = [next(rest) if self.is_array(x) else x for x in self.leaves]
        values = {
            slot: next(rest) if self.is_array(x) else x
            for slot, x in self.lifted.values.items()
        }
        f, args, kwargs = jtu.tree_unflatten(self.treedef, leaves)
        ran = self.lifted.run(values, f, args, kwargs)
        if self.lifted.roots:
            self._check_static(ran.out)
        owned = filter(eqx.is_array, values.values())
        output = Output(ran.out, owned, self.origin)
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

    def finish(self, result: Result) -> Any:
        """The output of the call, after its writes to the owned modules."""
        self.lifted.commit(result.ran)
        # In a scope every call flattens its arguments, so no module stays unbuilt.
        return result.output.put(result.ran.out, self.owned_arrays(), is_any_open())


_HOLDS_OWNED: Final = """A function under `es.jit` returned a function or an object \
that contains `{}`, a module of an `es.mutable` scope. Outputs that are not arrays are \
fixed when the function is traced, so later calls would return the module of the first \
call. Return arrays or the module itself, and create the function outside: `w = \
es.jit(lambda net: net.w)(self)`, `lambda x: w * x`."""


# --- The cache key of a call ----------------------------------------------------------


# Sentinels in a cache key. They equal no other value in it: those are tuples, and the
# numbers of owned modules.
_ARRAY: Final = "array"
_ORIGIN: Final = "origin"


def cache_key_of(call: JitCall) -> tuple[Any, ...]:
    """The static data of a call: hashable, and equal for calls that share a program.

    JAX distinguishes shapes and dtypes. The key does not contain the called function,
    so it does not keep the function alive.
    """
    lifted = call.lifted
    modules = [x for root in lifted.roots for x in root.traversal.modules]
    numbers = {id(module): number for number, module in enumerate(modules)}

    def static(x: Any) -> Any:
        return _ORIGIN if x is call.origin else typed(x)

    def leaf(x: Any, name: Callable[[int], str], number: int) -> Any:
        if is_owned(x):
            return numbers[id(x)]
        if call.is_array(x):
            return _ARRAY
        if not is_hashable(x):
            raise TypeError(_NO_HASH.format(name(number), an(type(x).__name__)))
        return static(x)

    roots = []
    for root in lifted.roots:
        nodes, owner = key_of_treedef(root.traversal.structure, static), root.ownership
        whose = lifted.scopes.index(owner.scope)
        roots.append((nodes, owner.path, owner.context, whose))
    return (
        key_of_treedef(call.treedef, static),
        tuple(leaf(x, call.place, i) for i, x in enumerate(call.leaves)),
        tuple(roots),
        tuple(leaf(x, lifted.name, slot) for slot, x in lifted.values.items()),
        tuple(numbers[id(module)] for module in lifted.reached),
        tuple(scope.cache_key for scope in lifted.scopes),
    )


_NO_HASH: Final = """`es.jit`: `{}` is {}, which cannot be hashed. Values that are not \
arrays are static, and `es.jit` looks up the compiled program by their hash. Pass a \
hashable value, such as a frozenset instead of a set; or an array, which is traced."""
