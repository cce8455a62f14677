"""`es.audit`: what is legal in a training step, and seldom meant."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import equinox as eqx
import jax
import numpy as np

from .._jit.jit import jit
from .._kinds.kinds import BatchStat, Rng
from .._state.marks import NEW, OLD
from .._transforms.transform import Transform, wrap
from .._tree.base import is_module, keystr
from .._tree.keys import data_of
from .._tree.walk import leaves
from .._typing import P
from .closure import wrappers
from .dataflow import OWNED, Value
from .traced_step import is_concrete, Leaf, TracedStep


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a training step that is legal and seldom meant.

    [`es.audit`][eqx_state.audit] returns findings. The `str` of a finding is one line.

    - `kind`: `"lost"`, `"repeated key"`, `"equal keys"`, `"untrained"`, `"unwritten"`,
        `"constant"` or `"static"`.
    - `name`: what it is about: an argument and a path, such as `"model.norm.mean"`.
    - `text`: what happens, and what to write instead.

    !!! example

        ```python
        import eqx_state as es
        import jax.random as jr

        [found] = es.audit(lambda key: (jr.normal(key), key))(jr.key(0))
        assert (found.kind, found.name) == ("repeated key", "key")
        assert str(found).startswith("repeated key: `key` is drawn from")
        ```
    """

    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: `{self.name}` {self.text}"


class _Audit(Transform):
    def __call__(self, /, *args: Any, **kwargs: Any) -> list[Finding]:
        step = TracedStep(self.f, args, kwargs)
        found: dict[tuple[str, str], Finding] = {}
        for kind, look in _KINDS.items():
            for name, text in look(step):
                # What is lost comes back as it went in: name it once.
                if ("lost", name) not in found or kind not in _COMES_BACK:
                    found.setdefault((kind, name), Finding(kind, name, text))
        return [*found.values()]


def audit(step: Callable[P, Any]) -> Callable[P, list[Finding]]:
    """What a training step does that is legal and seldom meant.

    Call it once before a long run. It traces one call of the step and does not run it,
    so it takes as long as a trace, and nothing changes.

    Many mistakes are correct programs that somebody else means. For example,
    `loss, grads = es.value_and_grad(loss_fn)(model)` drops the new model with the loss.
    No single line of such a program is wrong, but the whole step shows that nothing
    that it returns depends on the new state. The kinds of findings:

    - `"lost"`: state that the step writes, and on whose new value no output depends.
        The new state of an `es.Optimizer` counts, too. State that a later call
        overwrites is not lost.
    - `"repeated key"`: a key that the step draws from and returns as it was, or closes
        over. The next step draws the same numbers.
    - `"equal keys"`: two keys of one model have the same value.
    - `"untrained"`: a trainable array that comes back as it went in, weight decay
        aside, although others of its model changed. One finding names the largest
        module without a change. What an `es.Optimizer` leaves out by `wrt=` or by a
        group `None` is not named.
    - `"unwritten"`: a `BatchStat` in train mode that comes back as it went in, although
        parameters changed.
    - `"constant"`: an array of more than 1,000 elements that the step closes over. It
        is a constant of the compiled program.
    - `"static"`: a Python number among the arguments of a step under `es.jit` or
        `eqx.filter_jit`, outside of modules. Each value compiles the step anew.

    The audit also names what you drop on purpose, so read the findings as a list. It
    misses what depends on values: a gradient that happens to be zero. It does not look
    at averages (`es.Ema`), at modes, or at a model that does not change at all. It
    finds layers without a gradient best with a new optimizer, because the moments of
    earlier steps also move a parameter.

    **Arguments:**

    - `step`: any function that JAX can trace, compiled or not: by `es.jit`,
        `eqx.filter_jit` or `jax.jit`.

    **Returns:**

    A function that takes the arguments of one call, also abstract ones
    (`jax.ShapeDtypeStruct`), and returns a list of
    [`es.Finding`][eqx_state.Finding]s in the order above. `[]`: nothing to name.

    **Raises:**

    - What the step raises when it is traced. An audit is one more trace for
        `eqx.debug.assert_max_traces`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax
        import jax.numpy as jnp
        import jax.random as jr
        import optax


        class Net(es.Module):
            norm: es.nn.BatchNorm
            linear: eqx.nn.Linear

            def __call__(self, xs):
                return jax.vmap(self.linear)(self.norm(xs))


        def loss_fn(model, xs):
            return jnp.mean(model(xs) ** 2)


        @es.jit
        def step(model, optimizer, xs):
            loss, grads = es.value_and_grad(loss_fn)(model, xs)  # a mistake
            model, optimizer = optimizer.update(grads, model)
            return model, optimizer


        model = Net(es.nn.BatchNorm(3), eqx.nn.Linear(3, 1, key=jr.key(0)))
        optimizer = es.Optimizer(optax.sgd(0.1)).init(model)
        found = es.audit(step)(model, optimizer, jnp.ones((8, 3)))
        assert {finding.kind for finding in found} == {"lost"}
        assert "model.norm.mean" in [finding.name for finding in found]
        print(*found, sep="\\n")
        ```
    """
    return wrap(_Audit, step)


# --- The kinds. Each function yields names and texts.


Found = Iterator[tuple[str, str]]


