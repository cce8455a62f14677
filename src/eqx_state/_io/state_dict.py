"""The arrays of a tree by name, and back: `es.state_dict`, `es.load_state_dict`."""

import functools as ft
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._state.init import check_initialized
from .._tree.context import AlikeKey
from .._tree.dtypes import is_numeric, to_strong
from .._tree.filters import bind_all, compiled_glob, Filter
from .._tree.parts import part_of
from .._tree.walk import is_numpy, leaves, name_of
from .._typing import PyTree
from .stored import (
    by_leaf,
    in_order,
    lacking,
    Named,
    placed_as,
    shape_of,
    Stored,
    whole_of,
    why_not_split,
)


# --- Names of ours as another program writes them: the argument `rename=`.


_SHOWN_RENAME: Final = 4  # names in an error, to show how they are written

Rename: TypeAlias = Callable[[str], str] | Mapping[str, str] | None


class Renaming:
    """A function from a name to the one that `rename` makes of it.

    Two names may become one: tied weights are often stored once.
    """

    def __init__(self, rename: Rename, what: str):
        self.what = what
        self.globs: Mapping[str, str] = {}
        if isinstance(rename, Mapping):
            self.globs, self.f = rename, self.by_globs
        elif rename is None:
            self.f = lambda name: name
        elif callable(rename):
            self.f = rename
        else:
            raise TypeError(_NOT_A_RENAME.format(what, type(rename).__name__))
        for ours, theirs in self.globs.items():
            if not (isinstance(ours, str) and isinstance(theirs, str)):
                raise TypeError(_NOT_GLOBS.format(what, repr(ours), repr(theirs)))
            if ours.count("*") != theirs.count("*"):
                raise ValueError(_STARS.format(what, ours, theirs))
        self.patterns = {ours: compiled_glob(ours) for ours in self.globs}
        self.unused = dict.fromkeys(self.globs)
        self.names: dict[str, None] = {}

    def __call__(self, name: str) -> str:
        self.names[name] = None
        if not isinstance(new := self.f(name), str):
            raise TypeError(_NOT_A_NAME.format(self.what, name, type(new).__name__))
        return new

    def by_globs(self, name: str) -> str:
        found = {g: p.fullmatch(name) for g, p in self.patterns.items()}
        matches = {glob: match for glob, match in found.items() if match}
        for glob in matches:
            self.unused.pop(glob, None)
        for glob, match in matches.items():  # the first one
            first, *rest = self.globs[glob].split("*")
            pairs = zip(match.groups(), rest, strict=True)
            return first + "".join(star + text for star, text in pairs)
        return name

    def check_used(self) -> None:
        """Raise if a glob has matched no name so far."""
        if self.unused:
            globs = ", ".join(map(repr, self.unused))
            names = ", ".join(f"`{name}`" for name in list(self.names)[:_SHOWN_RENAME])
            raise ValueError(_NO_MATCH.format(self.what, globs, names))


_NOT_A_RENAME: Final = """`{}(..., rename=...)` takes a function from our name to \
theirs, or a dictionary from globs to globs, `{{"layers[*].*": "blocks.*.*"}}`. \
A `{}` was given."""

_NOT_A_NAME: Final = """`{}(..., rename=...)`: the function made of the name `{}` a \
`{}`. Return a string: the name itself if it stays."""

_NOT_GLOBS: Final = """`{}(..., rename=...)`: the entry `{}: {}` is not one from a \
string to a string."""

_STARS: Final = """`{}(..., rename={{"{}": "{}"}})`: each `*` on the left stands for \
a part of a name, and goes in order to a `*` on the right. There must be as many on \
both sides."""

_NO_MATCH: Final = """`{}(..., rename=...)`: no array has a name that matches {}. \
Globs match the whole name, as in `es.path_matches`: `*` is anything, brackets are \
literal, and the first glob that matches counts. Names are such as {}."""


_Tree = TypeVar("_Tree")

# How much of a long list an error shows: nobody reads more.
_SHOWN: Final = 20


def by_name(tree: PyTree) -> Named:
    """Every array of a tree by its name, with its index among the leaves.

    An array of a stack is there once for each layer, in the order of a list of layers.
    """
    check_initialized(tree)
    named: Named = {}
    for i, part in in_order(map(part_of, leaves(tree))):
        # Without the numbers of alike keys, which another tree may have in other order.
        path = tuple(k.key if isinstance(k, AlikeKey) else k for k in part.path)
        if (name := name_of(path)) in named:
            raise ValueError(
                f"Two arrays of the tree have one name, `{name}`. Their key paths are"
                f" {named[name][1].path!r} and {part.path!r}. A name is how the keys"
                " print: give keys that are not equal different `repr`s."
            )
        named[name] = i, part
    return named


def select(named: Named, filters: tuple[Filter, ...], tree: PyTree) -> Named:
    """What all filters select; without filters, everything."""
    if not filters:
        return named
    is_meant = ft.cache(bind_all(filters, tree))  # the layers of a stack have one part
    return {k: entry for k, entry in named.items() if is_meant(whole_of(entry[1]))}


