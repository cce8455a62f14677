"""Parameter groups: one optax transformation for each rule."""

import inspect
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import jax.tree_util as jtu
import optax

from .._tree._bind import bind_to_visits, Filter, written
from .._tree._rules import choose
from .._tree._walk import leaves
from .._typing import PyTree


# For each parameter, in the order of flattening, the number of its group; `None` where
# the parameter is left as it is.
Labels: TypeAlias = tuple[int | None, ...]


class Groups:
    """The rules of an optimizer as a static value, compared by what they are made of.

    A group's number, its place in the mapping, is its label for `optax.partition`. It
    has to be the same in every process, and the `repr`s of two filters may be equal.
    """

    def __init__(self, rules: Mapping[Any, Any]):
        self.keys = tuple(rules)
        self.txs = tuple(rules.values())

    def labels(self, model: PyTree, wrt: Filter) -> Labels:
        """The group of each leaf of `model` that `wrt` selects."""
        rules = dict(zip(self.keys, range(len(self.keys)), strict=True))
        keys = choose(rules, model, "`es.Optimizer`")
        is_selected = bind_to_visits((wrt,), model)
        labels, unmatched = [], list[str]()
        for visit, key in zip(leaves(model), keys, strict=True):
            if is_selected(visit):
                n = None if key is None else rules[key]
                labels.append(None if n is None or self.txs[n] is None else n)
                unmatched += [f"`{visit.name}`"] if n is None else []
        if unmatched:
            rest = f" and {len(unmatched) - 5} more" if len(unmatched) > 5 else ""
            raise ValueError(_NO_GROUP.format(", ".join(unmatched[:5]) + rest))
        return tuple(labels)

    def transformation(self, labels: Labels, params: PyTree) -> Any:
        """The transformation of all groups, for these parameters."""
        used = [n for n in labels if n is not None]
        tree = jtu.tree_unflatten(jtu.tree_structure(params), used)
        txs: dict[Any, Any] = {
            n: with_extra_args(self.txs[n]) for n in sorted(set(used))
        }
        # A function, because a tree of labels that is a model may be callable.
        return optax.transforms.partition(txs, lambda _: tree)

    def _key(self) -> tuple[Any, ...]:
        return self.keys, self.txs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Groups) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        pairs = zip(self.keys, self.txs, strict=True)
        return f"{{{', '.join(f'{key_name(k)}: {tx}' for k, tx in pairs)}}}"


def key_name(key: Any) -> str:
    """The key of a group as users write it."""
    return "..." if key is ... else written(key)


def in_groups(params: PyTree, labels: Labels | None) -> PyTree:
    """`params` with holes in place of those that are left as they are."""
    if labels is None:
        return params
    values, treedef = jtu.tree_flatten(params)
    kept = [None if n is None else x for x, n in zip(values, labels, strict=True)]
    return jtu.tree_unflatten(treedef, kept)


def with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation, which accepts further arguments."""
    if isinstance(tx, optax.GradientTransformation):
        return optax.with_extra_args_support(tx)
    # For an object such as `optax.MultiSteps`, optax would drop those arguments.
    parameters = inspect.signature(tx.update).parameters.values()
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return tx.update(updates, state, params, **(extra if takes_more else {}))

    return optax.GradientTransformationExtraArgs(tx.init, update)


def check_extra(extra: dict[str, Any], params: PyTree) -> None:
    """Raise `ValueError` for an argument that is shaped like all of the parameters."""
    structure = jtu.tree_structure(params)
    # A model that is one array has the structure of any number.
    is_tree = structure.num_leaves > 0 and not jtu.treedef_is_leaf(structure)
    for name, value in extra.items():
        is_alike = is_tree and jtu.tree_structure(value) == structure
        if is_alike or name == "value_fn":
            raise ValueError(_WHOLE.format(name))


_NO_GROUP: Final = """`es.Optimizer`: no rule matches {}. Every parameter needs one: \
`...` stands for all others, and `None` leaves them as they are:

    es.Optimizer({{es.path_matches("*.bias"): tx}})              # wrong
    es.Optimizer({{es.path_matches("*.bias"): tx, ...: None}})   # right"""

_WHOLE: Final = """`es.Optimizer.update`: `{}` goes with all parameters together, and \
this optimizer has groups, each of which sees only its own. Use one transformation \
without groups."""
