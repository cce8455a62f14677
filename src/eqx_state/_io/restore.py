"""Arrays by name, put into a tree, or one error that lists all that do not fit."""

import functools as ft
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._state.lazy import check_none_missing, check_not_a_class
from .._tree.context import AlikeKey
from .._tree.dtypes import canonical, to_strong
from .._tree.filters import bind_all, Filter
from .._tree.parts import LayerPart, Part, part_of, stacks_of
from .._tree.rules import check_filters
from .._tree.walk import is_numpy, name_of, Visit, walk
from .._typing import KeyPath, PyTree, Tree
from .reading import (
    as_one,
    in_dtype,
    in_order,
    placed_like,
    shape_of,
    Stored,
    whole_of,
)


Named: TypeAlias = dict[str, tuple[int, Part]]  # leaf index and array


def by_name(
    tree: PyTree, check: Callable[[list[Visit]], None] = check_none_missing
) -> Named:
    """The arrays of a tree by name. `check` is called with the visits of the tree.

    A stacked array has an entry for each layer, in the order of a list of layers.
    """
    check_not_a_class(tree)
    visits = walk(tree)
    check(visits)
    named: Named = {}
    for i, part in in_order(part_of(visit) for visit in visits if visit.is_leaf):
        if (name := name_of(plain(part.path))) in named:
            raise ValueError(
                f"Two arrays of the tree have the same name, `{name}`. Names contain"
                " the `repr`s of keys, so different keys must have different `repr`s."
            )
        named[name] = i, part
    return named


def plain(path: Iterable[Any]) -> KeyPath:
    """A path without the numbers of equal keys, which may differ between trees."""
    return tuple(key.key if isinstance(key, AlikeKey) else key for key in path)


def select(named: Named, filters: tuple[Filter, ...], tree: PyTree) -> Named:
    """The arrays that all filters select; without filters, all arrays."""
    if not filters:
        return named
    is_meant = ft.cache(bind_all(filters, tree))  # all layers of a stack share a part
    return {k: entry for k, entry in named.items() if is_meant(whole_of(entry[1]))}


def shown(name: str) -> str:
    """The name of an array in an error. If the tree is the array, the name is empty."""
    return name or "the array itself"


def restore(
    tree: Tree,
    named: Named,
    filters: tuple[Filter, ...],
    given: Mapping[str, Any],
    source: tuple[str, str],
    advice: str,
    theirs: Mapping[str, str] | None = None,
    *,
    strict: bool,
    cast: bool | None = None,
) -> Tree:
    """`tree` with the values of `given`, or one error that lists all problems.

    The error begins with `source`, the name of the caller and that of `given`. If names
    differ, it ends with `advice`. `theirs` maps names in the tree to names in `given`,
    if they differ. `cast` is that of `differences`.
    """
    theirs = {name: name for name in named} if theirs is None else theirs
    check_filters(filters, tree, f"`{source[0]}`")
    wanted = select(named, filters, tree)
    values = _looked_up(given, {name: theirs[name] for name in wanted})
    unexpected = set() if filters else given.keys() - set(theirs.values())
    if not strict and (values or not wanted):
        wanted, values, unexpected = *_in_common(wanted, values), set()

    def label(name: str) -> str:
        is_same = theirs[name] == name
        return shown(name) if is_same else f"{shown(name)} (there: {theirs[name]})"

    missing = [name for name in wanted if name not in values]
    more = [str(name) for name in unexpected]
    problems = {"missing": [label(name) for name in missing], "unexpected": more}
    if not missing + more:
        advice = ""
    elif missing and {f"[{name!r}]" for name in missing} <= given.keys():
        advice = _OF_A_STATE_DICT
    fitted: dict[str, Any] = {}
    too_large: set[str] = set()  # found while arrays are read
    for name, (_, part) in wanted.items():
        if name in values:
            leaf, value = whole_of(part).value, values[name]
            found = differences(leaf, value, shape_of(part), cast)
            for problem, text in found:
                problems.setdefault(problem, []).append(f"{label(name)}: {text}")
            if not found:
                dtype = _dtype_inside(leaf, value, cast)
                said = f"{label(name)}: {value.dtype} does not fit into {dtype}"
                report = ft.partial(too_large.add, said)
                fitted[name] = in_dtype(value, dtype, report)
    loaded = tree
    if not any(problems.values()):
        loaded = put(tree, wanted, fitted, lambda *pair: to_strong(placed_like(*pair)))
    else:  # read what may be too large, to list it, too
        for name, value in fitted.items():
            if isinstance(value, Stored) and value is not values[name]:
                value.read(())
    if too_large:
        problems["too large"] = [*too_large]
        advice = f"{advice} {_TOO_LARGE}".lstrip()
    complain(problems, f"`{source[0]}`: {source[1]}", advice)
    return loaded