def state_dict(tree: PyTree, *filters: Filter) -> dict[str, Any]:
    """Every array in `tree` by its name, in a flat dictionary.

    Python numbers, strings and functions are part of the tree's structure, and are not
    in it. Nodes without key paths, such as an `equinox.nn.State`, name their arrays by
    position; `es.nn.Stateful` has proper names. An `es.nn.Stacked` has the names and
    the arrays of a list of layers.

    **Arguments:**

    - `tree`: any pytree: a model, an optimizer, a tuple of both.
    - `*filters`: what an array must satisfy, all of them, as in `es.filter`. Default:
        every array, including those without a kind.

    **Returns:**

    A dictionary from the names of `es.parts`, such as `"layers[0].norm.mean"`, to the
    arrays themselves, typed keys included, in the order of flattening.

    **Raises:**

    - `ValueError`: two arrays have one name, because two keys print alike.
    - `es.NotInitializedError`: the tree still holds an `es.Initializer`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        model = {"in": eqx.nn.Linear(2, 3, key=jr.key(0)), "drop": es.nn.Dropout(key=1)}
        arrays = es.state_dict(model)
        assert list(arrays) == ["['drop'].rng", "['in'].weight", "['in'].bias"]
        assert arrays["['in'].bias"] is model["in"].bias
        assert "['drop'].rng" not in es.state_dict(model, es.Parameter)
        ```
    """
    named = select(by_name(tree), filters, tree)
    return {name: part.value for name, (_, part) in named.items()}


def load_state_dict(
    tree: _Tree, d: Mapping[str, Any], strict: bool = True, *, rename: Rename = None
) -> _Tree:
    """`tree` with the arrays of a dictionary in it; the inverse of `es.state_dict`.

    Nothing is cast. A Python number is not an array: pass an array of the leaf's dtype,
    `np.float32(3)`.

    **Arguments:**

    - `tree`: any pytree. It may be abstract, as `equinox.filter_eval_shape` returns it.
    - `d`: from names to arrays of JAX, NumPy or any library whose arrays NumPy reads.
    - `strict`: if `False`, names that only `tree` or only `d` has are skipped. Shapes
        and dtypes must agree all the same.
    - `rename`: what the dictionary calls an array of `tree`: a function from our name
        to theirs, or a dictionary from our globs to theirs. Globs are those of
        `es.path_matches`; each `*` takes as little as it can and is carried over in
        order, the first glob that matches counts, and names that none matches stay.
        Two names may become one: both places get a copy. Default: the names are ours.

    **Returns:**

    A new tree with the structure and the modes of `tree`, and with a NumPy array where
    `tree` has one. Elsewhere it has a `jax.Array`, on the devices and with the sharding
    that the array in `tree` says, if it says any.

    **Raises:**

    - `ValueError`: a name is missing or unexpected, a shape or a dtype differs (or the
        implementation of a typed key), or an entry is not an array. The message lists
        all of them.
    - `ValueError`: a glob in `rename` matches no name, or has another number of `*`
        than what it becomes.
    - `TypeError`: `d` is not a dictionary; `rename` is neither a function nor a
        dictionary of strings, or does not return a string.
    - `es.NotInitializedError`: the tree still holds an `es.Initializer`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        a, b = (eqx.nn.Linear(2, 3, key=jr.key(seed)) for seed in range(2))
        assert eqx.tree_equal(es.load_state_dict(a, es.state_dict(b)), b)

        bias = {"bias": b.bias}
        assert es.load_state_dict(a, bias, strict=False).weight is a.weight

        theirs = {"blocks.0.w": b.weight, "blocks.0.b": b.bias}
        names = {"[*].weight": "blocks.*.w", "[*].bias": "blocks.*.b"}
        (loaded,) = es.load_state_dict([a], theirs, rename=names)
        assert eqx.tree_equal(loaded, b)
        ```
    """
    what = "es.load_state_dict"
    if not isinstance(d, Mapping):
        raise TypeError(
            f"`{what}` takes a dictionary from names to arrays, as `es.state_dict`"
            f" makes it, and was given a `{type(d).__name__}`. The tree comes first:"
            " `es.load_state_dict(model, d)`."
        )
    named = by_name(tree)
    renaming = Renaming(rename, what)
    theirs = {name: renaming(name) for name in named}
    renaming.check_used()
    values = _looked_up(d, theirs)
    unexpected = d.keys() - set(theirs.values()) if strict else ()
    wanted = named if strict else {k: x for k, x in named.items() if k in values}
    advice = "`strict=False` skips names that only one of the two has."
    what = f"`{what}`: the dictionary"
    return restore(tree, wanted, values, what, advice, unexpected, theirs)


