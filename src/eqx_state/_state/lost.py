"""`es.LostStateWarning`: gradients that are applied to the model from before the call.

`loss, grads = es.value_and_grad(loss_fn)(model, x)` assigns the pair of loss and new
model to `loss`. The old model then trains, but its statistics never change. A call that
wrote state leaves a note about it in the gradients, beside their fields, so outside of
the pytree: copies, pickles and transformed gradients do not have it.
"""

import contextlib
import warnings
import weakref
from typing import Any, Final, NamedTuple

import jax.tree_util as jtu

from .._errors import LostStateWarning
from .._tree.base import is_eqx_module, note_of, set_note
from .._tree.compare import is_hole
from .._tree.walk import leaves
from .._typing import KeyPath, PyTree
from .marks import MARKS


class Note(NamedTuple):
    """What a call has written in one module of its model.

    - `before`: for each written leaf, its position, and a weak reference to its array
        from before the call.
    - `line`: the assignment that keeps what was written.
    """

    before: list[tuple[int, Any]]
    line: str


def note_written(grads: PyTree, old: PyTree, new: PyTree, line: str) -> None:
    """Note in the gradients what the call that has computed them wrote in its model."""
    trees = zip(*map(_outermost, (grads, old, new)), strict=True)
    for (_, module), (_, old_module), (_, new_module) in trees:
        before = []
        pairs = zip(_leaves(old_module), _leaves(new_module), strict=True)
        for i, (x, y) in enumerate(pairs):
            with contextlib.suppress(TypeError):  # a scalar of NumPy
                before += [] if x is y else [(i, weakref.ref(x))]
        if before:
            set_note(module, Note(before, line))


def warn_if_lost(grads: PyTree, model: PyTree, stacklevel: int) -> None:
    """Warn if the call that has computed `grads` wrote state that `model` lacks."""
    if MARKS.get() is not None:  # the audit names it
        return
    given = dict(_outermost(model))
    for path, module in _outermost(grads):
        old = given.get(path)
        if old is not None and (note := note_of(module)) is not None:
            now = dict(enumerate(_leaves(old)))
            if all(x() is not None and x() is now.get(i) for i, x in note.before):
                visits = leaves(old, path, is_leaf=is_hole)
                name = visits[note.before[0][0]].name
                said = _LOST.format(name, note.line)
                warnings.warn(said, LostStateWarning, stacklevel + 1)
                return


def _outermost(tree: PyTree) -> list[tuple[KeyPath, Any]]:
    """The modules that are in no other module, with their paths."""
    nodes = jtu.tree_leaves_with_path(tree, is_leaf=is_eqx_module)
    return [(path, x) for path, x in nodes if is_eqx_module(x)]


def _leaves(module: Any) -> list[Any]:
    return jtu.tree_leaves(module, is_leaf=is_hole)


_LOST: Final = """`es.Optimizer.update`: the call that computed these gradients wrote \
`{}`, and the model that you passed still has the array from before, so what was \
written is lost. Unpack the new model, and pass it:

    {}
    model, optimizer = optimizer.update(grads, model)

To drop it on purpose, pass only the parameters: `model.filter(es.Parameter)`."""