_OF_A_STATE_DICT: Final = """These are the names of `es.state_dict(model)`, which was \
saved instead of the model. `es.save(path, model)` uses the same names. For this file: \
`es.load_state_dict(model, es.load(path, es.state_dict(model)))`."""

_TOO_LARGE: Final = """Load large numbers into wider dtypes. Without \
`jax_enable_x64`, JAX has neither int64 nor float64, but NumPy arrays in the tree may \
have them."""


def _looked_up(d: Mapping[str, Any], theirs: Mapping[str, str]) -> dict[str, Any]:
    """The values of `d` by names in the tree. Tied arrays get separate copies."""
    values: dict[str, Any] = {}
    taken: set[str] = set()
    for name, other in theirs.items():
        if other in d:
            value = d[other]
            if isinstance(value, jax.Array):
                # Copy, or donating the model would donate one buffer twice.
                value = value.copy() if other in taken else value
            elif hasattr(value, "__array__"):  # copy, because it may change
                value = np.array(value)
                value = value.astype(_native(value.dtype), copy=False)
            values[name] = value
            taken.add(other)
    return values


def _in_common(named: Named, values: Mapping[str, Any]) -> tuple[Named, dict[str, Any]]:
    """The arrays with values, and all layers of a stack if one has a value.

    Layers without a value keep their arrays. In an abstract stack they have none, so
    they are reported as missing.
    """
    found = {i for name, (i, _) in named.items() if name in values}
    wanted = {name: entry for name, entry in named.items() if entry[0] in found}
    kept = {
        name: part.value
        for name, (_, part) in wanted.items()
        if name not in values and not _is_abstract(whole_of(part).value)
    }
    return wanted, {**values, **kept}


def differences(
    leaf: Any, value: Any, shape: tuple[int, ...], cast: bool | None = None
) -> list[tuple[str, str]]:
    """Why a value cannot replace a leaf: kinds of problems, and texts.

    - `shape`: the shape of the leaf, or in a stack, of one layer.
    - `cast`: whether floats are converted; `None` if the caller has no such option.
    """
    if not (eqx.is_array(value) or isinstance(value, Stored)):
        return [("not an array", f"`{type(value).__name__}`")]
    found = []
    if value.shape != shape:
        found.append(("wrong shape", f"{value.shape} instead of {shape}"))
    given, becomes = value.dtype, _dtype_inside(leaf, value, cast)
    if becomes != (_native(leaf.dtype) if is_numpy(leaf) else leaf.dtype):
        made = "" if becomes == given else f" (converted to {becomes} by JAX)"
        cure = " (`cast=True` converts floats)" if _are_floats(leaf, value) else ""
        text = f"{given}{made} instead of {leaf.dtype}"
        found.append(("wrong dtype", text + (cure if cast is False else "")))
    return found


def _dtype_inside(leaf: Any, value: Any, cast: bool | None) -> Any:
    """The dtype of a value in the tree, in the place of a leaf."""
    if cast and _are_floats(leaf, value):
        return _native(leaf.dtype) if is_numpy(leaf) else canonical(leaf.dtype)
    # Without `jax_enable_x64`, JAX converts float64 to float32. The dtypes of an
    # abstract model are already converted; otherwise nothing may be cast.
    is_converted = _is_abstract(leaf) or value.dtype == leaf.dtype
    if is_converted and not isinstance(value, jax.Array) and not is_numpy(leaf):
        return canonical(value.dtype)
    return value.dtype


def _are_floats(*arrays: Any) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype with this machine's order of bytes, which JAX and files need."""
    return dtype.newbyteorder("=")


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def complain(problems: Mapping[str, list[str]], what: str, advice: str) -> None:
    """Raise one error that lists all problems, if there are any."""
    if any(problems.values()):
        lines = [f"{what} does not fit the tree."]
        for problem, found in problems.items():
            if found:
                lines += [f"  {problem}:", *(f"    {text}" for text in sorted(found))]
        raise ValueError("\n".join(lines + ([advice] if advice else [])))


def put(
    tree: Tree,
    places: Named,
    values: Mapping[str, Any],
    convert: Callable[[Any, Any], Any] = lambda leaf, value: value,
) -> Tree:
    """`tree` with these values, which include all layers of each stack."""
    flat, treedef = jtu.tree_flatten(tree)
    by_leaf: dict[int, list[str]] = {}
    for name, (i, _) in places.items():
        by_leaf.setdefault(i, []).append(name)
    for i, names in by_leaf.items():
        part, each = places[names[0]][1], [values[name] for name in names]
        if isinstance(part, LayerPart):
            each = [as_one(each, tuple(n for _, n in stacks_of(part.whole)))]
        try:
            flat[i] = convert(flat[i], each[0])
        except ValueError as e:  # it does not fit the sharding of the leaf
            e.add_note(f"This is about the array `{shown(whole_of(part).name)}`.")
            raise
    return jtu.tree_unflatten(treedef, flat)
