"""Finds the axis of each array under `es.vmap` and `es.shard_map`.

`axes` are rules for the arrays of the function itself and of the modules that it closes
over. `in_axes` has an entry for each argument; an entry may be rules, too. `Reached`
puts all arrays into one pytree with an axis for each leaf, so the rest of a transform
does not need to know where an axis came from. An axis is an integer, or for
`es.shard_map` a `PartitionSpec`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._kinds.kinds import Rng
from .._state.scope import is_owned, Ownership, Sown
from .._tree.base import ownership_of
from .._tree.keys import clone, is_key, next_keys, num_key_axes, split_key
from .._tree.rules import check_rules, is_rules, RuleMatcher
from .._tree.walk import is_array, leaves, name_of, Visit
from .._typing import KeyPath
from .lift import LeafIndex, Lifted, Ran, StaticOutput, Values
from .reach import by_entry, check_given, closed_over, is_model, is_traced
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

    - `in_axes`: the entries for the arguments; `axes`: the rules for the function and
        for the modules that it closes over.
    - `what`, `entries`: the names of the transform and of its parameter `in_axes`, for
        errors.
    - `shared`: the value that marks an array as shared by all lanes, instead of an
        axis.
    """

    in_axes: Any = eqx.field(static=True)
    axes: tuple[tuple[Any, Any], ...] = eqx.field(static=True)
    what: ClassVar[str]
    entries: ClassVar[str]
    shared: ClassVar[Any] = None

    def axis_by_entry(self, entry: Any, x: Any) -> Any:
        """The axis of an array, from an entry of `in_axes` that is not rules."""
        return entry

    def axis_by_rule(self, visit: Visit, rules: Mapping[Any, Any], key: Any) -> Any:
        """The axis of a leaf, given the key of the rule that applies to it, if any."""
        if not is_array(visit.node):
            return None
        if key is None:
            is_split = visit.is_a(Rng) and is_key(visit.node)
            return SPLIT if is_split else self.shared
        return self.shared if rules[key] is None else rules[key]


class _Key(NamedTuple):
    """The dict key of a leaf of an owned module. JAX prints its `name` in errors."""

    slot: LeafIndex
    name: str

    def __repr__(self) -> str:
        return self.name


class Inputs(NamedTuple):
    """Everything that a call uses. JAX gets a copy with `None` for unmapped leaves.

    JAX's errors use these names: "axis 0 of argument args[0]['x']", "axis 0 of argument
    modules[layers[0].mean]".
    """

    args: Any
    kwargs: Any
    f: Any
    modules: Any


