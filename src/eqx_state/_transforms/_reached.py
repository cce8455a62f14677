"""All leaves that `es.vmap` or `es.shard_map` reaches, in one flat mapping."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax.tree_util as jtu

from .._state._scope import is_owned
from .._tree._walk import leaves, name_of, Visit
from ._arguments import argument_name, check_given, positional_names
from ._copies import Opened
from ._lift import Lifted, Ran
from ._mapped_axes import argument_axes, FunctionAxes, Manner
from ._root import Slot, Values
from ._stand_ins import by_entry, stand_in
from ._transform import Transform


# These take the place of a root's index in the slots of the function and of the
# arguments. Roots are counted from 0, so the numbers do not clash.
FUNCTION: Final = -2
ARGUMENTS: Final = -1


class Reached:
    """All leaves that a call of a mapping transform reaches, and the axis of each.

    Why one flat mapping? Leaves come from three places: the function, the arguments,
    and the owned modules that either of them reaches. Their axes have different
    sources, and a lane puts them back in different ways, but nothing else differs. By
    slot, sizes are checked, keys are split and axes are handed to JAX in one way for
    all.
    """

    def __init__(
        self,
        f: Any,
        axes: Mapping[Any, Any],
        in_axes: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        manner: Manner,
    ):
        by_argument, entries, modules, asked = argument_axes(
            in_axes, args, kwargs, manner
        )
        self.opened = Opened(f)
        self.by_rules = FunctionAxes(axes, f, self.opened.tree, manner)
        given, stand_ins = stand_in(
            (args, kwargs), by_argument, self.by_rules.of_module
        )
        self.lifted = Lifted(f, given, stand_ins=stand_ins)
        check_given(*self.opened.values, *args, *kwargs.values())
        # `init` may have yet to make what a filter is meant for.
        if not self.lifted.is_initializing:
            self.by_rules.check_matched()
            for each in asked:
                each.check_matched()
        self.values: Values = dict(self.lifted.values)
        self.axes: dict[Slot, Any] = {}
        meanings = {id(x.module): x.meaning for x in stand_ins}
        # What `in_axes` says of the first leaf of each module, if it has one.
        first = {id(x): own[0] for x, own in by_entry(given, entries) if own}
        self.entries = modules | first
        for i, root in enumerate(self.lifted.roots):
            own = meanings.get(id(root.module))
            if i in self.lifted.records:  # one for all lanes, whatever the rules say
                own = [manner.shared for _ in root.leaves]
            if own is None:
                own = self.by_rules.of_module(root.module, root.leaves)
            self.axes.update(((i, k), axis) for k, axis in enumerate(own))
        # Owned modules are leaves in these trees, and have no axis there. Their own
        # leaves are in the mapping already, as those of the roots.
        self.trees = {FUNCTION: self.opened.tree, ARGUMENTS: given}
        self._add(FUNCTION, self.by_rules.of_function())
        self._add(ARGUMENTS, by_argument)

    def _add(self, where: int, axes: Sequence[Any]) -> None:
        for k, (x, own) in enumerate(by_entry(self.trees[where], axes)):
            self.values[where, k] = x
            self.axes[where, k] = None if is_owned(x) else own[0]

    def name(self, slot: Slot) -> str:
        """The name of a leaf, as the user of the function writes it."""
        where, k = slot
        if where not in self.trees:
            return self.lifted.name(slot)
        path = leaves(self.trees[where], is_leaf=is_owned)[k].path
        if where == ARGUMENTS:
            names = positional_names(self.opened.f)
            argument = path[1].key if path[0].idx else path[1].idx
            return argument_name(argument, path[2:], names)
        f = self.trees[where]
        while isinstance(f, Transform):
            f, path = f.f, path[1:]
        return name_of(path)

    def call(self, inputs: Values, is_copied: bool) -> Ran:
        """Call the function in a lane that has these values.

        `is_copied`: whether there are values of the function itself among them.
        """
        values, copy, f = {**self.values, **inputs}, None, self.opened.f
        if is_copied:
            copy = self.opened.copy(self._tree(FUNCTION, values))
            f = copy.f
        args, kwargs = self._tree(ARGUMENTS, values)
        ran = self.lifted.run(values, lambda: f(*args, **kwargs))
        return ran if copy is None else ran._replace(out=copy.finish(ran.out))

    def _tree(self, where: int, values: Values) -> Any:
        treedef = jtu.tree_structure(self.trees[where], is_leaf=is_owned)
        leaves = [values[where, k] for k in range(treedef.num_leaves)]
        return jtu.tree_unflatten(treedef, leaves)

    def axis_of_new(self, i: int, new: Visit) -> Any:
        """The axis of an array that `init` has made at this place in a root."""
        root = self.lifted.roots[i]
        by = self.entries.get(id(root.module), self.by_rules)
        return by.of_new(root, new)
