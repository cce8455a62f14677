"""What the outputs of a jaxpr are: inputs, unchanged; zero; or new.

A pass from the inputs to the outputs, also through calls, loops and branches. All
outputs of an equation that it does not know are new.
"""

from typing import Any, Final, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from .._state.marks import LEFT_OUT, NEW as WRITTEN, OLD as OVERWRITTEN
from .liveness import Bools, called, constants_in, jaxprs_in, Liveness, marker


class Value(NamedTuple):
    """What a pass knows about a value.

    - `what`: `"input"`, unchanged; `"decayed"`, an input times numbers; `"written"`, a
        new value of an input that is state; `"slice"` of a different value, in a step
        of a loop; `"derived"`, a key that is computed from a different key alone;
        `"constant"`, `"zero"`, `"number"`, or `"new"`.
    - `of`: the number of the input, the `Value` of the whole or of the first key, or
        the constant's `id`.
    """

    what: str
    of: Any = None


NEW: Final = Value("new")
ZERO: Final = Value("zero")
LITERAL: Final = Value("literal")  # computed from literals
NUMBER: Final = Value("number")  # computed from literals and inputs that are numbers


class Dataflow:
    """The pass through one jaxpr.

    - `outputs`: the value of each output.
    - `used`: the inputs and constants that an equation which matters computes with.
    - `named`: for each name of `checkpoint_name`, the value with this name.
    - `left_out`: the values that an optimizer does not train, because its user says so.
    - `alive`: the names in equations that matter.
    - `constants`: the arrays that the jaxpr contains; `raw_keys`: the `id` of those
        that are used as keys without being typed.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        inputs: list[Value],
        numbers: set[int],
        liveness: Liveness,
    ):
        """`numbers`: the inputs that count as numbers."""
        self.numbers, self.liveness = numbers, liveness
        self._constants = constants_in(closed)
        found = [x for each in self._constants.values() for x in each.values()]
        self.constants = [*{id(x): x for x in found}.values()]
        self.raw_keys: set[int] = set()
        self.left_out: set[Value] = set()
        self.used: set[Value] = set()
        self.named: dict[str, Value] = {}
        self.outputs = self.of(closed.jaxpr, inputs, (True,) * len(closed.out_avals))
        self.alive = self.liveness.marks

    def of(self, jaxpr: Jaxpr, inputs: list[Value], alive: Bools) -> list[Value]:
        """The values of the outputs. `alive`: which outputs matter."""
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for x, constant in self._constants.get(id(jaxpr), {}).items():
            values[x] = Value("constant", id(constant))

        def read(x: Any) -> Value:
            return _literal(x) if isinstance(x, Literal) else values.get(x, NEW)

        masks = self.liveness.of(jaxpr, alive).equations
        for equation, mask in zip(jaxpr.eqns, masks, strict=True):
            given = [*map(read, equation.invars)]
            out = self._outputs(equation, given, mask)
            values.update(zip(equation.outvars, out, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _outputs(self, equation: Any, given: list[Value], mask: Bools) -> list[Value]:
        params = equation.params
        is_alive = any(mask) or bool(equation.effects)
        match name := equation.primitive.name:
            case "scan":
                n = params["num_consts"]
                m = n + params["num_carry"]
                body = params["jaxpr"].jaxpr
                xs = [x if x in (NEW, ZERO) else Value("slice", x) for x in given[m:]]
                carry, ys = self._loop(body, given[:n], given[n:m], xs, mask)
                is_whole = lambda y: y.what == "slice"  # noqa: E731
                stacked = [y if y == ZERO else y.of if is_whole(y) else NEW for y in ys]
                return [*carry, *stacked]
            case "while":
                n, m = params["cond_nconsts"], params["body_nconsts"]
                first, consts = given[n + m :], given[n : n + m]
                body = params["body_jaxpr"].jaxpr
                carry, _ = self._loop(body, consts, first, [], mask)
                test = params["cond_jaxpr"].jaxpr
                self.of(test, [*given[:n], *carry], (is_alive,))
                return carry
            case "cond":
                branches = [b.jaxpr for b in params["branches"]]
                outs = [self.of(b, given[1:], mask) for b in branches]
                return [
                    x[0] if len({*x}) == 1 else NEW for x in zip(*outs, strict=True)
                ]
        if (jaxpr := called(equation)) is not None:
            return self.of(jaxpr, given, mask)
        for jaxpr in jaxprs_in(equation):
            unknown = [NEW] * len(jaxpr.invars)
            self.of(jaxpr, unknown, (is_alive,) * len(jaxpr.outvars))
        if mark := marker(equation):
            self.named.setdefault(mark, given[0])
            if mark == LEFT_OUT:
                self.left_out.add(given[0])
            if mark.startswith(WRITTEN) and given[0] == NEW:
                old = self.named.get(mark.replace(WRITTEN, OVERWRITTEN), NEW)
                return [Value("written", old.of) if old.what in _OWNED else NEW]
        if name == "random_wrap" and is_alive and given[0].what == "constant":
            self.raw_keys.add(given[0].of)
        if name in _IDENTITIES or _changes_nothing(equation):
            return given
        if name in _OF_KEYS and _is_key(equation.invars[0]):
            # A key that the number of the step is folded into draws new numbers.
            is_new = given[0] == NEW or any(map(_may_change, given[1:]))
            key = NEW if is_new else Value("derived", _whole(given[0]))
            return [key] * len(equation.outvars)
        if is_alive:
            self.used.update(map(_whole, given))
        return self._computed(equation, given)

    def _loop(
        self,
        body: Jaxpr,
        consts: list[Value],
        carry: list[Value],
        xs: list[Value],
        mask: Bools,
    ) -> tuple[list[Value], list[Value]]:
        """The carry and the other outputs of a loop, equal in all of its steps."""
        while True:
            out = self.of(body, [*consts, *carry, *xs], mask)
            new = out[: len(carry)]
            both = zip(carry, new, strict=True)
            merged = [a if a == b else NEW for a, b in both]
            if merged == carry:
                return carry, out[len(carry) :]
            carry = merged

    def _computed(self, equation: Any, given: list[Value]) -> list[Value]:
        name = equation.primitive.name
        if name in _SUMS and (kept := self._term(equation, given)) is not None:
            return [kept]
        if name in _LINEAR and (owner := self._decayed(name, given)) is not None:
            return [Value("decayed", owner)]
        is_zero = [x == ZERO for x in given]
        if name in _PRODUCTS and any(is_zero):
            return [ZERO]
        if name == "div" and is_zero[0]:
            return [ZERO]
        if name in _KEEP_ZERO and all(is_zero):
            return [ZERO] * len(equation.outvars)
        if name == "integer_pow" and is_zero[0] and equation.params["y"] > 0:
            return [ZERO]
        if name == "select_n" and len({*given[1:]}) == 1:
            return [given[1]]
        if not given or not all(map(self._is_number, given)):
            return [NEW] * len(equation.outvars)
        is_literal = all(x in (ZERO, LITERAL) for x in given)
        return [LITERAL if is_literal else NUMBER] * len(equation.outvars)

    def _term(self, equation: Any, given: list[Value]) -> Value | None:
        """The other term of a sum with zero."""
        a, b = given
        shape = equation.outvars[0].aval.shape
        is_whole = [x.aval.shape == shape for x in equation.invars]
        if b == ZERO and is_whole[0]:
            return a
        if (
            a == ZERO
            and is_whole[1]
            and (b == ZERO or equation.primitive.name != "sub")
        ):
            return b
        return None

    def _decayed(self, name: str, given: list[Value]) -> int | None:
        """The input that a linear operation multiplies with numbers, or `None`."""
        if ZERO in given:
            return None
        others = [x for x in given if not self._is_number(x)]
        owners = {x.of for x in others}
        if len(owners) != 1 or any(x.what not in ("input", "decayed") for x in others):
            return None
        if name in _SUMS:
            is_linear = len(others) == 2
        elif name == "div":
            is_linear = self._is_number(given[1])
        else:
            is_linear = len(others) == 1
        return owners.pop() if is_linear else None

    def _is_number(self, x: Value) -> bool:
        is_input = x.what == "input" and x.of in self.numbers
        return is_input or x in (ZERO, LITERAL, NUMBER)


def _literal(x: Any) -> Value:
    if x.aval.dtype == jax.dtypes.float0:
        return ZERO
    return ZERO if x.val == 0 else LITERAL


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.aval.dtype, jax.dtypes.prng_key)


def _may_change(x: Value) -> bool:
    """Whether a value may differ in the next step."""
    return x not in (ZERO, LITERAL) and x.what != "constant"


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
_OWNED: Final = frozenset({"input", "written"})
_SUMS: Final = frozenset("add add_any sub".split())
_LINEAR: Final = _SUMS | frozenset("mul div neg convert_element_type".split())
_PRODUCTS: Final = frozenset("mul dot_general".split())
_KEEP_ZERO: Final = frozenset(
    "abs add add_any broadcast_in_dim concatenate conj convert_element_type cumsum"
    " expand_dims imag max min neg pad pmax psum psum2"
    " psum_invariant real reduce_max reduce_min reduce_sum reshape rev select_and_add"
    " sign slice split sqrt square squeeze stop_gradient sub transpose".split()
)
