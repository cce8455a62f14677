"""One held step: the body of a loop that returns after each step.

Modules in the carry are threaded as in `es.scan`: the body may write their state, and
the new ones come back in the carry.
"""

from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._kinds._kinds import State
from .._state._fit import same_type
from .._state._nn_shared import closed_copy
from .._state._scope import Scope
from .._transforms._arguments import is_mappable
from .._transforms._carry import Loop
from .._transforms._lift import Ran
from .._transforms._loops import pair_of
from .._transforms._mutable import thread
from .._tree._compare import difference, same
from .._tree._show import show
from .._tree._walk import is_array, leaves


def held_step(f: Callable[..., Any], carry: Any, args: Any, kwargs: Any) -> Any:
    """The new carry and the output of `f(carry, *args, **kwargs)`, in a trace."""

    def run(carry: Any) -> Any:
        loop = Loop(f, carry)
        before = eqx.combine(loop.arrays, loop.static)

        def unpack(out: Any) -> Any:
            new, (_, rest) = pair_of(out, "es.hold")
            new = closed_copy(new)
            _check_alike(before, new)
            return new, rest

        first = loop.arrays, loop.state
        step = loop.step(first, lambda x: f(x, *args, **kwargs), unpack=unpack)
        new = loop.finish(step.carry, [step.note], Ran(None, {}, step.sown))
        return new, step.rest

    out, _ = thread(carry, Scope((State,)), run)
    return out


def _check_alike(before: Any, after: Any) -> None:
    """Raise `ValueError` unless a carry comes back as it was, but for its values."""
    if jtu.tree_structure(before) != jtu.tree_structure(after):
        raise ValueError(_STRUCTURE.format(difference(before, after)))
    for old, new in zip(leaves(before), leaves(after), strict=True):
        # As in a loop, a number is an array, but not in a field of a module.
        x = jnp.asarray(new.node) if is_mappable(new) else new.node
        is_like = same_type(old.node, x) if is_array(old.node) else same(old.node, x)
        if not is_like:
            name = old.name or "the carry"
            raise ValueError(_LEAF.format(name, show(old.node), show(new.node)))


_STRUCTURE: Final = """The function of `es.hold` returned a carry of another \
structure or in another mode, {}. The next step starts with what this one returns, so \
only the values of arrays may change. What is to change between two steps is assigned:

    model, optimizer = run.carry
    run.carry = model.eval(), optimizer"""

_LEAF: Final = """The function of `es.hold` returned another carry than it was given: \
`{0}` was `{1}`, and is now `{2}`. The next step starts with what this one returns, so \
only the values of arrays may change, and neither shapes nor dtypes. Convert it in the \
function, `x.astype(old.dtype)`, or start with what it returns."""
