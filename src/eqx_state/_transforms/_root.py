"""What a transform reaches: the outermost modules that a scope owns, and their leaves.

All leaves of all roots lie in one flat mapping, by `Slot`. Not by name: those of two
leaves may be equal.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.tree_util as jtu

from .._state._nn_shared import closed_copy, OpenShared
from .._state._scope import is_owned, Place
from .._tree._base import BaseModule, get_place, is_module
from .._tree._walk import dynamic_names, Visit, walk


# Which root, and which of its leaves, in the order of flattening.
Slot = tuple[int, int]

Values = dict[Slot, Any]


@dataclasses.dataclass(eq=False)
class Root:
    """An owned module that is in no other one within reach, as it is reached.

    `original` is the module that it stands for as an argument, or it itself.
    """

    module: BaseModule
    place: Place
    visits: list[Visit]  # seen from the model
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
    """The modules that are not inside another one, each once.

    `originals`: for the `id` of a stand-in, what it stands for.
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

    The owned modules stay the objects that they are; all other nodes are made anew, so
    that what the caller has put into a list of ours stays the caller's.
    """

    def put(x: Any) -> Any:
        if is_owned(x):
            pour(x, values)
            return x
        return next(values)

    for name in dynamic_names(type(module)):
        if name in module.__dict__:
            new = jtu.tree_map(put, module.__dict__[name], is_leaf=is_owned)
            object.__setattr__(module, name, new)
