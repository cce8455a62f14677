"""The hyperparameters that `optax.inject_hyperparams` keeps in an optimizer's state."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jaxtyping import Array

from .._tree._show import show
from .._tree._walk import leaves, map_leaves, name_of
from .._typing import KeyPath, PyTree
from ._groups import Groups, key_name


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
        raise ValueError(_NO_GROUP.format(_written(group), _settable(found)))
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


_NO_GROUP: Final = """`es.Optimizer.set`: the group `{}` has no hyperparameters. {} \
A group is named by its filter. A function equals itself and no other, so keep the \
filter in a variable: `head = es.under(lambda m: m.head)`."""

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
