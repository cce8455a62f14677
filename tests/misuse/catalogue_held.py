"""Programs that use a held step in an invalid place or way."""

import copy

import equinox as eqx
import jax
import jax.numpy as jnp
from catalogue_entry import Layer, program, XS

import eqx_state as es


def step(layer, x):
    return layer, layer(x)


@program(
    "hold a step that takes `(model, optimizer, x)`: "
    "`es.hold(step, (model, optimizer))`",
    "missing 1 required positional argument: 'x'",
    "return (model, optimizer), loss",
)
def _(case):
    def step(model, optimizer, x):
        return model(x), model, optimizer

    carry = case.keep(Layer(), call=lambda layer: es.mutable(layer)(XS)), XS
    for f in (step, es.jit(step)):
        run = es.hold(f, carry)
        with case.error():
            run(XS)
        assert eqx.tree_equal(run.carry, carry)


@program("use a held step inside `es.mutable`")
def _(case):
    layer = case.keep(Layer(), call=lambda layer: es.mutable(layer)(XS))
    run = es.hold(step, layer)
    with case.error():
        es.mutable(lambda layer, x: run(x))(layer, XS)
    uses = (
        lambda layer: es.hold(step, layer)(XS),
        lambda layer: run.carry,
        lambda layer: setattr(run, "carry", layer),
    )
    for use in uses:
        with case.error():
            es.mutable(use)(layer)
    assert (run(XS) == 2 * XS).all()
    assert run.carry.count == 1


@program("use a held step inside `jax.jit`, `jax.vmap`, `es.scan`", "step(carry, x)")
def _(case):
    layer = case.keep(Layer(), call=lambda layer: es.mutable(layer)(XS))
    run = es.hold(step, layer)
    carry, new = lambda x: run.carry, lambda x: es.hold(step, x)
    for use in (jax.jit(run.__call__), jax.vmap(carry), es.jit(run), jax.jit(new)):
        with case.error():
            use(XS)
    with case.error():
        es.scan(lambda n, x: (n, run(x)), 0, XS)
    assert run.carry.count == 0


@program("use a held step in its own function")
def _(case):
    layer = case.keep(Layer(), call=lambda layer: es.mutable(layer)(XS))
    run = es.hold(lambda layer, x: (run(x) if len(x) == 2 else run.carry, x), layer)
    for x in (XS, XS[:2]):
        with case.error():
            run(x)
        with case.error(), jax.disable_jit():
            run(x)
    assert run.carry.count == 0


@program("return a carry in a different mode or structure", "run.carry = ")
def _(case):
    layer = case.keep(Layer(), call=lambda layer: es.mutable(layer)(XS))
    for wrong in (lambda m: m.eval(), lambda m: (m, m.count), lambda m: m.weight):
        run = es.hold(lambda m, x, wrong=wrong: (wrong(m), m(x)), layer)
        with case.error():
            run(XS)
        assert run.carry.count == 0


@program(
    "return a carry with a different shape or dtype",
    "only the values of arrays may change",
)
def _(case):
    total = {"sum": jnp.zeros(()), "n": jnp.zeros((), jnp.int32)}
    for wrong in (XS, jnp.zeros((), jnp.float16), "a"):
        run = es.hold(lambda c, wrong=wrong: ({**c, "sum": wrong}, 0), total)
        with case.error("changed `['sum']` in its carry from `f32[]` to `"):
            run()
        assert run.carry["sum"] == 0


@program("go on with a donated carry after a run that failed", "`donate=True`")
def _(case):
    def check(x, y):
        return eqx.error_if(x, y < 0, "negative") + y, y

    with jax.check_tracer_leaks(False):
        for donate in (True, False):
            run = es.hold(check, XS, donate=donate)
            run(jnp.ones(()))
            try:
                run(-jnp.ones(()))
            except eqx.EquinoxRuntimeError:
                pass
            if donate:
                with case.error():
                    run(jnp.ones(()))
                with case.error():
                    _ = run.carry
                run.carry = XS + 1
            assert (run.carry == XS + 1).all()


@program("hold a `jax.ShapeDtypeStruct`", "`weight`")
def _(case):
    like = eqx.filter_eval_shape(lambda: Layer(weight=jnp.array(2.0)))
    with case.error():
        es.hold(step, like)


@program("copy or pickle a held step", "`run.carry`")
def _(case):
    run = es.hold(step, Layer())
    with case.error():
        copy.deepcopy(run)
