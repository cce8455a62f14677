"""Finds the axis of each array under `es.vmap` and `es.shard_map`.

`axes` are rules for the arrays of the function itself and of the modules that it closes
over. `in_axes` has an entry for each argument; an entry may be rules, too. An axis is
an integer, or for `es.shard_map` a `PartitionSpec`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import equinox as eqx
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._kinds.kinds import Rng, State
from .._state.scope import is_owned, Ownership
from .._tree.base import ownership_of
from .._tree.context import Context
from .._tree.dtypes import is_traceable
from .._tree.keys import is_key, is_typed
from .._tree.rules import check_rules, is_rules, RuleMatcher
from .._tree.walk import leaves, Visit
from .._typing import KeyPath
from .lift import Lifted
from .reach import closed_over, is_model, WRAPPERS
from .transform import Transform


class _Split:
    def __repr__(self) -> str:
        return "es.SPLIT"

    def __reduce__(self) -> str:
        return "SPLIT"  # copies and unpickled objects are this same object


SPLIT: Final = _Split()
"""The axis of a PRNG key that is split, so that each lane gets its own key."""


class AbstractMap(Transform):
    """`es.vmap` or `es.shard_map` of a function.

    - `in_axes`, `out_axes`: the entries for the arguments and for the output; `axes`:
        the rules for the function and for the modules that it closes over.
    - `caller`, `entries`, `outputs`: the names of the transform and of its parameters
        `in_axes` and `out_axes`, for errors; `nothing`: the entry that shares an array.
    - `shared`: the value that marks an array as shared by all lanes, instead of an
        axis.
    """

    in_axes: Any = eqx.field(static=True)
    out_axes: Any = eqx.field(static=True)
    axes: tuple[tuple[Any, Any], ...] = eqx.field(static=True)
    caller: ClassVar[str]
    entries: ClassVar[str]
    outputs: ClassVar[str]
    nothing: ClassVar[str]
    shared: ClassVar[Any] = None

    def axis_by_entry(self, entry: Any, x: Any) -> Any:
        """The axis of an array, from an entry of `in_axes` that is not rules."""
        return entry

    def axis_by_rule(self, visit: Visit, rules: Mapping[Any, Any], key: Any) -> Any:
        """The axis of a leaf, given the key of the rule that applies to it, if any."""
        if not is_traceable(visit.node):
            return None
        if key is None:
            return self.axis_by_default(visit)
        return self.shared if rules[key] is None else rules[key]

    def axis_by_default(self, visit: Visit) -> Any:
        """The axis of an array that nothing is said about: all lanes share it.

        But each lane draws from its own key.
        """
        # Below a covering kind, too: the dropout of a teacher in an `es.Buffer` draws,
        # if the scope may write buffers.
        kind = visit.context.kind or visit.kind
        if kind is None or not issubclass(kind, State):
            return self.shared
        # The values of Equinox's own state are as if passed by hand.
        by_hand = visit.context.owner is eqx.nn.StateIndex
        is_split = is_typed(visit.node) and not by_hand
        is_split |= issubclass(kind, Rng) and is_key(visit.node)
        return SPLIT if is_split else self.shared

    def is_axis(self, axis: Any) -> bool:
        """Whether an array with this axis is stacked, one part for each lane."""
        return axis not in (None, SPLIT, PartitionSpec(), self.shared)


class ArgumentAxes:
    """The axes of the arguments of a call.

    - `axes`: one for each leaf of `(args, kwargs)`. Keyword arguments have axis 0.
    """

    def __init__(
        self, transform: AbstractMap, args: tuple[Any, ...], kwargs: dict[str, Any]
    ):
        self.transform = transform
        in_axes = transform.in_axes
        is_sequence = isinstance(in_axes, (tuple, list))
        entries = tuple(in_axes) if is_sequence else (in_axes,) * len(args)
        try:
            pairs = pairs_of(entries, args)
        except ValueError as error:
            names = transform.caller, transform.entries
            raise ValueError(_NOT_A_PREFIX.format(*names, error)) from None
        # One mapping may be the entry of several arguments.
        self.matchers: dict[int, RuleMatcher] = {}
        self.axes = [
            axis for pair in [*pairs, (0, kwargs)] for axis in self._axes_of(*pair)
        ]

    def _axes_of(self, entry: Any, argument: Any) -> list[Any]:
        """The axis of each leaf of an argument with this entry."""
        by_rule = is_rules(entry)
        key_of = self._matcher(entry).bind(argument) if by_rule else lambda _: None
        rules, shared = (entry if by_rule else {}), self.transform.shared
        axes = []
        for visit in leaves(argument, is_leaf=is_owned):
            for x in _seen_from(visit):
                axis = None
                if by_rule:
                    axis = self.transform.axis_by_rule(x, rules, key_of(x))
                elif is_traceable(x.node):
                    axis = self.transform.axis_by_entry(entry, x.node)
                    if axis is shared and is_in_model(x):
                        # As if a scope owned the module, and the function closed over
                        # it. A key outside of modules is shared, as in JAX.
                        axis = self.transform.axis_by_default(x)
                axes.append(axis)
        return axes

    def _matcher(self, rules: Any) -> RuleMatcher:
        argument = f"`{self.transform.caller}({self.transform.entries}=...)`"
        check_rules(rules, argument)
        return self.matchers.setdefault(id(rules), RuleMatcher(rules, argument))

    def check_matched(self) -> None:
        """Raise `ValueError` for a filter among the entries that matches nothing."""
        for matcher in self.matchers.values():
            matcher.check_matched()


def pairs_of(entries: Any, tree: Any) -> list[tuple[Any, Any]]:
    """Each entry of a prefix tree of axes, with the part of `tree` that it applies to.

    Raises `ValueError` if it is not a prefix.
    """
    pairs: list[tuple[Any, Any]] = []
    jtu.tree_map(
        lambda *pair: pairs.append(pair),
        entries,
        tree,
        # Unlike any other dict of axes, rules are one entry, and not a prefix.
        is_leaf=lambda x: x is None or is_rules(x),
    )
    return pairs


class FunctionAxes:
    """The axes of a function: of its own leaves, and of the owned modules in reach.

    - `axes`: one for each leaf of `f`; `None` for an owned module in it.
    - `by_slot`: the axes of the leaves of owned modules that are not copies.

    Names in rules begin at `f`, if it is a module, and at each module that it closes
    over.
    """

    def __init__(self, transform: AbstractMap, f: Any, lifted: Lifted):
        self.transform, self.lifted = transform, lifted
        self.rules = dict(transform.axes)
        self.matcher = RuleMatcher(self.rules, f"`{transform.caller}(axes=...)`")
        self.axes: list[Any] = []
        self.by_slot: dict[int, Any] = {}
        for visit in leaves(f, is_leaf=is_model):
            if is_model(visit.node):
                self.axes += self._axes_of(visit.node, visit.context)
            else:  # an array outside of modules
                is_shared = is_traceable(visit.node)
                self.axes.append(transform.shared if is_shared else None)
        for root in lifted.roots:
            if not root.is_copy and {*root.slots} - self.by_slot.keys():
                self._axes_of(root.module, root.ownership.context)
        if self.rules:
            self._check_constants(f)

    def _axes_of(self, model: Any, context: Context) -> list[Any]:
        """The axis of each leaf of a model; `None` for an owned module in it."""
        axes, key_of = [], self.matcher.bind(model)
        axis_by_rule = self.transform.axis_by_rule
        for visit in leaves(model, (), context, is_leaf=is_owned):
            axes.append(axis_by_rule(visit, self.rules, key_of(visit)))
            if is_owned(visit.node):
                ownership = ownership_of(visit.node)
                for slot in self.lifted.slots(visit.node):
                    if slot in self.by_slot:  # else a name would count without effect
                        continue
                    leaf = self.lifted.leaves[slot].visit
                    x = _seen_at(leaf, ownership, visit.path)
                    self.by_slot[slot] = axis_by_rule(x, self.rules, key_of(x))
        return axes

    def _check_constants(self, f: Any) -> None:
        """Raise `ValueError` if a rule would map an array that is a constant.

        Outside `es.mutable`, the `model` in `lambda x: model(x)` is one.
        """
        for model in closed_over(f):
            if is_owned(model):
                continue
            key_of = self.matcher.bind(model)
            for visit in leaves(model, is_leaf=is_owned):
                # An `eqx.nn.Sequential` in a scope contains owned modules.
                is_data = not is_owned(visit.node)
                axis = self.rules.get(key_of(visit)) if is_data else None
                if axis not in (None, PartitionSpec()):
                    caller, entries = self.transform.caller, self.transform.entries
                    names = caller, entries, type(model).__name__, visit.name
                    raise ValueError(_CONSTANT.format(*names))

    def check_matched(self) -> None:
        """Raise `ValueError` for a filter that matches nothing."""
        self.matcher.check_matched(_IN_REACH.format(self.transform.entries))


def is_in_model(visit: Visit) -> bool:
    """Whether a leaf is in a module, and not only in a wrapper of a function."""
    return not all(issubclass(cls, WRAPPERS) for cls in visit.context.owners)


def _seen_from(visit: Visit) -> list[Visit]:
    """A leaf; or the leaves of an owned module, with names that begin at this visit.

    The kinds come from the scope's whole model, because the scope writes by them.
    """
    if not is_owned(visit.node):
        return [visit]
    ownership = ownership_of(visit.node)
    below = leaves(visit.node, ownership.path, ownership.context)
    return [_seen_at(x, ownership, visit.path) for x in below]


def _seen_at(visit: Visit, ownership: Ownership, start: KeyPath) -> Visit:
    """A visit in an owned module, with a name as if the module were at `start`."""
    above = len(ownership.path)
    context = visit.context.seen_from(above, len(start))
    return visit._replace(path=(*start, *visit.path[above:]), context=context)


_NOT_A_PREFIX: Final = """`{0}`: `{1}` must be one entry for all positional arguments, \
or a tuple with one item for each: an entry, a tree of entries, or rules. {2}"""

_IN_REACH: Final = """ Names in `axes` begin at the function itself, if it is a \
module, and at each module that it closes over. Modules among the arguments are mapped \
by `{0}`, whose entries may be rules, too."""

_CONSTANT: Final = """`{0}`: `axes` would map `{3}` of the `{2}` that the function \
closes over. The module is not in an `es.mutable`, so it is a constant in a closure. \
Pass it as an argument: `{0}(lambda model, x: model(x), {1}=...)(model, xs)`."""
