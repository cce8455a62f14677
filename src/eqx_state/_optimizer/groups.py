"""Parameter groups, one optax transformation for each rule, and hyperparameters."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import optax.tree_utils as otu

from .._errors import show
from .._tree.dtypes import fits, holds, is_numeric
from .._tree.filters import filter_text
from .._tree.rules import choose
from .._tree.walk import leaves
from .._typing import KeyPath, PyTree


# The group number of each parameter, in the order of flattening; `None` if the
# parameter is not updated.
Labels: TypeAlias = tuple[int | None, ...]


# Where the paths in an optimizer with groups contain the number of the group:
# `.opt_state.inner_states[0]`.
GROUP_AT: Final = 2


class Groups(NamedTuple):
    """The rules of an optimizer as a static value.

    The label of a group for `optax.partition` is its number, that is, its index in the
    mapping. Labels must be unique, and equal in all processes. The `repr`s of filters
    are neither.
    """

    keys: tuple[Any, ...]
    txs: tuple[Any, ...]

    def labels(self, model: PyTree, selected: PyTree) -> Labels:
        """The group of each leaf of `model` that is in `selected`."""
        numbers: Mapping[Any, int] = {key: n for n, key in enumerate(self.keys)}
        keys = choose(numbers, model, "`es.Optimizer`")
        params = jtu.tree_structure(model).flatten_up_to(selected)
        labels: list[int | None] = []
        for visit, key, x in zip(leaves(model), keys, params, strict=True):
            if x is not None:
                if key is None:
                    raise ValueError(_NO_GROUP.format(visit.name))
                n = numbers[key]
                labels.append(None if self.txs[n] is None else n)
        return tuple(labels)

    def transformation(self, labels: Labels, params: PyTree) -> Any:
        """The transformation of all groups, for these parameters."""
        used = [n for n in labels if n is not None]
        tree = jtu.tree_unflatten(jtu.tree_structure(params), used)
        txs: dict[Any, Any] = {n: with_extra_args(self.txs[n]) for n in {*used}}
        # A function, because a tree of labels that is a model may be callable.
        return optax.transforms.partition(txs, lambda _: tree)


def in_groups(params: PyTree, labels: Labels | None) -> PyTree:
    """`params` with `None` for parameters that are not updated."""
    if labels is None:
        return params
    values, treedef = jtu.tree_flatten(params)
    kept = [None if n is None else x for x, n in zip(values, labels, strict=True)]
    return jtu.tree_unflatten(treedef, kept)


def with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation, extended to accept extra arguments."""
    if isinstance(tx, optax.GradientTransformation):
        return optax.with_extra_args_support(tx)
    # An `optax.MultiSteps` object, whose `update` takes `value=`. The function above
    # would drop that argument.
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


_NO_GROUP: Final = """`es.Optimizer`: no rule matches `{}`. Every parameter needs one: \
`...: tx` applies to all others, and `...: None` does not update them."""


# --- Hyperparameters: values that `optax.inject_hyperparams` stores -------------------


class _Hyperparam(NamedTuple):
    key: Any  # in `Optimizer.hyperparams`
    group: Any  # the key of its group, or `None` without groups
    name: str
    path: KeyPath  # optax's
    value: Any
    is_scheduled: bool  # whether a schedule computes the value in each step


