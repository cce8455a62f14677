"""The arrays of a tree as `es.Part`s: path, name, kind."""

from typing import Any, Final, TYPE_CHECKING

from .._kinds._kinds import Kind
from .._typing import KeyPath, PyTree
from ._show import show
from ._walk import is_array, leaves, Visit


class Part:
    """One array of a tree: where it is, what it is."""

    __slots__ = ("_kind", "_visit")

    def __init__(self, visit: Visit):
        self._visit = visit
        self._kind = visit.context.kind_of(visit.node)

    @property
    def path(self) -> KeyPath:
        """The key path, a tuple of JAX's keys.

        No two arrays of a tree have the same path: a key that equals an earlier one, or
        prints alike, gets a number. A dataclass that is registered without key paths
        has keys with the names of its fields.
        """
        return self._visit.path

    @property
    def name(self) -> str:
        """The path as it is written in Python, `layers[0].norm.mean`."""
        return self._visit.name

    @property
    def kind(self) -> Kind | None:
        """The kind, or `None`."""
        return self._kind

    @property
    def value(self) -> Any:
        """The array, or its `jax.ShapeDtypeStruct`."""
        return self._visit.node

    @property
    def frozen(self) -> bool:
        """Whether it is frozen: its module, one around that, or the array itself.

        `ValueError` if a path that `es.freeze` was given does not fit the tree any
        more, and led to somewhere here.
        """
        context = self._visit.context
        if context.lost is not None:
            around, lost = context.lost
            raise ValueError(_LOST.format(lost.removeprefix("."), around, lost))
        return context.frozen

    if not TYPE_CHECKING:  # a type checker would take any attribute

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise AttributeError(_NOT_OF_A_PART.format(name))

    def __repr__(self) -> str:
        kind = None if self.kind is None else self.kind.__name__
        return f"Part(name={self.name!r}, kind={kind}, value={show(self.value)})"


def owners_of(part: Part) -> tuple[type, ...]:
    """The classes of the modules around an array, the outermost first."""
    return part._visit.context.owners


def dtype_of(part: Part) -> Any:
    """The dtype of an array, which is that of each of its slices."""
    return part._visit.node.dtype


def part_of(visit: Visit) -> Part | None:
    """The `Part` at a leaf of the walk; `None` where there is no array."""
    return Part(visit) if is_array(visit.node) else None


def parts(tree: PyTree) -> list[Part]:
    """Every array in `tree`, with its path, name and kind, in the order of flattening.

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    A list of `es.Part`. Functions, strings and Python numbers are not in it.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        parts = es.parts([eqx.nn.Linear(2, 3, key=jr.key(0)), {"count": 0}])
        assert [(p.name, p.kind) for p in parts] == [
            ("[0].weight", es.Parameter),
            ("[0].bias", es.Parameter),
        ]
        ```
    """
    return [p for p in map(part_of, leaves(tree)) if p is not None]


_NOT_OF_A_PART: Final = """An `es.Part` has no attribute `{0}`. A function that is a \
filter is asked of each array, and is given an `es.Part`, which has `name`, `path`, \
`kind`, `value` and `frozen`. It is not given the model, nor the array itself:

    lambda m: m.{0}               # wrong
    es.under(lambda m: m.{0})     # right, if the model has a part `{0}`
    lambda part: part.value.{0}   # right, if an array has `{0}`"""

_LOST: Final = """`{0}` was frozen, or unfrozen, by its path, and the structure there \
has changed since: the path may lead to another thing now, and what was frozen would \
train. Forget what was said of the part that has changed, and say it of the new one:

    model = es.unfreeze(model, lambda m: m{1})
    model = es.freeze(model, lambda m: m{2})     # or what is to be frozen now"""
