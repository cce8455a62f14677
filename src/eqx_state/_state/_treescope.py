"""A module as an interactive tree in a notebook, every array marked with its kind.

[treescope](https://treescope.readthedocs.io) draws the tree. It is an optional
dependency, and is imported only when a module is drawn.
"""

import contextvars
import dataclasses
import functools as ft
import itertools
from typing import Any, Final

import jax.tree_util as jtu

from .._kinds._kinds import (
    BatchStat,
    Buffer,
    Kind,
    OptState,
    Parameter,
    Rng,
    State,
    TreePart,
)
from .._tree._base import BaseModule
from .._tree._walk import is_array, leaves


# The colors lie behind black text, on a white or on a black page.
_COLORS: Final[dict[type, str]] = {
    Parameter: "#8ab8ff",
    Buffer: "#b8bec8",
    BatchStat: "#7fd69b",
    Rng: "#ffbf69",
    OptState: "#f2a0a0",
    State: "#cba6f7",
    TreePart: "#8fd6d6",
}
_BAR: Final = "border-left: 0.6ch solid {}; padding-left: 0.4ch;"
_BADGE: Final = (
    "color: black; background-color: {}; border-radius: 0.6em; padding: 0 0.6ch;"
    " font-size: 0.85em;"
)

# The path of the outermost module, which marks all arrays below it, and their kinds by
# path.
_outermost: contextvars.ContextVar[tuple[str, dict[str, Kind]] | None] = (
    contextvars.ContextVar("_outermost", default=None)
)


def html(module: Any) -> str | None:
    """The HTML of a module for a notebook; `None` without treescope."""
    try:
        import treescope
    except ImportError:
        return None
    return treescope.render_to_html(module)


def render(module: BaseModule, path: str | None, subtree_renderer: Any) -> Any:
    """The rendering of a module that treescope asks for.

    `path` says where the module is, and may be `None`. `subtree_renderer` draws the
    value of a field.
    """
    import treescope

    if path is None or _outermost.get() is not None:
        return _constructor(module, path, subtree_renderer)
    kinds = {path + jtu.keystr(v.path): v.kind for v in leaves(module)}
    known = {where: kind for where, kind in kinds.items() if kind is not None}
    renderer = treescope.active_renderer.get().extended_with(
        wrapper_hooks=[ft.partial(_mark, known)]
    )
    token = _outermost.set((path, known))
    try:
        return renderer.to_foldable_representation(module, root_keypath=path)
    finally:
        _outermost.reset(token)


def _constructor(module: BaseModule, path: str | None, subtree_renderer: Any) -> Any:
    from treescope import rendering_parts

    fields = [f for f in dataclasses.fields(module) if f.repr]
    flags = {"training": not module.training, "frozen": module.frozen}
    return rendering_parts.build_foldable_tree_node_from_children(
        prefix=rendering_parts.render_dataclass_constructor(module),
        children=rendering_parts.build_field_children(
            module,
            path,
            subtree_renderer,
            [*fields, *(name for name, is_unusual in flags.items() if is_unusual)],
        ),
        suffix=")",
        path=path,
        first_line_annotation=_legend(path),
        child_type_single_and_plural=("field", "fields"),
    )


def _legend(path: str | None) -> Any:
    """The kinds that occur, for the first line of the outermost module."""
    from treescope import rendering_parts

    where, kinds = _outermost.get() or (None, {})
    if path != where or not kinds:
        return None
    names = [[_name(kind), " "] for kind in dict.fromkeys(kinds.values())]
    return rendering_parts.siblings(_hash(), *itertools.chain(*names))


def _name(kind: Kind) -> Any:
    from treescope import rendering_parts

    text = rendering_parts.text(kind.__name__)
    return rendering_parts.custom_style(text, _BADGE.format(_color(kind)))


def _color(kind: Kind) -> str:
    return next(_COLORS[base] for base in kind.__mro__ if base in _COLORS)


def _hash() -> Any:
    from treescope import rendering_parts

    return rendering_parts.comment_color(rendering_parts.text("  # "))


def _mark(kinds: dict[str, Kind], node: Any, path: str, node_renderer: Any) -> Any:
    """A treescope hook that marks an array with a bar and the name of its kind."""
    from treescope import rendering_parts

    if path not in kinds or not is_array(node):
        return NotImplemented
    drawn, kind = node_renderer(node, path=path), kinds[path]
    bar = _BAR.format(_color(kind))
    return rendering_parts.RenderableAndLineAnnotations(
        renderable=rendering_parts.custom_style(drawn.renderable, bar),
        annotations=rendering_parts.siblings(drawn.annotations, _hash(), _name(kind)),
    )
