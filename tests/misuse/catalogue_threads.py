"""Programs that write to copies, in threads, generators and coroutines, or raise."""

import asyncio
import copy
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from catalogue_entry import Layer, Net, program, XS

import eqx_state as es


COPYING = {
    "self.layer.train()(x)": lambda layer: layer.train(),
    "jax.tree.map(f, self.layer)(x)": lambda layer: jax.tree.map(lambda x: x, layer),
    "eqx.tree_at(where, self.layer, w)(x)": lambda layer: eqx.tree_at(
        lambda m: m.weight, layer, jnp.array(1.0)
    ),
    "copy.copy(self.layer)(x)": copy.copy,
    "self.layer.replace(…)(x)": lambda layer: layer.replace(count=jnp.array(5)),
}
for name, make in COPYING.items():

    @program(f"write `{name}` in a call", "`Layer.count`", "Give the copy an")
    def _(case, make=make):
        net = case.keep(Net(), XS)

        def assign(net):
            net.layer = make(net.layer).replace(weight=net.layer.weight)
            return net.layer(XS)

        with case.error():
            es.mutable(lambda net: make(net.layer)(XS))(net)
        before = make(net.layer).count
        assert es.mutable(assign)(net)[1].layer.count == before + 1


@program(
    "store a module during a call, and call it after the call has ended",
    "`Layer.count`",
    "y, model = es.mutable(model)(x)",
)
def _(case):
    net, kept = case.keep(Net(), XS), []
    es.mutable(lambda net: kept.extend([net, net.layer.__call__]))(net)
    for f in kept:
        with case.error():
            f(XS)
    jitted = []
    with jax.check_tracer_leaks(False):  # the kept module leaks, on purpose
        es.jit(es.mutable(lambda net: jitted.append(net)))(net)
    with case.error():
        jitted[0].layer.count = 1


@program(
    "write in a generator that is run after the call",
)
def _(case):
    class Streamed(Layer):
        def stream(self, xs):
            for x in xs:
                yield self(x)

    model = case.keep(Streamed(), XS)
    ys, new = es.mutable(model.stream)(XS)
    with case.error():
        next(ys)
    ys, new = es.mutable(lambda m, xs: list(m.stream(xs)))(model, XS)
    assert (new.count, len(ys)) == (3, 3)


@program("write in an `async` function that is awaited after the call")
def _(case):
    class Awaited(Layer):
        async def serve(self, x):
            await asyncio.sleep(0)
            return self(x)

    async def serve(model):
        await asyncio.sleep(0)
        return es.mutable(model)(XS)

    model = case.keep(Awaited(), XS)
    y, _ = es.mutable(model.serve)(XS)
    with case.error():
        asyncio.run(y)
    assert asyncio.run(serve(model))[1].count == 1


def in_thread(f, *args):
    """Call `f` in a new thread; return its result, or raise its error."""
    out = []

    def run():
        try:
            out.append(f(*args))
        except Exception as e:
            out.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(out[0], Exception):
        raise out[0]
    return out[0]


@program("write in a second thread while the call runs")
def _(case):
    net = case.keep(Net(), XS)
    with case.error("Open a scope in each thread"):
        es.mutable(lambda net: in_thread(net, XS))(net)
    with case.error():
        es.mutable(lambda net: in_thread(es.checkpoint(lambda: net.mean)))(net)


@program("call one model in many threads at once")
def _(case):
    net, results = case.keep(Net(), XS), []

    def run():
        results.append(es.mutable(net)(XS))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(eqx.tree_equal(r, es.mutable(net)(XS)) for r in results)
    assert len(results) == 4


@program("raise an exception after some state was written")
def _(case):
    net, kept = case.keep(Net(), XS), []

    def f(net):
        net(XS)
        kept.append(net)
        raise KeyboardInterrupt("half-way")

    for run in (es.mutable(f), es.jit(es.mutable(f)), es.value_and_grad(f)):
        with pytest.raises(KeyboardInterrupt, match="half-way"):
            run(net)
    assert kept[0].layer.count == 1


@program("catch an exception from `es.vmap` or `es.scan` in a call")
def _(case):
    net = case.keep(Net(), XS)

    def lane(net, x):
        net.layer(x)
        raise KeyError("in a lane")

    def f(net):
        net.layer(XS)
        for run in (
            lambda: es.vmap(lambda x: lane(net, x))(XS),
            lambda: es.scan(lambda c, x: (c, lane(net, x)), None, XS),
            lambda: es.jit(lambda x: lane(net, x))(XS),
        ):
            try:
                run()
            except KeyError:
                continue
            raise AssertionError("no exception")
        return net.layer(XS)

    y, new = es.mutable(f)(net)
    assert (y == 2 * XS).all()
    assert new.layer.count == 2
