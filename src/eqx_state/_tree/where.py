"""What `where=` selects: functions from a tree to its nodes, as in `eqx.tree_at`."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import jax.tree_util as jtu
import numpy as np

from .._errors import public_name
from .._kinds.kinds import is_kind
from .._typing import PyTree
from .base import is_eqx_module
from .filters import Combinator, filter_text
from .parts import paths_of
from .walk import Visit


Where: TypeAlias = Callable[[Any], Any]  # selects one node or several, as in `tree_at`


def marker(visit: Visit) -> Any:
    """A unique sentinel that replaces an array while a `where` selects nodes.

    A NumPy array of paths: that of the array, or in a stack one for each layer. It can
    be sliced, because `where` may select layers: `lambda m: m.blocks[0]`.
    """
    sizes = [n for _, n in visit.context.stacks]
    return np.fromiter(paths_of(visit), dtype=object).reshape(sizes)


def is_marker(x: Any) -> bool:
    """Whether `x` is a sentinel of `marker`."""
    return isinstance(x, np.ndarray) and x.dtype == object


def selected_nodes(where: Where, tree: PyTree) -> list[Any]:
    """The nodes that `where` selects: one, or several in tuples and lists."""
    # Reject a layer, which may be callable, but accept a module that wraps a function.
    is_layer = is_eqx_module(where) and not hasattr(where, "__wrapped__")
    given = type(where) if is_layer or not callable(where) else where
    if isinstance(where, type) and not is_kind(where):
        raise TypeError(_CLASS_AS_WHERE.format(public_name(where)))
    if given is not where or is_kind(where) or isinstance(where, Combinator):
        raise TypeError(_NOT_WHERE.format(filter_text(given)))
    try:
        selected = where(tree)
    except AttributeError as error:
        error.add_note(_IN_WHERE.format(type(tree).__name__))
        raise
    # A list may itself be a node of the tree. `is_leaf` is called with every node.
    in_tree: set[int] = set()
    jtu.tree_leaves(tree, is_leaf=lambda x: in_tree.add(id(x)))

    def is_node(x: Any) -> bool:
        return type(x) not in (tuple, list) or not x or id(x) in in_tree

    return jtu.tree_leaves(selected, is_leaf=is_node)


_NOT_WHERE: Final = """`where` must be a function from the tree to one of its nodes, \
or to a tuple of them, as in `eqx.tree_at`, but `{}` was given. Write `lambda model: \
model.layers[0]`. To exclude the selection of a filter from training, do so where you \
use the parameters: `wrt=es.all_of(es.trainable, es.not_(filter))`."""

_CLASS_AS_WHERE: Final = """`where` must be a function from the tree to its nodes, but \
the class `{0}` was given. The filter for all modules of a class is `es.inside({0})`. \
To freeze them: `model.freeze(lambda model: [x for _, x in es.modules(model) if \
isinstance(x, {0})])`."""

_IN_WHERE: Final = """The error is in `where`. It is called with the whole tree, here \
`{}`, and must return one of its nodes or a tuple of them."""