class Reached:
    """The `Inputs` of a call, split into mapped and shared leaves.

    - `values`, `axes`: one for each leaf that JAX's transform gets; in `es.shard_map`
        also the shared arrays. `tree` unflattens such a list.
    - `rest`: all other leaves, and the owned modules. The lanes close over them.
    - `entries`: the entries of `in_axes`, each with the part of the arguments that it
        applies to.
    - `lifted`: the modules that a scope owns; `of_owned` maps their leaves to axes.
    - `groups`: the axes of state, each once. A lane returns new state in these groups.
    """

    def __init__(
        self, transform: AbstractMap, args: tuple[Any, ...], kwargs: dict[str, Any]
    ):
        f = _opened(transform.f)
        of_arguments, asked, self.entries = _axes_of_arguments(transform, args, kwargs)
        self.lifted = lifted = Lifted(f, (args, kwargs), of_arguments)
        of_f, self.of_owned, asked_of_f = _axes_of_function(transform, f, lifted)
        if not lifted.is_initializing:  # else `init` may still create arrays
            check_given(transform.f, *args, *kwargs.values())
            asked_of_f.check_matched(_IN_REACH.format(transform.entries))
            for each in asked:
                each.check_matched()
        axes = []
        for x, own in by_entry(lifted.arguments, of_arguments):
            if is_owned(x):
                self.of_owned.update(zip(lifted.slots(x), own, strict=True))
            axes.append(None if is_owned(x) else own[0])
        self.slots = sorted(k for k, axis in self.of_owned.items() if axis is not None)
        modules = {_Key(k, lifted.name(k)): lifted.values[k] for k in self.slots}
        axes += [*of_f, *(self.of_owned[slot] for slot in self.slots)]
        everything = Inputs(*lifted.arguments, f, modules)
        treedef = jtu.tree_structure(everything, is_leaf=is_owned)
        is_mapped = treedef.unflatten(axis is not None for axis in axes)
        mapped, self.rest = eqx.partition(everything, is_mapped, is_leaf=is_owned)
        self.values, treedef = jtu.tree_flatten(mapped)
        self.tree: Callable[[Any], Inputs] = treedef.unflatten
        self.axes = [axis for axis in axes if axis is not None]
        # For each split key, the key that its module stores if a lane used it.
        self.advanced: dict[LeafIndex, Any] = {}
        self.transform, self.shared = transform, transform.shared
        # Not only of `lifted.writable`: in `init` a NumPy array may be replaced.
        arrays = (slot for slot, x in lifted.values.items() if is_array(x))
        self.groups = [*dict.fromkeys(map(self.group_of, arrays))]

    def group_of(self, slot: LeafIndex) -> Any:
        """The axis along which new state is stacked.

        A new key that is equal in all lanes is shared, even if the old key was split.
        """
        axis = self.of_owned[slot]
        return self.shared if axis is SPLIT else axis

    def names(self) -> list[str]:
        """The names of the leaves that are mapped."""
        found = jtu.tree_leaves_with_path(self.tree(self.values))
        num = len(found) - len(self.slots)
        names = [name_of(path) for path, _ in found[:num]]
        return names + [self.lifted.name(slot) for slot in self.slots]

    def split_keys(
        self, num: int, place: Callable[[Any, int], tuple[Any, Any]]
    ) -> None:
        """Where the axis is `SPLIT`, give each of `num` lanes its own key.

        `place` takes the keys and their axis, and returns the keys and axis to map.
        """
        slots = [*[None] * (len(self.axes) - len(self.slots)), *self.slots]
        for k, slot in enumerate(slots):
            if self.axes[k] is SPLIT:
                if not is_key(self.values[k]):
                    what = self.transform.what, self.names()[k]
                    raise ValueError(_NOT_A_KEY.format(*what))
                # Splitting consumes a key. If no lane draws, the model keeps this key
                # and may draw from it later. Without the clone, `jax_debug_key_reuse`
                # would call that reuse.
                advanced, key = next_keys(clone(self.values[k]))
                if slot is not None:  # `None`: a key among the arguments
                    self.advanced[slot] = advanced
                keys = split_key(key, num)
                self.values[k], self.axes[k] = place(keys, num_key_axes(key))

    def run(
        self,
        inputs: Inputs,
        differs: Callable[[Any, Any], bool],
        not_reduced: Callable[[str, Values], str],
    ) -> tuple[Any, list[Values], list[Sown], StaticOutput]:
        """Call the function in a lane, with the values of this lane.

        Returns the arrays of its output, the written state in `groups`, the sown
        values, and the rest: the static part of the output, and the keys that the lane
        used.

        `differs(x, axis)` says whether the lanes may have different values although
        `axis` allows only one. For a split key this means that the lanes drew from it.
        For any other state it is an error, with the text `not_reduced(names, states)`.
        """
        inputs = eqx.combine(inputs, self.rest, is_leaf=is_owned)
        values = self.lifted.values | {k.slot: x for k, x in inputs.modules.items()}
        ran = self.lifted.run(values, lambda: inputs.f(*inputs.args, **inputs.kwargs))
        groups: list[Values] = [{} for _ in self.groups]
        used, unreduced = [], {}
        for slot, x in ran.written.items():
            axis = self.group_of(slot)
            if not differs(x, axis):
                groups[self.groups.index(axis)][slot] = x
            elif slot in self.advanced:
                used.append(slot)
            else:
                unreduced[slot] = x
        if unreduced:
            names = ", ".join(f"`{self.lifted.name(slot)}`" for slot in unreduced)
            raise ValueError(not_reduced(names, unreduced))
        out, static = eqx.partition(ran.out, is_traced(ran.out))
        return out, groups, ran.sown, StaticOutput((static, used))

    def advice(self, states: Iterable[LeafIndex], axis_name: Any) -> str:
        """The advice of the layer of the library that contains one of these states."""
        for i, k in states:
            root = self.lifted.roots[i]
            for visit in reversed(root.modules):  # the innermost first
                is_inside = root.leaves[k].path[: len(visit.path)] == visit.path
                if is_inside and (said := visit.node._eqx_state_not_reduced(axis_name)):
                    return said
        return ""

    def _is_per_lane(self, i: int, visit: Visit) -> bool:
        """Whether each lane has its own value of an array that `init` created here."""
        root, axis_of = self.lifted.roots[i], self.transform.axis_by_rule
        entry, tree, start = dict(self.transform.axes), root.module, ()
        if root.is_copy:
            found = (
                (*pair, visit.path)
                for pair in self.entries
                for visit in leaves(pair[1], is_leaf=is_owned)
                if visit.node is root.original
            )
            entry, tree, start = next(found, (None, None, ()))
        if is_rules(entry) or not root.is_copy:
            x = _seen_at(visit, root.ownership, start)
            axes = [axis_of(x, entry, RuleMatcher(entry, "").bind(tree)(x))]
        else:  # a tree of axes has no entry for a new array, only for the others
            axes = [self.of_owned[i, k] for k in range(len(root.leaves))]
            axes.append(self.transform.axis_by_entry(entry, visit.node))
        return not {*axes} <= {None, SPLIT, PartitionSpec(), self.shared}

    def finish(
        self, out: Any, groups: list[Values], sown: list[Sown], rest: StaticOutput
    ) -> Any:
        """Write to the modules outside, and return the whole output."""
        static, used = rest.value
        lane = f"lane of `{self.transform.what}`"
        written = {slot: x for group in groups for slot, x in group.items()}
        written |= {slot: self.advanced[slot] for slot in used}
        self.lifted.commit(Ran(None, written, sown))
        # After the commit, because a filter may only match what is in the model.
        self.lifted.check_not_created(self._is_per_lane, lane)
        return eqx.combine(out, static)


