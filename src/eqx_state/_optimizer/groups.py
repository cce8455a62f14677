"""Parameter groups: one optax transformation for each rule."""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jaxtyping import Array

from .._errors import show
from .._tree.filters import bind_to_visits, Filter, written
from .._tree.rules import choose
from .._tree.walk import leaves, map_leaves, name_of
from .._typing import KeyPath, PyTree


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


# --- The hyperparameters that `optax.inject_hyperparams` keeps in an optimizer's state.


_INJECTED: Final = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)


class Hyperparam(NamedTuple):
    """One hyperparameter: `path` leads to it in the optimizer's state.

    - `group`: the key of its group, or `None` without groups.
    - `is_scheduled`: whether the value is computed anew in each step.
    - `is_unique`: whether group and name are enough to tell it from all others.
    """

    group: Any
    name: str
    path: KeyPath
    value: Any
    is_scheduled: bool
    is_unique: bool = True

    @property
    def place(self) -> str:
        """The path of what was injected, without `hyperparams` and the name."""
        return name_of(self.path[:-2])

    @property
    def key(self) -> Any:
        if not self.is_unique:
            return self.place, self.name
        return self.name if self.group is None else (self.group, self.name)

    @property
    def written(self) -> str:
        if self.is_unique and self.group is None:
            return f"`{self.name}`"
        return f"`({_written(self.key[0])}, {self.name!r})`"


class Hyperparams(dict[Any, Any]):
    """Those of several groups: a dict that prints one to a line, filters as written."""

    def __repr__(self) -> str:
        lines = [
            f"({_written(group)}, {name!r}): {_number(x)}"
            for (group, name), x in self.items()
        ]
        return "{" + ",\n ".join(lines) + "}"


# As JAX does for a dict; but it sorts the keys, and filters have no order.
jtu.register_pytree_with_keys(
    Hyperparams,
    lambda x: ([(jtu.DictKey(key), value) for key, value in x.items()], tuple(x)),
    lambda keys, values: Hyperparams(zip(keys, values, strict=True)),
)


def by_key(opt_state: PyTree, groups: Any) -> dict[Any, Any]:
    """The value of each hyperparameter."""
    values = {x.key: x.value for x in found_in(opt_state, groups)}
    return Hyperparams(values) if isinstance(groups, Groups) else values


def found_in(opt_state: PyTree, groups: Any) -> list[Hyperparam]:
    """All hyperparameters, however deep in the state they lie."""
    found = []
    if isinstance(groups, Groups):
        for n, state in opt_state.inner_states.items():
            path = (jtu.GetAttrKey("inner_states"), jtu.DictKey(n))
            found += _found(state, path, groups.keys[n])
    else:
        found += _found(opt_state, (), None)
    count = Counter(x.key for x in found)
    return [x._replace(is_unique=count[x.key] == 1) for x in found]


def _found(state: PyTree, path: KeyPath, group: Any) -> Iterator[Hyperparam]:
    for visit in leaves(state, path, is_leaf=lambda x: isinstance(x, _INJECTED)):
        if isinstance(injected := visit.node, _INJECTED):
            scheduled = getattr(injected, "hyperparams_states", {})
            here = (*visit.path, jtu.GetAttrKey("hyperparams"))
            for name, value in injected.hyperparams.items():
                at = (*here, jtu.DictKey(name))
                yield Hyperparam(group, name, at, value, name in scheduled)
            inner = (*visit.path, jtu.GetAttrKey("inner_state"))
            yield from _found(injected.inner_state, inner, group)


def with_values(
    opt_state: PyTree, groups: Any, group: Any, values: dict[str, Any]
) -> PyTree:
    """The state with other values, in the old shapes and dtypes."""
    found = found_in(opt_state, groups)
    here = [x for x in found if group is None or group in (x.group, x.place)]
    if not here and group is not None:
        raise ValueError(_NOTHING_TO_SET.format(_written(group), _settable(found)))
    new: dict[KeyPath, Any] = {}
    for name, value in values.items():
        meant = [x for x in here if x.name == name]
        if not meant:
            where = "" if group is None else f" of the group `{_written(group)}`"
            raise ValueError(_UNKNOWN.format(name, where, _settable(found)))
        if any(x.is_scheduled for x in meant):
            raise ValueError(_SCHEDULED.format(name, _settable(found)))
        new.update((x.path, _fit(x, value)) for x in meant)
    return map_leaves(lambda visit: new.get(visit.path, visit.node), opt_state)


def _written(group: Any) -> str:
    return repr(group) if isinstance(group, str) else key_name(group)


def _number(x: Any) -> str:
    is_known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return str(np.asarray(x)) if is_known else show(x)


def _settable(found: list[Hyperparam]) -> str:
    names = [x.written for x in found if not x.is_scheduled]
    return f"These can be: {', '.join(names)}." if names else _NOTHING_INJECTED


def _fit(old: Hyperparam, value: Any) -> Any:
    """A number in the place of the old one, with its shape, dtype and devices."""
    rank = _rank(jnp.result_type(value)) if eqx.is_array_like(value) else None
    if not rank:
        given = eqx.tree_pformat(value, short_arrays=True)
        raise TypeError(_NOT_A_NUMBER.format(old.written, given))
    shape, dtype = old.value.shape, old.value.dtype
    if rank > (_rank(dtype) or 0):
        raise ValueError(_DTYPE.format(old.written, dtype, jnp.result_type(value)))
    if jnp.shape(value) not in ((), shape):
        raise ValueError(_SHAPE.format(old.written, shape, jnp.shape(value)))
    return _placed_like(old.value, jnp.broadcast_to(jnp.asarray(value, dtype), shape))


def _placed_like(old: Any, new: Array) -> Array:
    """`new` on the devices of `old`, and committed to them as `old` is or is not.

    A program is compiled for that, too.
    """
    is_known = isinstance(old, jax.Array) and not isinstance(old, jax.core.Tracer)
    if not is_known or isinstance(new, jax.core.Tracer):
        return new
    if old.committed:
        return jax.device_put(new, old.sharding)
    return jax.device_put(np.asarray(new)) if new.committed else new


def _rank(dtype: Any) -> int | None:
    """Numbers of a dtype can be cast to those of the same or a higher rank."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((i for i, k in enumerate(kinds) if jnp.issubdtype(dtype, k)), None)


_NOTHING_TO_SET: Final = """`es.Optimizer.set`: the group `{}` has no \
hyperparameters. {} A group is named by its filter. A function equals itself and no \
other, so keep the filter in a variable: `head = es.under(lambda m: m.head)`."""

_UNKNOWN: Final = """`es.Optimizer.set`: there is no hyperparameter `{}`{} that can be \
set. {}"""

_SCHEDULED: Final = """`es.Optimizer.set`: `{}` is driven by a schedule, which would \
overwrite the value in the next step. {}"""

_NOTHING_INJECTED: Final = """None can be: make the transformation by \
`optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`."""

_NOT_A_NUMBER: Final = """`es.Optimizer.set`: {} is a number, and `{}` was given. A \
schedule is an argument of what `optax.inject_hyperparams` returns."""

_DTYPE: Final = """`es.Optimizer.set`: {} has dtype {}, and the value has {}. It keeps \
its dtype, or the next step would be compiled anew."""

_SHAPE: Final = """`es.Optimizer.set`: {} has shape {}, and the value has {}."""
