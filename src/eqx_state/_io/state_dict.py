"""The arrays of a tree by name, and back: `es.state_dict`, `es.load_state_dict`.

`restore` puts values by name into a tree, and lists everything that does not fit in one
error. `files` uses it, too.
"""

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
from .._tree.filters import bind_all, compiled_glob, Filter
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
Rename: TypeAlias = Callable[[str], str] | Mapping[str, str] | None


def state_dict(tree: PyTree, *filters: Filter) -> dict[str, Any]:
    """The arrays in `tree` by name, in a flat dictionary.

    Python numbers, strings and functions belong to the tree's structure and are not
    included. Arrays in nodes without key paths, such as an `equinox.nn.State`, are
    named by position, `[0]`; `es.nn.Stateful` has proper names. An `es.nn.Stacked` has
    the names and the arrays of a list of layers.

    **Arguments:**

    - `tree`: any pytree: a model, an optimizer, a tuple of both.
    - `*filters`: include the arrays that satisfy all filters, as in `es.filter`.
        Default: every array, including those without a kind.

    **Returns:**

    A dictionary from the names of `es.parts`, such as `"layers[0].norm.mean"`, to the
    arrays themselves, typed keys included, in the order of flattening.

    **Raises:**

    - `ValueError`: two arrays have the same name, because two keys have the same
        `repr`.
    - `es.NotInitializedError`: the tree still contains an `es.Initializer`.

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
    tree: Tree,
    d: Mapping[str, Any],
    *filters: Filter,
    strict: bool = True,
    rename: Rename = None,
) -> Tree:
    """`tree` with the arrays of a dictionary; the inverse of `es.state_dict`.

    Arrays are never cast. A Python number is not an array: pass an array of the leaf's
    dtype, `np.float32(3)`.

    **Arguments:**

    - `tree`: any pytree. It may be abstract, as `equinox.filter_eval_shape` returns it.
    - `d`: maps names to arrays of JAX, NumPy or any library whose arrays NumPy can
        read.
    - `*filters`: load the arrays that satisfy all filters, as in `es.load`. `d` must
        contain them, and may contain more; all other arrays are those of `tree`.
        Default: every array, and `d` and `tree` must have the same names.
    - `strict`: if `False`, names that only `tree` or only `d` has are skipped. Shapes
        and dtypes must still agree, and at least one name must fit.
    - `rename`: maps the name of an array in `tree` to its name in `d`: a function, or a
        dictionary of globs. Globs are those of `es.path_matches`. The first glob that
        matches is used, each `*` matches as little as possible and is copied to the new
        name, in order, and names that no glob matches do not change. Two arrays may
        have the same name in `d`: each gets a copy. Default: the names are equal.

    **Returns:**

    A new tree with the structure and the modes of `tree`, with a NumPy array where
    `tree` has one, and a `jax.Array` elsewhere. A `jax.Array` has the devices and the
    sharding of the array in `tree`, if that specifies any.

    **Raises:**

    - `ValueError`: a name is missing or unexpected, a shape or a dtype differs (or the
        implementation of a typed key), an entry is not an array, or JAX converts it to
        a dtype that cannot hold its values (int64, if `jax_enable_x64` is off); or,
        with `strict=False`, not one name fits. The message lists all of them.
    - `ValueError`: a filter selects no array of `tree`.
    - `ValueError`: a glob in `rename` matches no name, or the new name has a different
        number of `*`.
    - `TypeError`: `d` is not a dictionary; `rename` is neither a function nor a
        dictionary.
    - `es.NotInitializedError`: the tree still contains an `es.Initializer`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        a, b = (eqx.nn.Linear(2, 3, key=jr.key(seed)) for seed in range(2))
        assert eqx.tree_equal(es.load_state_dict(a, es.state_dict(b)), b)

        biases = es.load_state_dict(a, es.state_dict(b), es.path_matches("bias"))
        assert biases.bias is b.bias and biases.weight is a.weight

        theirs = {"blocks.0.w": b.weight, "blocks.0.b": b.bias}
        names = {"[*].weight": "blocks.*.w", "[*].bias": "blocks.*.b"}
        (loaded,) = es.load_state_dict([a], theirs, rename=names)
        assert eqx.tree_equal(loaded, b)
        ```
    """
    what = "es.load_state_dict"
    if not isinstance(d, Mapping):
        given = f"`{type(d).__name__}` was given"
        raise TypeError(f"`{what}(tree, d)`: `d` is a dictionary, and {given}.")
    named = by_name(tree)
    rename = renaming(rename, what, named)
    theirs = {name: rename(name) for name in named}
    advice = _NOT_STRICT if strict else _NOT_ONE
    source = what, "the dictionary"
    return restore(tree, named, filters, d, source, advice, theirs, strict=strict)


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


_NOT_STRICT: Final = "`strict=False` skips names that only one of the two has."

_NOT_ONE: Final = """Not one name fits, so `strict=False` would load nothing. \
`rename=` translates names."""


# --- Arrays by name -------------------------------------------------------------------


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


def shown(name: str) -> str:
    """The name of an array in an error. If the tree is the array, the name is empty."""
    return name or "the array itself"


# --- Names in the files of other programs ---------------------------------------------


def renaming(rename: Rename, caller: str, names: Iterable[str]) -> Callable[[str], str]:
    """A function from each of these names to the name in a different program.

    Two names may map to one: tied weights are often stored once.
    """
    if isinstance(rename, Mapping):
        return _by_globs(list(names), rename, caller).__getitem__
    if rename is None or callable(rename):
        return rename or str
    raise TypeError(
        f"`{caller}(..., rename=...)` takes a function from our name to theirs, or a"
        f" dictionary from globs to globs, and `{type(rename).__name__}` was given."
    )


def _by_globs(
    names: list[str], globs: Mapping[str, str], caller: str
) -> dict[str, str]:
    found = {name: name for name in names}
    unused = []
    for ours, theirs in reversed(list(globs.items())):  # so the first match wins
        if ours.count("*") != theirs.count("*"):
            raise ValueError(_STARS.format(caller, ours, theirs))
        pattern, (first, *rest) = compiled_glob(ours), theirs.split("*")
        matches = [match for name in names if (match := pattern.fullmatch(name))]
        for match in matches:
            pairs = zip(match.groups(), rest, strict=True)
            found[match.string] = first + "".join(star + text for star, text in pairs)
        if not matches:
            unused.append(repr(ours))
    if unused:
        examples = ", ".join(f"`{name}`" for name in names[:4])
        raise ValueError(
            _NO_MATCH.format(caller, ", ".join(reversed(unused)), examples)
        )
    return found


_STARS: Final = """`{}(..., rename={{"{}": "{}"}})`: each `*` is copied to the new \
name, so both sides must have the same number."""

_NO_MATCH: Final = """`{}(..., rename=...)`: no array has a name that matches {}. \
Globs must match the whole name, as in `es.path_matches`. Names look like {}."""


# --- Values by name, put into a tree --------------------------------------------------


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
