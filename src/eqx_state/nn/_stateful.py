"""Any stateful layer of Equinox as a layer with state of its own."""

from typing import Any

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import Array

from .._base import BaseModule
from .._interop import labelled_index, takes_key
from .._kinds import BatchStat
from .._module import Module
from .._traverse import has_inference, KeyPath, same, set_flags, Visit, walk


class Stateful(Module):
    """A stateful Equinox layer, called as `layer(x, state)`, with its state inside.

    The state is where Equinox has the initial values, in the `init` of each
    `equinox.nn.StateIndex`: of kind `es.BatchStat` in `equinox.nn.BatchNorm`, and
    `es.State` elsewhere. An index that is in two places has its value in the first.

    `train` and `eval` set Equinox's `inference`. When frozen, the parts that have both
    state and `inference` run as in eval mode, and no `es.BatchStat` changes.

    `es.Module`s in the layer keep their own state. An `equinox.nn.StateIndex` in one of
    them is not seen: put a `Stateful` there.

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

    layer: Any

    def __init__(self, layer: Any, state: eqx.nn.State | None = None):
        """**Arguments:**

        - `layer`: a layer, or a whole model, that is called as `layer(x, state)` or
            `layer(x, state, key=key)` and returns `(y, state)`.
        - `state`: its state, if it comes from `equinox.nn.make_with_state`. Default:
            the initial values in the layer.

        **Raises:**

        - `TypeError`: `layer` cannot be called, or holds no `equinox.nn.StateIndex`.
        - `ValueError`: there is no value for one of them.
        """
        name = type(layer).__qualname__
        if not callable(layer):
            raise TypeError(
                "`es.nn.Stateful` is for layers that are called as `layer(x, state)`,"
                f" and a `{name}` cannot be called."
            )
        if not (indices := _indices(layer)):
            raise TypeError(
                "`es.nn.Stateful` is for layers that are called as `layer(x, state)`,"
                f" and `{name}` holds no `eqx.nn.StateIndex` outside the `es.Module`s"
                " in it. A layer without state is used as it is; an `es.Module` holds"
                " `es.nn.Stateful(norm)` in place of `norm`, and calls it without the"
                " state."
            )
        self.layer = _put(layer, _labelled(name, indices, state))

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """**Arguments:**

        - `x`: the input of the layer.
        - `key`: passed on to a layer that takes one.

        **Returns:**

        The output of the layer.

        **Raises:**

        - `TypeError`: the layer returned something else than `(y, state)`.
        """
        visits = [v for v in _indices(self.layer) if _has_value(v.node)]
        indices = [visit.node for visit in visits]
        state = eqx.nn.State(indices)
        before = [state.get(index) for index in indices]
        layer = _for_call(self.layer, as_eval=self.frozen)
        options = {"key": key} if takes_key(layer) else {}
        try:
            result = layer(x, state, **options)
        except ValueError as e:
            if "weak_" in str(e):
                e.add_note(_WEAK)
            raise
        if not _is_pair(result):
            returned = eqx.tree_pformat(result, short_arrays=True)
            raise TypeError(
                f"`{type(layer).__qualname__}` was called as `layer(x, state)`, and"
                f" returned `{returned}` in place of `(y, state)`, with an"
                " `eqx.nn.State`. A layer that returns `y` alone has no state to keep:"
                " it is used as it is, without `es.nn.Stateful`."
            )
        y, state = result
        changed = {}
        for visit, old in zip(visits, before, strict=True):
            new = state.get(visit.node)
            keep = self.frozen and visit.context.kind is BatchStat
            if not keep and not _same(old, new):
                changed[visit.path] = eqx.tree_at(_init, visit.node, new)
        if changed:  # in eval mode mostly not, and then there need be no scope
            self.layer = _put(self.layer, changed)
        return y


_WEAK = """`es.nn.Stateful` keeps state strongly typed, as every `es.Module` does: a \
weakly typed initial value, such as `jnp.array(0)`, has become a strong one. What is \
set has to be strong, too: `state.set(index, jnp.zeros_like(state.get(index)))`."""


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], eqx.nn.State)


def _is_index(x: Any) -> bool:
    return isinstance(x, eqx.nn.StateIndex)


def _init(index: Any) -> Any:
    return index.init


_no_value = type(eqx.nn.delete_init_state(eqx.nn.StateIndex(0)).init)


def _has_value(index: Any) -> bool:
    return not isinstance(index.init, _no_value)


def _is_node(x: Any) -> bool:
    """What is taken as a whole: an index, and an `es.Module`, which may be owned."""
    return _is_index(x) or isinstance(x, BaseModule)


def _indices(layer: Any) -> list[Visit]:
    """Every state index in `layer` that is not in an `es.Module`."""
    found: list[Visit] = []
    skipped: KeyPath | None = None
    for visit in walk(layer):
        if skipped is not None and visit.path[: len(skipped)] == skipped:
            continue
        if isinstance(visit.node, BaseModule):
            skipped = visit.path
        elif _is_index(visit.node):
            found.append(visit)
    return found


def _put(layer: Any, indices: dict[KeyPath, Any]) -> Any:
    """`layer` with these indices; the `es.Module`s in it are the same objects."""
    return jtu.tree_map_with_path(
        lambda path, x: indices.get(path, x), layer, is_leaf=_is_node
    )


def _labelled(
    name: str, visits: list[Visit], state: eqx.nn.State | None
) -> dict[KeyPath, Any]:
    """New indices with their values, and with their paths in place of markers."""
    first: dict[Any, Any] = {}
    labelled = {}
    for visit in visits:
        index = visit.node
        marker = index.marker
        if isinstance(marker, str) and state is None and _has_value(index):
            # Two layers that this function has labelled may have the same labels.
            marker = (marker, *map(id, jtu.tree_leaves(index.init)))
        if marker in first:
            labelled[visit.path] = eqx.nn.delete_init_state(first[marker])
            continue
        if state is not None:
            index = eqx.tree_at(_init, index, _value(state, visit))
        elif not _has_value(index):
            raise ValueError(
                f"`{name}` holds no value for its state `{visit.name}`:"
                " `eqx.nn.make_with_state` has moved it to the state. Pass both, or"
                " make the layer without it:\n\n"
                f"    layer, state = eqx.nn.make_with_state({name})(...)\n"
                "    es.nn.Stateful(layer, state)\n\n"
                f"    es.nn.Stateful({name}(...))"
            )
        new = labelled_index(visit.name, index.init)
        first[marker] = first[index.marker] = labelled[visit.path] = new
    return labelled


def _value(state: eqx.nn.State, visit: Visit) -> Any:
    try:
        return state.get(visit.node)
    except KeyError:
        raise ValueError(
            f"The state given to `es.nn.Stateful` has no value for `{visit.name}`: it"
            " is the state of another layer. Pass the two that"
            " `eqx.nn.make_with_state` has returned together."
        ) from None


def _same(old: Any, new: Any) -> bool:
    leaves = zip(*map(jtu.tree_leaves, (old, new)), strict=True)
    return all(same(a, b) for a, b in leaves)


class _Hidden:
    """An `es.Module` as a leaf, which is not copied."""

    def __init__(self, module: BaseModule):
        self.module = module


def _for_call(layer: Any, as_eval: bool) -> Any:
    """`layer` as Equinox calls it, its state elsewhere; stateful parts as in eval."""

    def flags(visit: Visit) -> dict[str, Any]:
        stateful = has_inference(visit.node) and _indices(visit.node)
        return {"inference": True} if stateful else {}

    def hide(x: Any) -> Any:
        return _Hidden(x) if isinstance(x, BaseModule) else eqx.nn.delete_init_state(x)

    layer = jtu.tree_map(hide, layer, is_leaf=_is_node)
    if as_eval:
        layer = set_flags(layer, flags)
    return jtu.tree_map(lambda x: x.module if isinstance(x, _Hidden) else x, layer)
