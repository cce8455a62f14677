"""The primal computation: a call as a pure function of inexact arrays.

`es.vjp`, `es.jvp`, `es.linearize` and the Jacobians hand one such function to their
namesakes in JAX. State leaves it as an auxiliary output, so it is threaded once,
however many tangents follow, and no tangent or cotangent ever sees it.
"""

from collections.abc import Sequence
from typing import Any, Final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._state._nn_shared import closed_copy
from .._tree._show import show
from .._tree._walk import map_leaves, Visit
from ._arguments import check_given, is_mappable, is_traced
from ._lift import Lifted, Static
from ._stand_ins import stand_in


class Primal:
    """A call of `f`, as a function of the inexact arrays in some of its arguments.

    - `chosen`: these arguments. Owned modules among them have stand-ins, since an
        argument and a closure are two values: what `f` closes over is a constant.
    - `given`: the same as an ordinary tree, which no scope owns.
    - `diff`: the inexact arrays of `given`, with holes elsewhere.
    """

    def __init__(
        self,
        f: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        positions: Sequence[int],
        has_aux: bool,
    ):
        self.f, self.args, self.kwargs = f, args, kwargs
        self.positions, self.has_aux = positions, has_aux
        check_given(*args, *kwargs.values())
        self._reach()
        if self.lifted.is_initializing:
            f(*args, **kwargs)  # makes what is missing
            self._reach()
        self.given = tuple(closed_copy(self.chosen))
        self.diff, self.rest = eqx.partition(
            self.given, map_leaves(_is_inexact, self.given)
        )

    def _reach(self) -> None:
        chosen = [self.args[i] for i in self.positions]
        # The position is the meaning of a stand-in: an argument that is given twice is
        # differentiated twice.
        meanings = [i for i, x in enumerate(chosen) for _ in jtu.tree_leaves(x)]
        self.chosen, stand_ins = stand_in(chosen, meanings)
        self.lifted = Lifted(
            self.f, self._args(self.chosen), self.kwargs, stand_ins=stand_ins
        )

    def _args(self, chosen: Sequence[Any]) -> list[Any]:
        """All arguments, with these in place of the chosen ones."""
        args = list(self.args)
        for i, x in zip(self.positions, chosen, strict=True):
            args[i] = x
        return args

    def run(self, *diff: Any) -> tuple[Any, Any]:
        """The arrays of the output, and as an auxiliary output everything else."""
        new = jtu.tree_leaves(eqx.combine(diff, self.rest))
        chosen, values = self.lifted.fill(self.chosen, new)
        args = self._args(chosen)
        ran = self.lifted.run(
            {**self.lifted.values, **values}, lambda: self.f(*args, **self.kwargs)
        )
        out, aux = _two(ran.out) if self.has_aux else (ran.out, None)
        out, static = eqx.partition(out, is_traced(out))
        aux, kept = self.lifted.split(aux)
        return out, (aux, ran._replace(out=None), Static((static, kept)))

    def finish(self, rest: Any) -> tuple[Any, ...]:
        """Commit what was written. Returns the output's rest, and `aux` if there is."""
        aux, ran, kept = rest
        self.lifted.commit(ran)
        static, aux_static = kept.value
        return (static, eqx.combine(aux, aux_static)) if self.has_aux else (static,)


def _is_inexact(visit: Visit) -> bool:
    dtype = getattr(visit.node, "dtype", type(visit.node))
    return is_mappable(visit) and jnp.issubdtype(dtype, jnp.inexact)


def _two(out: Any) -> Any:
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(_NOT_A_PAIR.format(show(out)))
    return out


_NOT_A_PAIR: Final = """With `has_aux=True` the function returns a pair, `(out, aux)`, \
of which `out` is differentiated, and it returned `{}`. Put what else it returns into \
`aux`: `return out, (logits, metrics)`."""