class Hyperparams(dict[Any, Any]):
    """A dict that refuses writes, which would not reach the optimizer."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(_READ_ONLY)

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy may be written


# To JAX, a subclass of `dict` is a leaf.
jtu.register_pytree_with_keys(
    Hyperparams,
    lambda x: ([(jtu.DictKey(key), x[key]) for key in x], tuple(x)),
    lambda keys, values: Hyperparams(zip(keys, values, strict=True)),
)


def by_key(opt_state: PyTree, tx: Any) -> Hyperparams:
    """The value of each hyperparameter."""
    return Hyperparams({x.key: x.value for x in _found_in(opt_state, tx)})


def _found_in(opt_state: PyTree, tx: Any) -> list[_Hyperparam]:
    """All hyperparameters, however deep in the state they are."""
    found: list[_Hyperparam] = []
    name_of_state = optax.InjectStatefulHyperparamsState.__name__
    field = otu.NamedTupleKey(name_of_state, "hyperparams")
    nodes: list[Any] = otu.tree_get_all_with_path(opt_state, name_of_state)
    for path, state in nodes:
        # The first keys in the state of `optax.partition`: `.inner_states[0]`.
        group = tx.keys[path[1].key] if isinstance(tx, Groups) else None
        for name, value in state.hyperparams.items():
            key = name if group is None else (group, name)
            is_scheduled = name in state.hyperparams_states
            to_value = (*path, field, jtu.DictKey(name))
            found.append(_Hyperparam(key, group, name, to_value, value, is_scheduled))
    n = Counter(x.key for x in found)
    return [x._replace(key=(_place(x), x.name)) if n[x.key] > 1 else x for x in found]


def _place(x: _Hyperparam) -> str:
    """The path of its state: `[1]` for the second transformation of a chain."""
    return jtu.keystr(x.path[:-2])


def with_values(
    opt_state: PyTree, tx: Any, group: Any, values: dict[str, Any]
) -> PyTree:
    """The state with new values, in the old shapes and dtypes."""
    found = _found_in(opt_state, tx)
    here = [x for x in found if group is None or group in (x.group, _place(x))]
    for name, value in values.items():
        meant = [x for x in here if x.name == name]
        if not meant or any(x.is_scheduled for x in meant):
            why = "is driven by a schedule" if meant else "is not a hyperparameter"
            which = "" if group is None else f" of the group `{filter_text(group)}`"
            names = [f"`{filter_text(x.key)}`" for x in found if not x.is_scheduled]
            can = ", ".join(names) or "none"
            raise ValueError(_CANNOT_BE_SET.format(name, which, why, can))
        for x in meant:
            is_it = lambda path, _, x=x: path == x.path  # noqa: E731
            opt_state = otu.tree_set(opt_state, is_it, **{name: _fitted(x, value)})
    return opt_state


def _fitted(x: _Hyperparam, value: Any) -> Any:
    """The number with the shape, dtype and devices of the old one."""
    is_number = eqx.is_array_like(value) and jnp.shape(value) in ((), x.value.shape)
    if not is_number or not _is_castable(value, x.value.dtype):
        raise ValueError(_OTHER_TYPE.format(x.name, show(x.value), show(value)))
    is_known = not isinstance(value, jax.Array)  # do not wait for its value
    is_small = holds(x.value.dtype, value)
    if not is_small or is_known and not fits(x.value.dtype, np.asarray(value)):
        raise ValueError(_TOO_LARGE.format(x.name, show(x.value)))
    return jnp.full_like(x.value, value)


def _is_castable(x: Any, dtype: Any) -> bool:
    """Whether no number becomes a bool, no float an integer, no complex a float."""
    given = x.dtype if hasattr(x, "dtype") else np.dtype(type(x))
    lost = [k for k in _KINDS if jnp.issubdtype(given, k) > jnp.issubdtype(dtype, k)]
    return is_numeric(given) and not lost


_KINDS: Final = jnp.number, jnp.inexact, jnp.complexfloating


_READ_ONLY: Final = """`optimizer.hyperparams` cannot be written, because an optimizer \
does not change. Create one with other values: `optimizer = \
optimizer.set(learning_rate=1e-4)`."""

_CANNOT_BE_SET: Final = """`es.Optimizer.set`: `{}`{} {}. These can be set: {}. To \
name hyperparameters, create the transformation with \
`optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`."""

_TOO_LARGE: Final = """`es.Optimizer.set`: the value of `{}` is too large for `{}`, \
the dtype of the hyperparameter."""

_OTHER_TYPE: Final = """`es.Optimizer.set`: `{}` is `{}`, but `{}` was given. Shape \
and dtype must not change, or the next step would recompile."""
