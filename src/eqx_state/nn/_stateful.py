"""A stateful Equinox layer as a layer that stores its state."""

import inspect
from typing import Any, Final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from .._compat import no_state
from .._errors import show
from .._interop import labeled_index, strong_arrays, takes_key
from .._kinds.kinds import BatchStat
from .._state.module import Module
from .._tree.base import has_inference, is_module
from .._tree.compare import identical
from .._tree.dtypes import is_weak
from .._tree.walk import leaves, map_leaves, Visit, walk
from .._typing import KeyPath, PyTree


class Stateful(Module):
    """A stateful Equinox layer, called as `layer(x, state)`, that stores its own state.

    The state is stored where Equinox stores the initial values: in the `init` of each
    `equinox.nn.StateIndex`. Its kind is `es.BatchStat` in `equinox.nn.BatchNorm`, and
    `es.State` elsewhere. If an index occurs twice, the first occurrence stores the
    value. A layer without an index that takes a `state` is called with an empty one, so
    that layers of one signature can be wrapped alike.

    `train` and `eval` set Equinox's `inference`. When frozen, the parts that have both
    state and `inference` run as in eval mode, and no `es.BatchStat` changes.

    A `Stateful` does not search `es.Module`s in the layer for an
    `equinox.nn.StateIndex`: put a second `Stateful` into such a module.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        norm = es.nn.Stateful(eqx.nn.BatchNorm(3, axis_name="batch", mode="batch"))
        xs = jr.normal(jr.key(0), (8, 3))
        ys, norm = es.mutable(es.vmap(norm, axis_name="batch"))(xs)
        assert norm.layer.batch_counter.init == 1
        assert es.vmap(norm.eval())(xs).shape == (8, 3)
        ```
    """

    layer: PyTree
    weak: tuple[str, ...] = eqx.field(static=True, repr=False)

    def __init__(self, layer: PyTree, state: eqx.nn.State | None = None):
        """**Arguments:**

        - `layer`: a layer, or a whole model, that is called as `layer(x, state)` or
            `layer(x, state, key=key)` and returns `(y, state)`.
        - `state`: the state, if `equinox.nn.make_with_state` created the layer and the
            state. Default: the initial values in the layer.

        **Raises:**

        - `TypeError`: `layer` cannot be called, or takes no `state`; or its
            `equinox.nn.StateIndex`es are all in `es.Module`s.
        - `ValueError`: a `StateIndex` in the layer has no value.
        """
        name = getattr(layer, "__qualname__", type(layer).__qualname__)
        indices = _indices(layer)
        is_layer = callable(layer) and not isinstance(layer, type)
        if not is_layer or not (indices or _is_stateless(layer)):
            raise TypeError(
                f"`es.nn.Stateful`: `{name}` has no `eqx.nn.StateIndex` outside the"
                " `es.Module`s in it, and is not a layer that takes a `state`. Use a"
                " layer without state directly."
            )
        labeled, weak = _labeled(name, indices, state)
        self.layer, self.weak = _put(layer, labeled), tuple(weak)

    def _eqx_state_not_reduced(self, axis_name: Any) -> str:
        return _NOT_REDUCED

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """**Arguments:**

        - `x`: the input of the layer.
        - `key`: passed on to a layer that takes one.

        **Returns:**

        The output of the layer.

        **Raises:**

        - `TypeError`: the layer returned something other than `(y, state)`.
        - `ValueError`: it returned only a part of the state.
        """
        visits = [v for v in _indices(self.layer) if _has_value(v.node)]
        indices = [visit.node for visit in visits]
        state = eqx.nn.State([_as_given(index, self.weak) for index in indices])
        before = [state.get(index) for index in indices]
        layer = _without_state(self.layer, as_eval=self.frozen)
        options = {"key": key} if takes_key(layer) else {}
        result = layer(x, state, **options)
        if not _is_pair(result):
            raise TypeError(
                f"`{type(layer).__qualname__}` was called as `layer(x, state)`, and"
                f" returned `{show(result)}` instead of `(y, state)`."
            )
        y, state = result
        changed = {}
        for visit, old in zip(visits, before, strict=True):
            new = _value(state, visit, "the returned state")
            keep = self.frozen and visit.context.kind is BatchStat
            if not keep and not identical(*map(jtu.tree_leaves, (old, new))):
                index = labeled_index(visit.node.marker, strong_arrays(new))
                changed[visit.path] = index
        if changed:  # without a write, as usually in eval mode, no scope is needed
            self.layer = _put(self.layer, changed)
        return y


