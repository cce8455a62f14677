"""What to write instead of a state that differs between the lanes of a transform."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import Literal


class Cause(NamedTuple):
    """Why the lanes wrote different values to a state, for the advice.

    - `name`, `value`: its name in the model, and a new value.
    - `is_read`: whether the new value depends on the old one.
    - `is_drawn`: whether it depends on a key of the lane, and on nothing else of it.
    """

    name: str
    value: Any
    is_read: bool
    is_drawn: bool

    def reduction(self, axes: str) -> str:
        """The code that reduces this state over the lanes. `axes`: their names."""
        field = self.name.rpartition(".")[2].partition("[")[0] or "mean"
        added = f"`self.{field} = self.{field} + jax.lax.psum(increment, {axes})`"
        if jnp.issubdtype(self.value.dtype, jnp.integer):
            return added
        if self.is_read:
            mean = f"0.9 * self.{field} + 0.1 * jax.lax.pmean(x, {axes})"
            # JAX has no derivative of `pmax`.
            largest = f"jax.lax.pmax(jax.lax.stop_gradient(x), {axes})"
            largest = f"`self.{field} = jnp.maximum(self.{field}, {largest})`"
            average = f"in a running average, `self.{field} = {mean}`"
            return f"{added}; {average}; in a running maximum, {largest}"
        return f"`self.{field} = jax.lax.pmean({field}, {axes})`, or `pmax`, `psum`"


def sources(f: Callable[..., Any], *args: Any) -> list[bool]:
    """For each array among the arguments of `f`, whether the output depends on it."""
    try:
        jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    except Exception:  # `f` may count its calls; this is only for the text of an error
        return [False for _ in jtu.tree_leaves(args)]
    needed = set(jaxpr.outvars)
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(x for x in equation.invars if not isinstance(x, Literal))
    return [x in needed for x in jaxpr.invars]