def _opened(f: Any) -> Any:
    """`f`, as a pytree in which a bound object is an argument."""
    # JAX treats `model.__call__` as a leaf. Other bound methods of Equinox's modules
    # are modules themselves, but in rules and errors, names should begin at `model`.
    if isinstance(f, Transform):
        return f.of(_opened(f.f))
    is_method = isinstance(getattr(f, "__self__", None), eqx.Module)
    return eqx.Partial(f.__func__, f.__self__) if is_method else f


def _axes_of_arguments(
    transform: AbstractMap, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], list[RuleMatcher], list[tuple[Any, Any]]]:
    """The axis of each leaf of `(args, kwargs)`, and the rules among the entries.

    Also returns the entries, each with the part of the arguments that it applies to.
    Keyword arguments have axis 0.
    """
    in_axes = transform.in_axes
    is_sequence = isinstance(in_axes, (tuple, list))
    entries = tuple(in_axes) if is_sequence else (in_axes,) * len(args)
    pairs: list[tuple[Any, Any]] = []
    try:
        jtu.tree_map(
            lambda *pair: pairs.append(pair),
            entries,
            args,
            # Unlike any other dict of axes, rules are one entry, and not a prefix.
            is_leaf=lambda x: x is None or is_rules(x),
        )
    except ValueError as error:
        what = transform.what, transform.entries
        raise ValueError(_NOT_A_PREFIX.format(*what, error)) from None
    axes: list[Any] = []
    asked: dict[int, RuleMatcher] = {}  # one mapping may be the entry of all arguments
    pairs.append((0, kwargs))
    for entry, argument in pairs:
        if is_rules(entry):
            what = f"`{transform.what}({transform.entries}=...)`"
            check_rules(entry, what)
            matcher = asked.setdefault(id(entry), RuleMatcher(entry, what))
            key_of, axis_of = matcher.bind(argument), transform.axis_by_rule
            for visit in leaves(argument, is_leaf=is_owned):
                axes += [axis_of(x, entry, key_of(x)) for x in _seen_from(visit)]
        else:
            xs, axis_of = jtu.tree_leaves(argument), transform.axis_by_entry
            axes += [axis_of(entry, x) if is_array(x) else None for x in xs]
    return axes, [*asked.values()], pairs


