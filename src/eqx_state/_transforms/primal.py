"""A call with state as a pure function of arrays, which JAX can differentiate.

The function returns the new state as an auxiliary output. State is therefore written
once, however many tangents follow, and is never part of a tangent or a cotangent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._state.codecs import snapshot
from .cut import cut, Rest, which_traced
from .lift import Lifted, Ran
from .reach import check_given
from .roots import Values
from .transform import with_aux


def which_inexact(tree: Any) -> Any:
    """For each leaf, whether it has tangents. An owned module counts as one leaf, which
    has none."""

    def is_inexact(is_traced: bool, x: Any) -> bool:
        return is_traced and jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.inexact)

    return jtu.tree_map(is_inexact, which_traced(tree), tree)


class PureCall:
    """Turns calls with these arguments into pure functions of some of their arrays.

    - `arrays`: for each argument, the leaves that `which_inputs` selects, and `None`
        elsewhere. They are the inputs of the pure function.

    Owned modules among the arguments are copied, because the same module in the closure
    of a function is a constant.
    """

    def __init__(
        self,
        functions: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        which_inputs: Callable[[Any], Any],
    ):
        check_given(functions, *args, *kwargs.values())
        # In `es.vjp(f, (layer, layer))`, as in JAX, each place has its own cotangent.
        num_places = jtu.tree_structure(tuple(args)).num_leaves
        places = [*range(num_places), *(None for _ in jtu.tree_leaves(kwargs))]
        self.lifted = Lifted(functions, (tuple(args), kwargs), places)
        self.args, self.kwargs = self.lifted.arguments
        # The caller receives derivatives of this structure, which no scope owns.
        given = snapshot(self.args)
        self.arrays, self.rest = cut(given, which_inputs(given))

    def __call__(self, f: Any, arrays: Any) -> tuple[Ran, Values]:
        """The result of `f`, and the leaves of the argument copies before the call."""
        new = jtu.tree_leaves(self.rest.join(arrays))
        args, before = self.lifted.fill(self.args, new)
        values = {**self.lifted.values, **before}
        return self.lifted.run(values, f, args, self.kwargs), before


class Primal:
    """A call of `f` as a pure function of the inexact arrays of its arguments.

    `which_outputs` selects the part of the output that JAX differentiates.
    """

    def __init__(
        self,
        f: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        has_aux: bool,
        which_outputs: Callable[[Any], Any] = which_traced,
    ):
        self.f, self.has_aux, self.which_outputs = f, has_aux, which_outputs
        self.call = PureCall(f, args, kwargs, which_inexact)
        self.arrays = self.call.arrays

    def run(self, *arrays: Any) -> tuple[Any, tuple[Ran, Rest]]:
        """The output to differentiate, and everything else as an auxiliary output."""
        ran, _ = self.call(self.f, arrays)
        out, aux = with_aux(ran.out) if self.has_aux else (ran.out, None)
        out, rest = eqx.partition(out, self.which_outputs(out))
        computed, static = cut((rest, aux))
        return out, (ran._replace(out=computed), static)

    def finish(self, out: Any, rest: tuple[Ran, Rest]) -> tuple[Any, ...]:
        """Commit the written state. Returns the whole output, and `aux` if any."""
        ran, static = rest
        self.call.lifted.commit(ran)
        out_rest, aux = static.join(ran.out)
        out = eqx.combine(out, out_rest)
        return (out, aux) if self.has_aux else (out,)
