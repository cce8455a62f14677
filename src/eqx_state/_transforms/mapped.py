"""A call under `es.vmap` or `es.shard_map`: its arrays, its lanes, what they return.

`Mapped` puts all arrays of a call into one pytree, with a `Row` for each array that the
lanes do not simply share. The rest of a transform does not need to know where an array
or its axis came from.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from .._state.init import created_error
from .._state.scope import is_owned
from .._tree.dtypes import is_traceable
from .._tree.keys import clone, is_key, next_keys, num_key_axes, split_key
from .._tree.walk import leaves, name_of
from .advice import Cause, sources
from .axes import (
    AbstractMap,
    ArgumentAxes,
    FunctionAxes,
    is_in_model,
    pairs_of,
    SPLIT,
)
from .creation import created_arrays
from .cut import cut, Rest
from .lift import Lifted, Ran
from .reach import check_given
from .roots import by_entry, Values
from .transform import is_bound_method, Transform


@dataclasses.dataclass(eq=False)
class Row:
    """An array that JAX's transform gets: its value, its axis, and its slot, if any.

    A leaf to JAX, so trees of rows are like those of the arrays.
    """

    value: Any
    axis: Any
    slot: int | None = None


class _Key(NamedTuple):
    """The dict key of a leaf of an owned module.

    JAX prints the `repr` of a dict key in its errors, and users know the `name` of a
    leaf. But the name cannot be the key: two models may have one name.
    """

    slot: int
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


class Mapped:
    """The `Inputs` of a call, split into mapped and shared leaves.

    - `rows`: one for each leaf that JAX's transform gets; in `es.shard_map` also the
        shared arrays. `tree` unflattens a list with an item for each row.
    - `rest`: all other leaves, and the owned modules. The lanes close over them.
    - `lifted`: the modules that a scope owns; `axes`: the axes of their leaves.
    - `groups`: the axes of state, each once. A lane returns new state in these groups.
    """

    def __init__(
        self, transform: AbstractMap, args: tuple[Any, ...], kwargs: dict[str, Any]
    ):
        self.transform, self.given = transform, (args, kwargs)
        f, arguments = _opened(transform.f), ArgumentAxes(transform, args, kwargs)
        self.lifted = lifted = Lifted(f, (args, kwargs), arguments.axes)
        function = FunctionAxes(transform, f, lifted)
        if not lifted.is_initializing:  # else `init` may still create arrays
            check_given(transform.f, *args, *kwargs.values())
            function.check_matched()
            arguments.check_matched()
        axes = arguments.axes
        self.axes = {**function.by_slot, **lifted.by_slot(lifted.arguments, axes)}
        given = [
            Row(x, None if is_owned(x) else own[0])
            for x, own in by_entry(lifted.arguments, axes)
        ]
        own = map(Row, jtu.tree_leaves(f, is_leaf=is_owned), function.axes)
        rows = Inputs(
            *_tree_of(given, lifted.arguments),
            _tree_of(own, f),
            {
                _Key(slot, lifted.name(slot)): Row(lifted.values[slot], axis, slot)
                for slot, axis in self.axes.items()
                if axis is not None
            },
        )
        mapped, others = eqx.partition(rows, lambda row: row.axis is not None)
        self.rows, treedef = jtu.tree_flatten(mapped)
        self.tree: Callable[[Iterable[Any]], Inputs] = treedef.unflatten
        self.rest = Rest(jtu.tree_map(lambda row: row.value, others))
        # For each split key, the key that its module stores if a lane used it.
        self.advanced: Values = {}
        self.is_split = [row.axis is SPLIT for row in self.rows]
        # Not only of `lifted.writable`: in `init` a NumPy array may be replaced.
        arrays = (slot for slot, x in lifted.values.items() if is_traceable(x))
        self.groups = [*dict.fromkeys(map(self.group_of, arrays))]

    def group_of(self, slot: int) -> Any:
        """The axis along which new state is stacked.

        A new key that is equal in all lanes is shared, even if the old key was split.
        """
        axis = self.axes[slot]
        return self.transform.shared if axis is SPLIT else axis

    def name(self, row: Row) -> str:
        """The name of an array, for errors."""
        if row.slot is not None:
            return self.lifted.name(row.slot)
        paths, _ = jtu.tree_flatten_with_path(self.tree(self.rows))
        return next(name_of(path) for path, x in paths if x is row)

    def split_keys(
        self, num: int, place: Callable[[Any, int], tuple[Any, Any]]
    ) -> None:
        """Where the axis is `SPLIT`, give each of `num` lanes its own key.

        `place` takes the keys and their axis, and returns the keys and axis to map.
        """
        self.rows = [
            self._split(row, num, place) if row.axis is SPLIT else row
            for row in self.rows
        ]

    def _split(self, row: Row, num: int, place: Callable[..., Any]) -> Row:
        if not is_key(row.value):
            name = self.name(row)
            raise ValueError(_NOT_A_KEY.format(self.transform.caller, name))
        # Splitting consumes a key. If no lane draws, the model keeps this key and may
        # draw from it later. Without the clone, `jax_debug_key_reuse` would call that
        # reuse.
        advanced, key = next_keys(clone(row.value))
        if row.slot is not None:  # `None`: a key among the arguments
            self.advanced[row.slot] = advanced
        return Row(*place(split_key(key, num), num_key_axes(key)), row.slot)

    def run(
        self,
        inputs: Inputs,
        differs: Callable[[Any, Any], bool],
        not_reduced: Callable[[Values, Cause], str],
    ) -> tuple[Ran, Rest]:
        """Call the function in a lane, with the values of this lane.

        Returns the arrays of its output, with the written state in `groups`; and what
        is static: the rest of the output, and the keys that the lane used.

        `differs(x, axis)` says whether the lanes may have different values although
        `axis` allows only one. For a split key this means that the lanes drew from it.
        For any other state it is an error, with the text `not_reduced(states, cause)`.
        """
        ran = self._called(inputs)
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
            raise ValueError(not_reduced(unreduced, self._cause(inputs, unreduced)))
        self._check_returned(ran.out, differs)
        out, rest = cut(ran.out)
        return ran._replace(out=out, written=groups), Rest((rest, frozenset(used)))

    def _called(self, arrays: Inputs, state: Mapping[int, Any] = {}) -> Ran:
        """The result of a lane, with other values of the shared state if given."""
        inputs = self.rest.join(arrays)
        own = {key.slot: x for key, x in inputs.modules.items()}
        values = {**self.lifted.values, **own, **state}
        return self.lifted.run(values, inputs.f, inputs.args, inputs.kwargs)

    def _cause(self, inputs: Inputs, unreduced: Values) -> Cause:
        """Why the lanes wrote different values to the first of these states."""
        slot, x = next(iter(unreduced.items()))
        now = {key.slot: x for key, x in inputs.modules.items()}
        old = {slot: now.get(slot, self.lifted.values[slot])}
        again = lambda *args: self._called(*args).written[slot]  # noqa: E731
        *used, is_read = sources(again, inputs, old)
        is_key_of_lane = [
            is_split
            for row, is_split, is_used in zip(
                self.rows, self.is_split, used, strict=True
            )
            if is_used and self.transform.is_axis(row.axis)
        ]
        is_drawn = bool(is_key_of_lane) and all(is_key_of_lane)
        return Cause(self.lifted.name(slot), x, is_read, is_drawn)

    def _check_returned(self, out: Any, differs: Callable[[Any, Any], bool]) -> None:
        """Raise `ValueError` for a module that is one output, but has several keys."""
        transform = self.transform
        try:
            pairs = pairs_of(transform.out_axes, out) if any(self.is_split) else []
        except ValueError:
            return  # JAX raises the error
        for entry, part in pairs:
            for x in filter(is_in_model, leaves(part)):
                is_split = transform.axis_by_default(x) is SPLIT
                if is_split and differs(x.node, transform.axis_by_entry(entry, x.node)):
                    caller, nothing = transform.caller, transform.nothing
                    names = transform.outputs, transform.entries
                    raise ValueError(_OWN_KEYS.format(caller, x.name, nothing, *names))

    def finish(self, ran: Ran, rest: Rest) -> Any:
        """Write to the modules outside, and return the whole output."""
        rest_of_out, used = rest.tree
        written = {slot: x for group in ran.written for slot, x in group.items()}
        written |= {slot: self.advanced[slot] for slot in used}
        self.lifted.commit(ran._replace(written=written))
        self._check_not_created()
        return rest_of_out.join(ran.out)

    def advice(self, slots: Iterable[int], axis_name: Any) -> str:
        """The advice of the layer of the library that contains one of these states."""
        for slot in slots:
            module = self.lifted.leaves[slot].field.module
            if said := module._eqx_state_not_reduced(axis_name):
                return said
        return ""

    def _check_not_created(self) -> None:
        """Raise `ValueError` if each lane has its own value of an array that `init` has
        created."""
        if not (created := [*created_arrays(self.lifted)]):
            return
        is_axis = self.transform.is_axis
        # The modules contain the new arrays now, so this finds their axes.
        after = Mapped(self.transform, *self.given)
        stacked = {
            id(after.lifted.values[k]) for k, x in after.axes.items() if is_axis(x)
        }
        for module, name, arrays in created:
            # In a tree of axes there is none for a new array, only for the others.
            others = self.lifted.slots(module) if self.lifted.has(module) else ()
            is_in_stack = any(is_axis(self.axes[slot]) for slot in others)
            if any(is_in_stack or id(x) in stacked for x in arrays):
                lane = f"in one lane of `{self.transform.caller}`"
                raise created_error(module, name, lane)


def _tree_of(rows: Iterable[Row], like: Any) -> Any:
    """The rows as a tree like this one, in which owned modules count as leaves."""
    return jtu.tree_structure(like, is_leaf=is_owned).unflatten(rows)


def _opened(f: Any) -> Any:
    """`f`, as a pytree in which a bound object is an argument."""
    # JAX treats `model.__call__` as a leaf. Other bound methods of Equinox's modules
    # are modules themselves, but in rules and errors, names should begin at `model`.
    if isinstance(f, Transform):
        return f.of(_opened(f.f))
    is_method = is_bound_method(f) and isinstance(f.__self__, eqx.Module)
    return eqx.Partial(f.__func__, f.__self__) if is_method else f


_OWN_KEYS: Final = """`{0}`: the function returns a module as one value, `{3}={2}`, \
but its key `{1}` differs: the call has split it, so that all draw different numbers. \
Return no module: call the whole in `es.mutable`, which returns the new model with its \
keys. Or let all draw the same numbers, by rules as the entry of the module: \
`{4}=({{es.Rng: {2}}}, ...)`."""

_NOT_A_KEY: Final = """`{0}`: `es.SPLIT` is the axis of `{1}`, which is not a PRNG \
key. Only keys can be split: map an array over an axis, or share it with `None`."""