def _seen_from(visit: Visit) -> list[Visit]:
    """A leaf; or the leaves of an owned module, with names that begin at this visit.

    The kinds come from the scope's whole model, because the scope writes by them.
    """
    if not is_owned(visit.node):
        return [visit]
    at = ownership_of(visit.node)
    found = leaves(visit.node, at.path, at.context)
    return [_seen_at(x, at, visit.path) for x in found]


def _seen_at(visit: Visit, at: Ownership, start: KeyPath) -> Visit:
    """A visit in an owned module, with a name as if the module were at `start`."""
    context = visit.context.seen_from(len(at.path), len(start))
    return visit._replace(path=(*start, *visit.path[len(at.path) :]), context=context)


def _axes_of_function(
    transform: AbstractMap, f: Any, lifted: Lifted
) -> tuple[list[Any], dict[LeafIndex, Any], RuleMatcher]:
    """The axis of each leaf of `f`, and of each owned module that is reachable from it.

    Names in rules begin at `f`, if it is a module, and at each module that it closes
    over.
    """
    rules, axis_of = dict(transform.axes), transform.axis_by_rule
    asked = RuleMatcher(rules, f"`{transform.what}(axes=...)`")
    of_f: list[Any] = []
    of_owned: dict[LeafIndex, Any] = {}

    def ask(model: Visit) -> list[Any]:
        """The axis of each leaf of a model; `None` for an owned module in it."""
        axes, key_of = [], asked.bind(model.node)
        for visit in leaves(model.node, (), model.context, is_leaf=is_owned):
            axes.append(axis_of(visit, rules, key_of(visit)))
            own = lifted.slots(visit.node) if is_owned(visit.node) else []
            for slot, x in zip(own, _seen_from(visit), strict=False):
                if slot not in of_owned:  # else a name would count without effect
                    of_owned[slot] = axis_of(x, rules, key_of(x))
        return axes

    for visit in leaves(f, is_leaf=is_model):
        if is_model(visit.node):
            of_f += ask(visit)
        else:  # an array outside of modules
            of_f.append(transform.shared if is_array(visit.node) else None)
    for i, root in enumerate(lifted.roots):
        slots = {(i, k) for k in range(len(root.leaves))}
        if not root.is_copy and slots - of_owned.keys():
            ask(Visit((), root.module, root.ownership.context, True))
    # Outside `es.mutable`, the `model` in `lambda x: model(x)` is a constant, so
    # `axes={...: 0}` could not map it.
    for model in closed_over(f) if rules else ():
        if not is_owned(model):
            key_of = asked.bind(model)
            for visit in leaves(model, is_leaf=is_owned):
                # An `eqx.nn.Sequential` in a scope contains owned modules.
                axis = None if is_owned(visit.node) else rules.get(key_of(visit))
                if axis not in (None, PartitionSpec()):
                    at = transform.what, transform.entries
                    name = type(model).__name__, visit.name
                    raise ValueError(_CONSTANT.format(*at, *name))
    return of_f, of_owned, asked


_NOT_A_KEY: Final = """`{0}`: `es.SPLIT` is the axis of `{1}`, which is not a PRNG \
key. Only keys can be split: map an array over an axis, or share it with `None`."""

_NOT_A_PREFIX: Final = """`{0}`: `{1}` must be one entry for all positional arguments, \
or a tuple with one item for each: an entry, a tree of entries, or rules. {2}"""

_IN_REACH: Final = """ Names in `axes` begin at the function itself, if it is a \
module, and at each module that it closes over. Modules among the arguments are mapped \
by `{0}`, whose entries may be rules, too."""

_CONSTANT: Final = """`{0}`: `axes` would map `{3}` of the `{2}` that the function \
closes over. The module is not in an `es.mutable`, so it is a constant in a closure. \
Pass it as an argument: `{0}(lambda model, x: model(x), {1}=...)(model, xs)`."""
