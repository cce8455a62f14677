"""What the outputs of a jaxpr are (inputs, zero or new), and what they need.

One pass from the inputs to the outputs, also through calls, loops and branches. An
output of an equation that it does not know is new, and needs all inputs.
"""

import functools as ft
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .._compat import jaxprs_in
from .._state.marks import LEFT_OUT, NEW as WRITTEN, OLD as OVERWRITTEN


class Value(NamedTuple):
    """What the pass knows about a value.

    - `what`: an input, unchanged, is an `"input"`; or a `"key"`; or a `"number"`, which
        is like a literal to the model. `"decayed"`: an input times numbers.
        `"written"`: a new value of an input that is state. `"slice"`: of a different
        value, in a step of a loop. `"derived"`: a key that is computed from a different
        key alone. `"constant"`, `"literal"`, `"zero"`. `"computed"`: from literals and
        numbers. `"new"`: anything else.
    - `of`: the number of the input, the `Value` of the whole or of the first key, or
        the constant's `id`.
    """

    what: str
    of: Any = None


NEW: Final = Value("new")
ZERO: Final = Value("zero")
LITERAL: Final = Value("literal")
COMPUTED: Final = Value("computed")


class Fact(NamedTuple):
    """What the pass knows about a variable.

    - `needs`: of all that its value is computed from, the names of `checkpoint_name`,
        and the keys that are drawn from.
    """

    value: Value
    needs: frozenset[Any] = frozenset()


def _either(*facts: Fact) -> Fact:
    """What is known about a variable that is one of these."""
    value, *others = {x.value for x in facts}
    return Fact(NEW if others else value, _needs(facts))


def _needs(facts: Iterable[Fact]) -> frozenset[Any]:
    return frozenset().union(*(x.needs for x in facts))


