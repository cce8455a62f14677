"""Which equations of a jaxpr the outputs depend on.

A pass from the outputs to the inputs, also through calls, loops and branches. Of an
equation that it does not know, all inputs matter.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .._compat import params_of


Bools = tuple[bool, ...]


class Lives(NamedTuple):
    """Which inputs of a jaxpr, and which outputs of each equation, some output uses."""

    inputs: Bools
    equations: list[Bools]


def marker(equation: Any) -> str:
    """The name that `checkpoint_name` gives to a value, or `""`."""
    return str(equation.params["name"]) if equation.primitive.name == "name" else ""


def called(equation: Any) -> Jaxpr | None:
    """The jaxpr of an equation that only calls it: `jit`, `checkpoint`, …"""
    for jaxpr in jaxprs_in(equation):
        num_in, num_out = len(jaxpr.invars), len(jaxpr.outvars)
        if (num_in, num_out) == (len(equation.invars), len(equation.outvars)):
            return jaxpr
    return None


def jaxprs_in(equation: Any) -> Iterator[Jaxpr]:
    """Every jaxpr among the parameters of an equation."""
    for x in jtu.tree_leaves(params_of(equation), is_leaf=_is_jaxpr):
        if _is_jaxpr(x):
            yield x.jaxpr if isinstance(x, ClosedJaxpr) else x


def constants_in(closed: ClosedJaxpr) -> dict[int, dict[Any, Any]]:
    """The constants of each jaxpr, by its `id` and then by variable."""
    found: dict[int, dict[Any, Any]] = {}
    todo = [closed]
    while todo:
        x = todo.pop()
        jaxpr = x.jaxpr if isinstance(x, ClosedJaxpr) else x
        if id(jaxpr) in found:
            continue
        consts = x.consts if isinstance(x, ClosedJaxpr) else ()
        found[id(jaxpr)] = dict(zip(jaxpr.constvars, consts, strict=False))
        for equation in jaxpr.eqns:
            below = jtu.tree_leaves(params_of(equation), is_leaf=_is_jaxpr)
            todo += filter(_is_jaxpr, below)
    return found


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, (ClosedJaxpr, Jaxpr))


class Liveness:
    """The pass, which knows the jaxprs that it has passed.

    `marks`: the names of `checkpoint_name` in equations that matter.
    """

    def __init__(self) -> None:
        self.marks: set[str] = set()
        self.known: dict[tuple[int, Bools], Lives] = {}

    def of(self, jaxpr: Jaxpr, outputs: Bools) -> Lives:
        """`outputs`: which outputs of the jaxpr matter."""
        key = id(jaxpr), outputs
        if key in self.known:
            return self.known[key]
        alive = _variables(jaxpr.outvars, outputs)
        equations: list[Bools] = []
        for equation in reversed(jaxpr.eqns):
            mask = tuple(v in alive for v in equation.outvars)
            if any(mask) or equation.effects:
                inputs, mask = self._inputs(equation, mask)
                alive |= _variables(equation.invars, inputs)
                self.marks.add(marker(equation))
            equations.append(mask)
        inputs = tuple(v in alive for v in jaxpr.invars)
        self.known[key] = Lives(inputs, equations[::-1])
        return self.known[key]

    def _inputs(self, equation: Any, mask: Bools) -> tuple[Bools, Bools]:
        """Which inputs of an equation matter, and which outputs do, in loops too."""
        params = equation.params
        match equation.primitive.name:
            case "scan":
                first, carries = params["num_consts"], params["num_carry"]
                body = params["jaxpr"].jaxpr
                carry, ys = mask[:carries], mask[carries:]
                while True:
                    inputs = self.of(body, (*carry, *ys)).inputs
                    grown = _either(carry, inputs[first : first + carries])
                    if grown == carry:
                        return inputs, (*carry, *ys)
                    carry = grown
            case "while":
                n, m = params["cond_nconsts"], params["body_nconsts"]
                test = self.of(params["cond_jaxpr"].jaxpr, (True,)).inputs
                carry = _either(mask, test[n:])
                while True:
                    inputs = self.of(params["body_jaxpr"].jaxpr, carry).inputs
                    grown = _either(carry, inputs[m:])
                    if grown == carry:
                        return (*test[:n], *inputs[:m], *carry), carry
                    carry = grown
            case "cond":
                branches = [self.of(b.jaxpr, mask).inputs for b in params["branches"]]
                return (True, *map(any, zip(*branches, strict=True))), mask
        if (jaxpr := called(equation)) is not None:
            return self.of(jaxpr, mask).inputs, mask
        for jaxpr in jaxprs_in(equation):
            self.of(jaxpr, (True,) * len(jaxpr.outvars))
        return (True,) * len(equation.invars), mask


def _variables(variables: Sequence[Any], mask: Bools) -> set[Any]:
    pairs = zip(variables, mask, strict=True)
    return {v for v, is_alive in pairs if is_alive and not isinstance(v, Literal)}


def _either(a: Bools, b: Bools) -> Bools:
    return tuple(x or y for x, y in zip(a, b, strict=True))