_NOT_REDUCED: Final = """Equinox's layer in the `es.nn.Stateful` must average over \
all mapped axes: create it with the names of all of them, such as \
`eqx.nn.BatchNorm(..., axis_name=("outer", "batch"))`. In a branch or a loop whose \
condition differs between the lanes, only some of them keep the new state: call the \
layer outside, and select its output, `jnp.where(condition, self.layer(x), x)`."""


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], eqx.nn.State)


def _is_index(x: Any) -> bool:
    return isinstance(x, eqx.nn.StateIndex)


def _has_value(index: Any) -> bool:
    return not isinstance(index.init, no_state())


def _is_node(x: Any) -> bool:
    """An index, or an `es.Module`, which must not be copied: a scope may own it."""
    return _is_index(x) or is_module(x)


def _indices(layer: PyTree) -> list[Visit]:
    """Every state index in `layer` that is not in an `es.Module`."""
    return [v for v in leaves(layer, is_leaf=_is_node) if _is_index(v.node)]


def _is_stateless(layer: Any) -> bool:
    """Whether a layer takes a `state`, although it has none."""
    nodes = jtu.tree_leaves(layer, is_leaf=_is_index)
    takes_it = "state" in inspect.signature(layer).parameters
    return takes_it and not any(map(_is_index, nodes))


def _put(layer: PyTree, indices: dict[KeyPath, Any]) -> Any:
    """`layer` with these indices; the `es.Module`s in it are not copied."""
    return map_leaves(lambda v: indices.get(v.path, v.node), layer, _is_node)


def _labeled(
    name: str, visits: list[Visit], state: eqx.nn.State | None
) -> tuple[dict[KeyPath, Any], list[str]]:
    """New indices with their paths as markers; and the names of weak values."""
    first: dict[Any, Any] = {}
    labeled, weak = {}, []
    for visit in visits:
        index = visit.node
        marker = index.marker
        if isinstance(marker, str) and state is None and _has_value(index):
            # An earlier `Stateful` labeled this index by its path, so two different
            # indices may have the same label.
            marker = (marker, *map(id, jtu.tree_leaves(index.init)))
        if marker in first:
            labeled[visit.path] = eqx.nn.delete_init_state(first[marker])
            continue
        if state is None and not _has_value(index):
            raise ValueError(
                f"`{name}` has no value for its state `{visit.name}`:"
                " `eqx.nn.make_with_state` has moved the value to the state. Pass both:"
                " `es.nn.Stateful(layer, state)`."
            )
        value = index.init if state is None else _value(state, visit, "the given state")
        value = jtu.tree_map(jnp.asarray, value)
        entries = jtu.tree_leaves_with_path(value)
        weak += [visit.name + jtu.keystr(path) for path, x in entries if is_weak(x)]
        new = labeled_index(visit.name, strong_arrays(value))
        first[marker] = first[index.marker] = labeled[visit.path] = new
    return labeled, weak


def _as_given(index: Any, weak: tuple[str, ...]) -> Any:
    """`index` with the types that the layer gave its values.

    All state is stored strong. But Equinox only lets a weak type replace a weak type,
    and a layer that begins with `jnp.array(0)` may set a weak type again.
    """

    def retype(path: KeyPath, x: Any) -> Any:
        if index.marker + jtu.keystr(path) not in weak:
            return x
        # JAX cannot cast to a weak type, but `.at[...].set` keeps it.
        zeros = jnp.full(x.shape, x.dtype.type(0).item())
        return zeros.at[...].set(x) if zeros.dtype == x.dtype else x

    value = jtu.tree_map_with_path(retype, index.init)
    return labeled_index(index.marker, value)


def _value(state: eqx.nn.State, visit: Visit, what: str) -> Any:
    try:
        return state.get(visit.node)
    except KeyError:
        raise ValueError(
            f"`es.nn.Stateful`: {what} has no value for `{visit.name}`. It is the state"
            " of a different layer, or a substate. Combine a substate with the whole"
            " state by `state.update`."
        ) from None


def _without_state(layer: PyTree, as_eval: bool) -> Any:
    """`layer` without its state; `as_eval` switches stateful parts to eval mode."""

    def delete(x: Any) -> Any:
        return x if is_module(x) else eqx.nn.delete_init_state(x)

    layer = jtu.tree_map(delete, layer, is_leaf=_is_node)
    for visit in walk(layer, is_leaf=is_module) if as_eval else ():
        # Set it in place: all nodes except `es.Module`s are copies.
        if not visit.is_leaf and has_inference(visit.node) and _indices(visit.node):
            object.__setattr__(visit.node, "inference", True)
    return layer
