"""Rules: which array gets which value, chosen by kind."""

from collections.abc import Mapping
from typing import Any, TypeVar

from .._kinds._kinds import is_kind
from ._walk import is_array, map_leaves, Visit


_Tree = TypeVar("_Tree")


def most_derived(kind: type | None, mapping: Mapping[Any, Any]) -> Any:
    """The key of `mapping` that applies to arrays of `kind`; `None` if none does.

    The most derived kind comes first, then `...`, which stands for every other array.
    """
    for base in () if kind is None else kind.__mro__:
        if base in mapping:
            return base
    return ... if ... in mapping else None


def check_kinds(mapping: Mapping[Any, Any], what: str) -> None:
    """Raise `TypeError` for a key of a mapping that is not a kind."""
    for key in mapping:
        if key is not ... and not is_kind(key):
            raise TypeError(
                f"{what}: `{key!r}` is not a kind. The keys are kinds, such as "
                "`es.Parameter`, and `...` for every other array."
            )


def spec(tree: _Tree, values: Mapping[Any, Any], default: Any = None) -> _Tree:
    """A tree of values chosen by kind: vmap axes, shardings, labels.

    **Arguments:**

    - `tree`: any pytree.
    - `values`: from kinds to values. The most derived kind that matches counts; the key
        `...` stands for every array that no kind matches.
    - `default`: the value for all other leaves.

    **Returns:**

    The tree with a value in place of each leaf. To `optax.multi_transform` pass `lambda
    _: labels`, since it would call labels that are callable, as many models are.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        norm = es.nn.BatchNorm(3)
        axes = es.spec(norm, {es.State: 0}, default=None)
        assert (axes.weight, axes.mean) == (None, 0)
        ```
    """
    check_kinds(values, "`es.spec`")

    def value(visit: Visit) -> Any:
        key = most_derived(visit.kind, values) if is_array(visit.node) else None
        return default if key is None else values[key]

    return map_leaves(value, tree)
