"""Structure that `init` makes inside a transform.

A trace has a fixed set of inputs and outputs, and a call of `init` may change the very
structure of a module in it. So the structure leaves the trace beside the arrays, with
a note for each leaf: the position that it had before, if it had one, and otherwise its
value.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.tree_util as jtu

from .._state._collect import Snapshot
from .._state._scope import is_owned, own
from .._tree._base import BaseModule, fields_of
from .._tree._compare import same
from .._tree._walk import is_array, leaves, modules_in, Visit
from ._root import Root, Slot, Values


class Rebuilt(NamedTuple):
    """The structure of a root after the call, and where its leaves come from."""

    structure: Any
    positions: list[int | None]  # before the call; `None`: the leaf is new
    static: list[Any]  # in the places of new leaves that are not arrays


MADE_ONCE: Final = """`{}` is made by `init` in one {}, and each of them needs an \
array of its own. Initialize the modules one by one, and stack them:

    keys = jax.random.split(key, n)
    layers = eqx.filter_vmap(lambda key: Layer().init(key, x))(keys)"""


def take_apart(
    i: int, root: Root, before: Snapshot, after: Snapshot
) -> tuple[Snapshot, Rebuilt | None, Values, dict[Slot, Visit]]:
    """Take apart what a root has become: the leaves that it had, and all that is new.

    New arrays are numbered by their positions in the new structure. The last result
    says of each where it is.
    """
    pairs = zip(before.leaves, after.leaves, strict=False)
    if after.structure == before.structure and all(
        same(x, y) or (is_array(x) and is_array(y)) for x, y in pairs
    ):
        return after, None, {}, {}
    known, arrays, new = list(before.leaves), {}, {}
    position = {visit.path: k for k, visit in enumerate(root.leaves)}
    result = Rebuilt(after.structure, [], [])
    place = root.place
    for j, visit in enumerate(leaves(after.tree(), place.path, place.context)):
        k, x = position.get(visit.path), visit.node
        if not is_array(x):
            k = None
        elif k is not None and is_array(known[k]):
            known[k] = x
        else:
            k = None
            # The visit leaves the trace, and must not take a tracer with it.
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            arrays[i, j], new[i, j] = x, visit._replace(node=like)
        result.positions.append(k)
        result.static.append(None if is_array(x) else x)
    return before._replace(leaves=known), result, arrays, new


def put_together(i: int, root: Root, result: Rebuilt, arrays: Values) -> None:
    """Give a root, or what it stands for, the structure and the leaves of a result."""
    now = jtu.tree_leaves(root.original)
    values = [
        now[k] if k is not None else arrays.get((i, j), static)
        for j, (k, static) in enumerate(
            zip(result.positions, result.static, strict=True)
        )
    ]
    _merge(root.original, jtu.tree_unflatten(result.structure, values))
    own(root.original, root.place.scope, root.place.path, root.place.context)


def _merge(root: BaseModule, tree: BaseModule) -> None:
    """Make `root` what `tree` is. The `es.Module`s in it keep their identity.

    A closure over one of them goes on seeing that object.
    """
    old = {visit.path: visit.node for visit in modules_in(root)}
    staying: dict[int, BaseModule] = {}
    for visit in reversed(list(modules_in(tree))):  # children first
        fields = jtu.tree_map(
            lambda x: staying.get(id(x), x),
            dict(fields_of(visit.node)),
            is_leaf=lambda x: id(x) in staying,
        )
        node = old.get(visit.path)
        if type(node) is type(visit.node) and is_owned(node):
            staying[id(visit.node)] = node
        else:
            node = visit.node
        node.__dict__.update(fields)
