"""The arrays of a tree by name, and back: `es.state_dict`, `es.load_state_dict`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from .._tree.combinators import compiled_glob
from .._tree.filters import Filter
from .._typing import PyTree, Tree
from .restore import by_name, restore, select


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


_NOT_STRICT: Final = "`strict=False` skips names that only one of the two has."

_NOT_ONE: Final = """Not one name fits, so `strict=False` would load nothing. \
`rename=` translates names."""


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