def _lost(step: TracedStep) -> Found:
    flow, marks = step.flow, step.marks.found
    alive = [f"{NEW}{n}" in flow.needed for n in range(len(marks))]
    known = {mark for mark, is_alive in zip(marks, alive, strict=True) if is_alive}
    for n, mark in enumerate(marks):
        # If a write is not in the jaxpr, nothing depends on it, or JAX has traced the
        # function twice. Then the other trace of the same line is there.
        if not alive[n] and (f"{NEW}{n}" in flow.named or mark not in known):
            old = flow.named.get(f"{OLD}{n}", Value("new"))
            is_argument = old.what in OWNED
            leaf = step.leaves[old.of] if is_argument else _find(step, mark.name)
            if leaf is not None and leaf.is_of_optimizer:
                yield leaf.name.rpartition(".opt_state")[0], _LOST_OPTIMIZER
            else:
                yield mark.name if leaf is None else leaf.name, _LOST


def _find(step: TracedStep, name: str) -> Leaf | None:
    """The first leaf of an argument that ends with the name of a state."""
    ends = f".{name}", f"]{name}"
    return next((leaf for leaf in step.leaves if leaf.name.endswith(ends)), None)


def _repeated_keys(step: TracedStep) -> Found:
    flow = step.flow
    for i in step.inputs:
        if step.leaves[i].is_key and step.value(i) in flow.needed:
            if step.comes_back(i):
                yield step.leaves[i].name, _REPEATED
    for x in flow.constants.values():
        if Value("constant", id(x)) in flow.needed:
            yield step.name_of_constant(x) or "key", _CLOSED_OVER


def _equal_keys(step: TracedStep) -> Found:
    for argument, tree in step.trees:
        known: dict[bytes, str] = {}
        for visit in leaves(tree):
            if not visit.is_a(Rng) or not is_concrete(visit.node):
                continue
            with jax.ensure_compile_time_eval():  # the audit may be in a trace itself
                data = data_of(visit.node)
            rows = [*map(bytes, np.asarray(data).reshape(-1, data.shape[-1]))]
            name = f"{argument}{keystr(visit.path)}"
            if others := [known[row] for row in rows if row in known]:
                yield name, _EQUAL.format(f"`{others[0]}`")
            elif len({*rows}) < len(rows):
                yield name, _EQUAL.format("a different layer or member of it")
            known.update(dict.fromkeys(rows, name))


def _untrained(step: TracedStep) -> Found:
    for unit in step.trained:
        left = {i for i in unit if step.leaves[i].is_trainable}
        left = {i for i in left if step.comes_back(i)}
        left = {i for i in left if step.value(i) not in step.flow.left_out}
        for _, inside, name in step.modules:
            own = {i for i in inside if step.leaves[i].is_trainable}
            if own and own <= left:
                left -= own
                yield name, _UNTRAINED
        yield from ((step.leaves[i].name, _UNTRAINED) for i in sorted(left))


def _unwritten(step: TracedStep) -> Found:
    off: set[int] = set()  # in eval mode
    for node, inside, _ in step.modules:  # parents first
        if is_module(node):
            off = off - {*inside} if node.training else off | {*inside}
    for unit in step.trained:
        for i in unit:
            leaf = step.leaves[i]
            is_off = i in off or leaf.visit.context.frozen
            if leaf.visit.is_a(BatchStat) and not is_off and step.comes_back(i):
                yield leaf.name, _UNWRITTEN


def _constant(step: TracedStep) -> Found:
    for x in step.flow.constants.values():
        if np.size(x) <= _LARGE:
            continue
        name = step.name_of_constant(x)
        # A NumPy array that nothing closes over was computed in the step.
        if name or isinstance(x, jax.Array):
            yield name or f"an array of shape {np.shape(x)}", _CONSTANT


def _static(step: TracedStep) -> Found:
    if any(isinstance(f, _COMPILED) for f in wrappers(step.f)):
        for leaf in step.leaves:
            is_number = type(leaf.value) in (int, float)
            if is_number and leaf.visit.context.owner is None:
                yield leaf.name, _STATIC


_KINDS: Final[dict[str, Callable[[TracedStep], Found]]] = {
    "lost": _lost,
    "repeated key": _repeated_keys,
    "equal keys": _equal_keys,
    "untrained": _untrained,
    "unwritten": _unwritten,
    "constant": _constant,
    "static": _static,
}
_COMES_BACK: Final = ("repeated key", "unwritten")
_LARGE: Final = 1000
_COMPILED: Final[Any] = (type(jit(lambda: None)), type(eqx.filter_jit(lambda: None)))

_LOST: Final = """is written, and nothing that the step returns depends on the new \
value. Use the new model: `(loss, model), grads = …`, `y, model = es.mutable(…)(…)`."""

_LOST_OPTIMIZER: Final = """is updated, and nothing that the step returns depends on \
its new state. Return it: `model, optimizer = optimizer.update(grads, model)`."""

_REPEATED: Final = """is drawn from and comes back as it went in, so the next step \
draws the same numbers. Store a new key: `self.rng, key = jr.split(self.rng)`."""

_CLOSED_OVER: Final = """is a constant of the step, which draws from it, so each step \
draws the same numbers. Pass a new key in each step, or make it an `es.Rng` of the \
model."""

_EQUAL: Final = """has the value of {}, so both draw the same numbers. Give each its \
own: `model = es.reseed(model, key)`."""

_UNTRAINED: Final = """comes back as it went in, although other parameters change: no \
gradient reaches it, or the optimizer leaves it out. Use it in the loss; if this is \
meant, `es.freeze` it or declare it `es.Buffer`."""

_UNWRITTEN: Final = """is a running statistic in train mode, and the step does not \
write it. Assign it in the forward pass, `self.mean = …`; if this is meant, use \
`.eval()` or `es.freeze`."""

_CONSTANT: Final = """is an array that the step closes over, so it is a constant of \
the compiled program, which does not see later values. Pass it as an argument."""

_STATIC: Final = """is a Python number, so each new value compiles the step again. If \
it is not a shape, pass an array: `jnp.asarray(x)`."""