def restore(
    tree: _Tree,
    wanted: Named,
    values: Mapping[str, Any],
    what: str,
    advice: str,
    unexpected: Iterable[Any] = (),
    theirs: Mapping[str, str] | None = None,
) -> _Tree:
    """`tree` with values in the wanted places, or one error that lists all problems.

    The error begins with `what`, and ends with the advice if it is about names. Among
    the problems are those of what is `unexpected`. `theirs` has the names by which the
    values were looked up, where they are not those of the tree.
    """

    def label(name: str) -> str:
        other = name if theirs is None else theirs[name]
        return shown(name) if other == name else f"{shown(name)} (there: {other})"

    problems: dict[str, list[str]] = {
        "missing": [label(name) for name in wanted if name not in values]
        + lacking(wanted),
        "unexpected": [str(name) for name in unexpected],
    }
    about_names = any(problems.values())
    for name in [name for name in wanted if name in values]:
        part = wanted[name][1]
        leaf, shape = whole_of(part).value, shape_of(part)
        for problem, text in differences(leaf, values[name], shape):
            problems.setdefault(problem, []).append(f"{label(name)}: {text}")
    for whole in {i: whole_of(part) for i, part in wanted.values()}.values():
        if (problem := why_not_split(whole.value)) is not None:
            problems.setdefault("wrong sharding", []).append(
                f"{shown(whole.name)}: {problem}"
            )
    complain(problems, what, advice if about_names else "")
    return place(tree, wanted, values)


def complain(problems: Mapping[str, list[str]], what: str, advice: str) -> None:
    """Raise one error that lists all problems, if there are any."""
    if any(problems.values()):
        listed = [_listed(*problem) for problem in problems.items() if problem[1]]
        lines = [f"{what} does not fit the tree.", *listed, advice]
        raise ValueError("\n".join(line for line in lines if line))


def place(tree: _Tree, wanted: Named, values: Mapping[str, Any]) -> _Tree:
    """`tree` with these values, each as an array like the one in the tree."""
    flat, treedef = jtu.tree_flatten(tree)
    for i, value in by_leaf(wanted, values).items():
        flat[i] = to_strong(placed_as(flat[i], value))
    return jtu.tree_unflatten(treedef, flat)


def put(tree: _Tree, places: Named, values: Mapping[str, Any]) -> _Tree:
    """`tree` with values in these places."""
    flat, treedef = jtu.tree_flatten(tree)
    for i, value in by_leaf(places, values).items():
        flat[i] = value
    return jtu.tree_unflatten(treedef, flat)


def shown(name: str) -> str:
    """The name of an array in an error; the tree may be nothing but the array."""
    return name or "the array itself"


def _looked_up(d: Mapping[str, Any], theirs: Mapping[str, str]) -> dict[str, Any]:
    """The values of `d` by our names; places that have one name there share nothing."""
    values: dict[str, Any] = {}
    taken: set[str] = set()
    for name, other in theirs.items():
        if other in d:
            value = _copied(d[other])
            is_second = other in taken and isinstance(value, jax.Array)
            values[name] = value.copy() if is_second else value
            taken.add(other)
    return values


def _copied(value: Any) -> Any:
    """A copy of `value` if it is an array that may change, else `value`."""
    is_constant = eqx.is_array(value) and not isinstance(value, np.ndarray)
    if is_constant or not hasattr(value, "__array__"):
        return value
    try:
        return np.array(value)
    except Exception:  # for a reason of its library: it is listed as not an array
        return value


def differences(leaf: Any, value: Any, shape: tuple[int, ...]) -> list[tuple[str, str]]:
    """Why a value cannot be in the place of a leaf: kinds of problems, and texts.

    `shape` is that of the leaf, or of one layer of it in a stack.
    """
    if not (eqx.is_array(value) or isinstance(value, Stored)):
        return [("not an array", f"a `{type(value).__name__}`")]
    found = []
    if value.shape != shape:
        found.append(("wrong shape", f"{value.shape} instead of {shape}"))
    dtype = _native(value.dtype)
    from_numpy = is_numpy(value) or isinstance(value, Stored)
    if isinstance(leaf, jax.ShapeDtypeStruct) and from_numpy:
        # In an abstract model a NumPy array has become what JAX would make of it.
        if is_numeric(dtype):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
    if from_numpy and not is_numpy(leaf) and _is_too_wide(leaf.dtype):
        text = f"JAX has no {leaf.dtype} while `jax_enable_x64` is off"
        found.append(("wrong dtype", text))
    elif dtype != _native(leaf.dtype):
        found.append(("wrong dtype", f"{value.dtype} instead of {leaf.dtype}"))
    return found


def _is_too_wide(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return jax.dtypes.canonicalize_dtype(dtype) != dtype


def _native(dtype: Any) -> Any:
    """A dtype in the machine's byte order; only NumPy arrays may have another."""
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


def _listed(problem: str, lines: list[str]) -> str:
    shown = [f"    {line}" for line in sorted(lines)[:_SHOWN]]
    if (rest := len(lines) - _SHOWN) > 0:
        shown.append(f"    and {rest} more")
    return "\n".join([f"  {problem}:", *shown])
