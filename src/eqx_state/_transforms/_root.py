"""The roots of a transform: the outermost owned modules that it reaches.

All leaves of all roots are in one flat mapping by `Slot`. A name would not do as a key,
since two leaves may have equal names.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._state._nn_shared import closed_copy, OpenShared
from .._state._scope import is_owned, Place
from .._tree._base import BaseModule, get_place, is_module
from .._tree._walk import dynamic_names, Visit, walk


# The index of a root, and of one of its leaves in the order of flattening.
Slot = tuple[int, int]

Values = dict[Slot, Any]


@dataclasses.dataclass(eq=False)
class Root:
    """An owned module that is not inside another one that the transform reaches.

    - `place`, `visits`: where it is in its model; paths and kinds are seen from there.
    - `original`: the module that a stand-in stands for; otherwise `module` itself.
    """

    module: BaseModule
    place: Place
    visits: list[Visit]
    original: BaseModule

    @property
    def is_stand_in(self) -> bool:
        return self.original is not self.module

    def __post_init__(self) -> None:
        self.leaves = [visit for visit in self.visits if visit.is_leaf]
        nodes = [visit for visit in self.visits if not visit.is_leaf]
        self.modules = [visit for visit in nodes if is_module(visit.node)]
        is_shared = any(isinstance(visit.node, OpenShared) for visit in nodes)
        tree = closed_copy(self.module) if is_shared else self.module
        self.structure = jtu.tree_structure(tree)


def roots_among(
    reached: Sequence[BaseModule], originals: dict[int, BaseModule]
) -> list[Root]:
    """The modules among `reached` that are not inside another one, each once.

    `originals`: the module that a stand-in stands for, by the `id` of the stand-in.
    """
    roots: list[Root] = []
    inside: set[int] = set()
    for module in reached:
        if id(module) in inside:
            continue
        place = get_place(module)
        visits = walk(module, place.path, place.context)
        root = Root(module, place, visits, originals.get(id(module), module))
        below = {id(visit.node) for visit in root.modules}
        # A closure may lead to a part before an argument leads to the whole.
        roots = [x for x in roots if id(x.module) not in below] + [root]
        inside |= below
    return roots


def pour(module: BaseModule, values: Iterator[Any]) -> None:
    """Put leaves, in the order of flattening, into a module and the modules inside it.

    Owned modules stay the objects that they are. All other nodes are rebuilt, so that a
    list that the caller holds, too, does not change.
    """

    def put(x: Any) -> Any:
        if is_owned(x):
            pour(x, values)
            return x
        return next(values)

    fields = module.__dict__
    for name in dynamic_names(type(module)):
        if name in fields:
            new = fields[name]
            if eqx.is_array(new):  # as most are: `tree_map` is slow for one leaf
                new = next(values)
            else:
                new = jtu.tree_map(put, new, is_leaf=is_owned)
            object.__setattr__(module, name, new)