class Dataflow:
    """The pass through one jaxpr.

    - `outputs`: the value of each output.
    - `needed`: what the outputs and the side effects need, as `Fact.needs`.
    - `named`: for each name of `checkpoint_name`, the value with this name.
    - `left_out`: the values that an optimizer does not train, because its user says so.
    - `constants`: the arrays that the jaxpr contains, by `id`.
    """

    def __init__(self, closed: ClosedJaxpr, inputs: list[Value]):
        self.constants: dict[int, Any] = {}
        self.left_out: set[Value] = set()
        self.named: dict[str, Value] = {}
        self.needed: frozenset[Any] = frozenset()
        # The loops in a loop get the same inputs again and again.
        self._of = ft.cache(self._through)
        found = self._of(closed, *map(Fact, inputs))
        self.outputs = [x.value for x in found]
        self.needed |= _needs(found)

    def _through(self, jaxpr: ClosedJaxpr | Jaxpr, *inputs: Fact) -> list[Fact]:
        """What is known about the outputs of a jaxpr."""
        known: dict[Any, Fact] = {}
        if isinstance(jaxpr, ClosedJaxpr):
            for x, constant in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
                self.constants[id(constant)] = constant
                known[x] = Fact(Value("constant", id(constant)))
            jaxpr = jaxpr.jaxpr
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(x: Any) -> Fact:
            is_literal = isinstance(x, Literal)
            return Fact(_literal(x)) if is_literal else known.get(x, Fact(NEW))

        for equation in jaxpr.eqns:
            out = self._outputs(equation, [*map(read, equation.invars)])
            known.update(zip(equation.outvars, out, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _outputs(self, equation: Any, given: list[Fact]) -> list[Fact]:
        params = equation.params
        match equation.primitive.name:
            case "scan":
                # The parameters that say this differ between versions of JAX.
                body, outs = params["jaxpr"], equation.outvars
                m = len(given) - _stacked(equation.invars, body.in_avals)
                n = m - (len(outs) - _stacked(outs, body.out_avals))
                xs = [x._replace(value=_slice(x.value)) for x in given[m:]]
                carry, ys = self._loop(body, given[:n], given[n:m], xs)
                # JAX itself takes what comes out as it went in out of the loop.
                stacked = [y if y.value == ZERO else Fact(NEW, y.needs) for y in ys]
                return [*carry, *stacked]
            case "while":
                n, m = params["cond_nconsts"], params["body_nconsts"]
                consts, first = given[n : n + m], given[n + m :]
                carry, _ = self._loop(params["body_jaxpr"], consts, first, [])
                test = self._of(params["cond_jaxpr"], *given[:n], *carry)
                return self._decided(equation, carry, _needs(test))
            case "cond":
                branches = [self._of(b, *given[1:]) for b in params["branches"]]
                found = [_either(*facts) for facts in zip(*branches, strict=True)]
                return self._decided(equation, found, given[0].needs)
        inner = [*jaxprs_in(equation)]
        sizes = len(equation.invars), len(equation.outvars)
        for jaxpr in inner:
            if (len(jaxpr.in_avals), len(jaxpr.out_avals)) == sizes:
                return self._of(jaxpr, *given)  # of `jit`, `checkpoint`, …
        needs = _needs(given)
        for jaxpr in inner:
            unknown = [Fact(NEW, needs)] * len(jaxpr.in_avals)
            needs |= _needs(self._of(jaxpr, *unknown))
        values, more = self._values(equation, [x.value for x in given])
        if equation.effects:
            self.needed |= needs | more
        return [Fact(value, needs | more) for value in values]

    def _decided(
        self, equation: Any, found: list[Fact], needs: frozenset[Any]
    ) -> list[Fact]:
        """The outputs of a branch or a loop whose condition needs `needs`."""
        if equation.effects:
            self.needed |= needs
        return [Fact(x.value, x.needs | needs) for x in found]

    def _loop(
        self, body: ClosedJaxpr, consts: list[Fact], carry: list[Fact], xs: list[Fact]
    ) -> tuple[list[Fact], list[Fact]]:
        """The carry and the other outputs of a loop, equal in all of its steps."""
        out = self._of(body, *consts, *carry, *xs)
        while True:
            both = [*map(_either, carry, out)]  # `out` is longer
            if both == carry:
                return carry, out[len(carry) :]
            carry = both
            again = self._of(body, *consts, *carry, *xs)
            out = [*map(_either, out, again)]

    def _values(
        self, equation: Any, given: list[Value]
    ) -> tuple[list[Value], frozenset[Any]]:
        """The values of the outputs, and what they need beside the inputs' needs."""
        name = equation.primitive.name
        if name == "name":
            mark = str(equation.params["name"])
            return [self._marked(mark, given[0])], frozenset({mark})
        if name in _IDENTITIES or _changes_nothing(equation):
            return given, frozenset()
        keys = frozenset(
            _whole(value)
            for value, x in zip(given, equation.invars, strict=True)
            if _is_key(x) or value.what in ("key", "derived")
        )
        if name in _OF_KEYS and keys:
            # A key that the number of the step is folded into draws new numbers.
            is_new = given[0] == NEW or any(map(_may_change, given[1:]))
            key = NEW if is_new else Value("derived", _whole(given[0]))
            return [key] * len(equation.outvars), frozenset()
        return self._computed(equation, given), keys

    def _marked(self, mark: str, value: Value) -> Value:
        """The value that `checkpoint_name` returns."""
        self.named.setdefault(mark, value)
        if mark == LEFT_OUT:
            self.left_out.add(value)
        if mark.startswith(WRITTEN) and value.what in ("new", "derived"):
            old = self.named.get(mark.replace(WRITTEN, OVERWRITTEN), NEW)
            return Value("written", old.of) if old.what in OWNED else value
        return value

    def _computed(self, equation: Any, given: list[Value]) -> list[Value]:
        name, count = equation.primitive.name, len(equation.outvars)
        match name:
            case "mul" | "dot_general":
                is_zero = ZERO in given
            case "div":
                is_zero = given[0] == ZERO
            case "integer_pow":
                is_zero = given[0] == ZERO and equation.params["y"] > 0
            case _:
                is_zero = name in _KEEP_ZERO and {*given} == {ZERO}
        if is_zero:
            return [ZERO] * count
        if name in _SUMS and given[1] == ZERO:
            return [given[0]]
        if name in _SUMS and given[0] == ZERO and name != "sub":
            return [given[1]]
        if name in _LINEAR and (owner := _owner(name, given)) is not None:
            return [Value("decayed", owner)]
        if name == "select_n" and len({*given[1:]}) == 1:
            return [given[1]]
        if not given or not all(map(_is_number, given)):
            return [NEW] * count
        is_literal = all(x in (ZERO, LITERAL) for x in given)
        return [LITERAL if is_literal else COMPUTED] * count


def _owner(name: str, given: list[Value]) -> int | None:
    """The input of which a linear operation computes a multiple, or `None`."""
    terms = [x for x in given if not _is_number(x)]
    is_linear = len(terms) == (2 if name in _SUMS else 1)
    is_linear &= name != "div" or _is_number(given[1])
    owners = {x.of if x.what in ("input", "decayed") else None for x in terms}
    return owners.pop() if is_linear and len(owners) == 1 else None


def _is_number(x: Value) -> bool:
    return x.what in ("number", "computed", "literal", "zero")


def _literal(x: Any) -> Value:
    if x.aval.dtype == jax.dtypes.float0:
        return ZERO
    return ZERO if x.val == 0 else LITERAL


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.aval.dtype, jax.dtypes.prng_key)


def _may_change(x: Value) -> bool:
    """Whether a value may differ in the next step."""
    return x not in (ZERO, LITERAL) and x.what != "constant"


def _stacked(outside: list[Any], inside: list[Any]) -> int:
    """How many arrays of a scan have one axis more than its body sees."""
    pairs = zip(outside, inside, strict=True)
    return sum(x.aval.ndim > aval.ndim for x, aval in pairs)


def _slice(x: Value) -> Value:
    """What a step of a loop gets of a value."""
    return x if x in (NEW, ZERO) else Value("slice", x)


def _whole(x: Value) -> Value:
    while x.what in ("slice", "derived"):
        x = x.of
    return x


def _changes_nothing(equation: Any) -> bool:
    """Whether an equation of a primitive that may change its operand does not."""
    if equation.primitive.name not in ("convert_element_type", "reshape"):
        return False
    old, new = equation.invars[0].aval, equation.outvars[0].aval
    return (old.shape, old.dtype) == (new.shape, new.dtype)


# A primitive that is missing here makes the audit miss something, and never name
# something that is not so.
_IDENTITIES: Final = frozenset(
    "name copy copy_p optimization_barrier random_wrap random_unwrap"
    " sharding_constraint reshard pvary pcast".split()
)
# Of a key: new keys, or the same in a different place.
_OF_KEYS: Final = frozenset(
    "random_split random_fold_in broadcast_in_dim dynamic_slice gather reshape slice"
    " squeeze transpose".split()
)
OWNED: Final = ("input", "key", "number", "written")  # `of` is the number of an input
_SUMS: Final = frozenset("add add_any sub".split())
_LINEAR: Final = _SUMS | frozenset("mul div neg convert_element_type".split())
_KEEP_ZERO: Final = frozenset(
    "abs add add_any broadcast_in_dim concatenate conj convert_element_type cumsum"
    " expand_dims imag max min neg pad pmax psum psum2"
    " psum_invariant real reduce_max reduce_min reduce_sum reshape rev select_and_add"
    " sign slice split sqrt square squeeze stop_gradient sub transpose".split()
)
