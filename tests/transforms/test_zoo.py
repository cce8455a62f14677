"""Every model of the zoo under every transform equals its hand-written version.

A program uses one transform of `es` in a scope. Its twin is the same program in Python:
it uses Python's loops and branches, passes the model from call to call as a value, and
runs the lanes of a `vmap` one after another. Both return a value, gradients and a final
model. A key that was drawn from once too often would differ in the final model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from zoo import Case, CASES, split, WITHOUT_GRADS

import eqx_state as es


def is_lane_state(part: es.Part) -> bool:
    """Whether each lane of a `vmap` has its own value: state except for keys."""
    return issubclass(part.kind or object, es.State) and not is_key(part)


def is_key(part: es.Part) -> bool:
    return issubclass(part.kind or object, es.Rng)


def with_lanes(model: Any, num: int) -> Any:
    """The model with different state in each lane."""

    def spread(x: Any) -> Any:
        step = 1 if jnp.issubdtype(x.dtype, jnp.integer) else 0.1
        return jnp.stack([x + i * step for i in range(num)])

    return es.map(spread, model, on=is_lane_state)


def axes_of(model: Any) -> dict[Any, Any] | None:
    """The axes of such a model, without kinds that it does not contain."""
    axes = {}
    if any(map(is_lane_state, es.parts(model))):
        axes[es.State] = 0
    if any(map(is_key, es.parts(model))):
        axes[es.Rng] = es.SPLIT
    return axes or None


def lanes_by_hand(by_hand: Callable[..., Any], model: Any, xs: Any) -> Any:
    """A `vmap` as a loop over its lanes, each with its own state and split keys.

    A key advances once if at least one lane has drawn from it.
    """
    keys, state, rest = es.partition(model, is_key, is_lane_state)
    pairs = jax.tree.map(lambda key: split(key, 2), keys)
    advanced = jax.tree.map(lambda pair: pair[0], pairs)
    in_lanes = jax.tree.map(lambda pair: split(pair[1], len(xs)), pairs)
    ys, models, drawn = [], [], set()
    for i, x in enumerate(xs):
        mine = jax.tree.map(lambda leaf, i=i: leaf[i], (in_lanes, state))
        y, new = by_hand(eqx.combine(*mine, rest), x)
        ys.append(y)
        models.append(es.filter(new, is_lane_state))
        after = jax.tree.leaves(es.filter(new, is_key))
        before = jax.tree.leaves(mine[0])
        drawn |= {n for n, key in enumerate(after) if (key != before[n]).any()}
    leaves = jax.tree.leaves((keys, advanced))
    num = len(leaves) // 2
    leaves = [leaves[n + num if n in drawn else n] for n in range(num)]
    keys = jax.tree.unflatten(jax.tree.structure(keys), leaves)
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    return jnp.stack(ys), eqx.combine(keys, state, rest)


def is_first(xs: Any) -> Any:
    """Whether this is the first step: inputs of the second step have the other sign."""
    return xs[0].ravel()[0] > 0


# --- Programs and their twins -------------------------------------------------------
#
# `es.cond` and `es.fori_loop` are left to the random programs: their code is that of
# `es.switch`, `es.scan` and `es.while_loop`.
#
# A program takes the model's call, the model in a scope, and inputs; it returns a
# value. Its twin takes the call by hand, and returns the model as well.


def eager(call, model, xs):
    return [call(model, x) for x in xs]


def eager_by_hand(by_hand, model, xs):
    ys = []
    for x in xs:
        y, model = by_hand(model, x)
        ys.append(y)
    return ys, model


def jit(call, model, xs):
    return [es.jit(call)(model, x) for x in xs]


def vmap(call, model, xs):
    return es.vmap(lambda x: call(model, x), axes=axes_of(model))(xs)


def vmap_of_argument(call, model, xs):
    return es.vmap(call, in_axes=(axes_of(model), 0))(model, xs)


def scan(call, model, xs):
    def step(y, x):
        y = call(model, x + 0.1 * y)
        return y, 2 * y

    return es.scan(step, xs[0], xs)


def scan_by_hand(by_hand, model, xs):
    y, ys = xs[0], []
    for x in xs:
        y, model = by_hand(model, x + 0.1 * y)
        ys.append(2 * y)
    return (y, jnp.stack(ys)), model


def scan_of_carry(call, model, xs):
    def step(carry, x):
        model, y = carry
        y = call(model, x + 0.1 * y)
        return (model, y), 2 * y

    (new, y), ys = es.scan(step, (model, xs[0]), xs)
    return (y, ys), jax.lax.stop_gradient(eqx.filter(new, eqx.is_array))


def scan_of_carry_by_hand(by_hand, model, xs):
    value, new = scan_by_hand(by_hand, model, xs)
    return (value, jax.lax.stop_gradient(eqx.filter(new, eqx.is_array))), model


def checkpoint(call, model, xs):
    return [es.checkpoint(call)(model, x) for x in xs]


def switch(call, model, xs):
    branches = [lambda model, x: 2 * x, call, lambda model, x: call(model, -x)]
    index = jnp.where(is_first(xs), 5, 0)  # clamped to the last branch
    return es.switch(index, branches, model, xs[1])


def switch_by_hand(by_hand, model, xs):
    return by_hand(model, -xs[1]) if is_first(xs) else (2 * xs[1], model)


def while_loop(call, model, xs):
    def body(carry):
        i, x = carry
        return i + 1, call(model, x)

    return es.while_loop(lambda carry: carry[0] < 3, body, (0, xs[0]))[1]


def while_by_hand(by_hand, model, xs):
    x = xs[0]
    for _ in range(3):
        x, model = by_hand(model, x)
    return x, model


def purely(by_hand, model, transform, *args):
    """Apply `transform` to the pure function of an input; also return the new model."""
    static = []

    def f(x):
        y, new = by_hand(model, x)
        arrays, rest = eqx.partition(new, eqx.is_array)
        static.append(rest)
        return y, arrays

    # As one program: by themselves, the operations of a derivative compile slowly.
    *out, arrays = jax.jit(lambda *args: transform(f, *args))(*args)
    return out, eqx.combine(arrays, static[-1])


def vjp(call, model, xs):
    y, vjp_fn = es.vjp(call, model, xs[0])
    grads, dx = vjp_fn(jnp.ones_like(y))
    return y, jax.tree.leaves(grads), dx


def vjp_by_hand(by_hand, model, xs):
    y, vjp_fn, new = eqx.filter_vjp(by_hand, model, xs[0], has_aux=True)
    grads, dx = vjp_fn(jnp.ones_like(y))
    return (y, jax.tree.leaves(grads), dx), new


def jvp(call, model, xs):
    dx = jnp.ones_like(xs[0])
    y, dy = es.jvp(lambda x: call(model, x), (xs[0],), (dx,))
    z, jvp_fn = es.linearize(lambda x: call(model, x), xs[1])
    return [y, dy], [z, jvp_fn(dx)]


def jvp_by_hand(by_hand, model, xs):
    def jvp(f, x):
        return jax.jvp(f, (x,), (jnp.ones_like(x),), has_aux=True)

    first, model = purely(by_hand, model, jvp, xs[0])
    second, model = purely(by_hand, model, jvp, xs[1])
    return (first, second), model


def hessian(call, model, xs):
    """`es.hessian`, which is `es.jacfwd` of `es.jacrev`."""
    return [es.hessian(lambda x: jnp.sum(jnp.sin(call(model, x))))(xs[0])]


def hessian_by_hand(by_hand, model, xs):
    def scalar(model, x):
        y, model = by_hand(model, x)
        return jnp.sum(jnp.sin(y)), model

    def transform(f, x):
        return jax.hessian(f, has_aux=True)(x)

    return purely(scalar, model, transform, xs[0])


def custom_vjp(call, model, xs):
    def f(model, x):
        return call(model, x)

    def fwd(model, x):
        # A copy that does not contain the writes below.
        before = es.map(lambda x: x, model, on=es.TreePart)
        return call(model, x), (before, x)

    def bwd(residuals, g):
        model, x = residuals
        return es.mutable(lambda m, x: es.vjp(call, m, x)[1](g))(model, x)[0]

    rule = es.custom_vjp(f)
    rule.defvjp(fwd, bwd)
    return rule(model, xs[0])


def custom_vjp_by_hand(by_hand, model, xs):
    return by_hand(model, xs[0])


MESH = jax.sharding.Mesh(jax.devices()[:2], "data")


def shard_map(call, model, xs):
    # JAX cannot check the types if a layer reduces over the lanes of a `vmap`.
    has_axis = any(getattr(m, "axis_name", None) for _, m in es.modules(model))
    f = es.shard_map(
        lambda x: call(model, x),
        mesh=MESH,
        in_specs=P(),
        out_specs=P(),
        axes={...: P()},
        check_vma=not has_axis,
    )
    return [f(x) for x in xs]


PROGRAMS = {
    "eager": (eager, eager_by_hand),
    "jit": (jit, eager_by_hand),
    "vmap": (vmap, lanes_by_hand),
    "vmap of an argument": (vmap_of_argument, lanes_by_hand),
    "scan": (scan, scan_by_hand),
    "scan of the carry": (scan_of_carry, scan_of_carry_by_hand),
    "checkpoint": (checkpoint, eager_by_hand),
    "switch": (switch, switch_by_hand),
    "while_loop": (while_loop, while_by_hand),
    "vjp": (vjp, vjp_by_hand),
    "jvp": (jvp, jvp_by_hand),
    "hessian": (hessian, hessian_by_hand),
    "custom_vjp": (custom_vjp, custom_vjp_by_hand),
    "shard_map": (shard_map, eager_by_hand),
}
# JAX has no reverse mode for `while_loop`. The gradients of the others compile slowly.
DERIVATIVES = {"vjp", "jvp", "hessian"}
WITHOUT = {"while_loop", "shard_map", *DERIVATIVES}


# --- Running programs and twins -----------------------------------------------------


def loss_of(value: Any) -> Any:
    leaves = filter(eqx.is_inexact_array, jax.tree.leaves(value))
    return sum(jnp.sum(jnp.sin(x)) for x in leaves)


@dataclasses.dataclass(frozen=True)
class Run:
    """One program for one model; a step returns `((loss, value), model), grads`."""

    case: Case
    program: str
    with_grads: bool

    def start(self) -> Any:
        model = self.case.model()
        return with_lanes(model, 2) if self.program.startswith("vmap") else model

    def inputs(self) -> list[Any]:
        """The inputs of two steps, or of one if the model is not written in place."""
        xs = self.case.inputs(2)
        steps = [xs.at[0].set(jnp.abs(xs[0])), xs.at[0].set(-jnp.abs(xs[0]))]
        return steps[:1] if self.program == "scan of the carry" else steps

    def in_place(self, model: Any, xs: Any) -> Any:
        def loss_fn(model: Any, xs: Any) -> Any:
            value = PROGRAMS[self.program][0](self.case.call, model, xs)
            return loss_of(value), value

        if not self.with_grads:
            return es.mutable(loss_fn)(model, xs), None
        return es.value_and_grad(loss_fn, has_aux=True)(model, xs)

    def by_hand(self, model: Any, xs: Any) -> Any:
        def loss_fn(diff: Any, rest: Any) -> Any:
            model = eqx.combine(diff, rest)
            value, model = PROGRAMS[self.program][1](self.case.by_hand, model, xs)
            loss = loss_of(value)
            return loss, ((loss, value), model)

        diff, rest = es.partition(model, es.trainable)
        if not self.with_grads:
            return loss_fn(diff, rest)[1], None
        grads, aux = eqx.filter_grad(loss_fn, has_aux=True)(diff, rest)
        return aux, grads


def check_equal(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    entries = jax.tree.leaves_with_path(actual)
    for (path, x), y in zip(entries, jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path)
        if not eqx.is_array(x):
            assert type(x) is type(y), where  # two `SharedNode`s are never equal
            continue
        assert (x.shape, x.dtype) == (y.shape, y.dtype), where
        if jnp.issubdtype(x.dtype, jnp.inexact):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4, err_msg=where)
        else:
            assert (x == y).all(), where


# All programs run under `jit`, except for `eager`, and compute gradients, except for
# those in `WITHOUT`.
RUNS = [(name, name != "eager", name not in WITHOUT) for name in PROGRAMS]


def is_misjudged(case: str, program: str) -> bool:
    """Whether JAX's check reports fresh keys as reused, also in plain JAX.

    It does so for keys that are taken from an array and stacked by hand, for keys of a
    branch that `vmap` runs although it is not taken, for keys that a second derivative
    recomputes, and for keys after a checkpointed scan.
    """
    return (
        case == "ensemble"
        or (case == "router" and ("vmap" in program or program == "vjp"))
        or (case, program) == ("sequence", "checkpoint")
        or program == "custom_vjp"  # its backward rule draws again
    )


@pytest.mark.parametrize(("program", "is_jitted", "with_grads"), RUNS)
@pytest.mark.parametrize("case", CASES)
def test_a_model_under_a_transform_equals_its_version_by_hand(
    case, program, is_jitted, with_grads, request
):
    if is_misjudged(case, program):
        request.getfixturevalue("_keys_may_be_reused")
    if program == "custom_vjp" and jax.config.jax_check_tracer_leaks:
        pytest.skip("a traced call keeps its rules, and they the modules")
    if case == "router" and program in DERIVATIVES and jax.__version_info__ < (0, 10):
        pytest.skip("with JAX < 0.10, the derivative of this branch does not compile")
    run = Run(CASES[case], program, with_grads and case not in WITHOUT_GRADS)
    step = run.in_place
    if is_jitted:
        step = es.jit(eqx.debug.assert_max_traces(step, max_traces=1))
    model, by_hand = run.start(), run.start()
    if program == "shard_map":
        # Replicate it first. Otherwise its sharding changes, and JAX retraces.
        model = eqx.filter_shard(model, jax.NamedSharding(MESH, P()))
    for xs in run.inputs():
        result, expected = step(model, xs), run.by_hand(by_hand, xs)
        check_equal(result, expected)
        model, by_hand = result[0][1], expected[0][1]


# These do not thread everything: a backward rule draws again, and drops that state; the
# model of a carry is not assigned. Of all others, a sixth, since each takes a trace.
DROPPING = {"custom_vjp", "scan of the carry"}
AUDITED = [
    (case, program)
    for k, case in enumerate(CASES)
    for j, program in enumerate(PROGRAMS)
    if (k + j) % 6 == 0 and program not in DROPPING
]


@pytest.mark.parametrize(("case", "program"), AUDITED)
def test_the_audit_of_a_program_that_threads_everything_is_quiet(case, program):
    run = Run(CASES[case], program, program not in WITHOUT)
    assert es.audit(es.jit(run.in_place))(run.start(), run.inputs()[0]) == []
