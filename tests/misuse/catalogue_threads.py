"""Programs that write to copies; in threads, generators and coroutines; and fail."""

import asyncio
import copy
import pickle
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from catalogue_entry import FROZEN, Layer, Net, Theme, XS

import eqx_state as es


COPIED = Theme("Copies, threads, generators")


COPYING = {
    "self.layer.train()(x)": lambda layer: layer.train(),
    "jax.tree.map(f, self.layer)(x)": lambda layer: jax.tree.map(lambda x: x, layer),
    "eqx.tree_at(where, self.layer, w)(x)": lambda layer: eqx.tree_at(
        lambda m: m.weight, layer, jnp.array(1.0)
    ),
    "copy.copy(self.layer)(x)": copy.copy,
    "copy.deepcopy(self.layer)(x)": copy.deepcopy,
    "pickle.loads(pickle.dumps(self.layer))(x)": lambda layer: pickle.loads(
        pickle.dumps(layer)
    ),
    "self.layer.replace(…)(x)": lambda layer: layer.replace(count=jnp.array(5)),
}
for name, make in COPYING.items():

    @COPIED.raises(
        f"write `{name}` in a call",
        FROZEN,
        "or it is a copy made inside the scope",
        "`Layer.count`",
        "switch modes outside",
        instead="assign it first: `self.layer = …`; or `.eval()`, to write nothing",
    )
    def _(case, make=make):
        net = case.keep(Net(), XS)

        def assign(net):
            net.layer = make(net.layer).replace(weight=net.layer.weight)
            return net.layer(XS)

        with case.error():
            es.mutable(lambda net: make(net.layer)(XS))(net)
        before = make(net.layer).count
        assert es.mutable(assign)(net)[1].layer.count == before + 1


@COPIED.raises(
    "keep a module from inside, and call it later",
    FROZEN,
    "that owned this module has closed",
    "`Layer.count`",
    "y, model = es.mutable(model)(x)",
    instead="the model that the call returns",
)
def _(case):
    net, kept = case.keep(Net(), XS), []
    es.mutable(lambda net: kept.extend([net, net.layer.__call__]))(net)
    for f in kept:
        with case.error():
            f(XS)
    jitted = []
    with jax.check_tracer_leaks(False):  # what is kept leaks, on purpose
        es.jit(es.mutable(lambda net: jitted.append(net)))(net)
    with case.error():
        jitted[0].layer.count = 1


@COPIED.works(
    "return `self`, or a layer, from a call",
    "the result is an ordinary frozen module with the state at that moment",
)
def _(case):
    net = case.keep(Net(), XS)
    (before, _, after), new = es.mutable(
        lambda net: (copy.copy(net.layer), net(XS), net)
    )(net)
    assert (before.count, after.layer.count, new.layer.count) == (0, 1, 1)
    assert es.mutable(after)(XS)[1].layer.count == 2


@COPIED.raises(
    "write in a generator that is run after the call",
    FROZEN,
    "that owned this module has closed",
    "in a closure, a generator, a thread",
    instead="run it inside: `es.mutable(lambda m, xs: list(m.stream(xs)))(model, xs)`",
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


@COPIED.raises(
    "write in an `async` function that is awaited after the call",
    FROZEN,
    "that owned this module has closed",
    instead="`y, model = es.mutable(model)(await x)` in the `async` function",
)
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
    """What `f` returns, or the error that it raises, in a thread of its own."""
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


@COPIED.works(
    "write in another thread while the call runs",
    "the write is kept if the call waits for the thread",
)
def _(case):
    net = case.keep(Net(), XS)
    y, new = es.mutable(lambda net: in_thread(net, XS))(net)
    assert (y == 2 * XS).all()
    assert new.layer.count == 1


@COPIED.raises(
    "use a module in another thread while a transform of `es` runs",
    RuntimeError,
    "Two threads are in one scope of `es.mutable`",
    "give each thread a scope of its own",
    instead="wait for the thread before the transform; or one `es.mutable` in each",
)
def _(case):
    net = case.keep(Net(), XS)

    def write(net):
        net.mean = XS

    def start(net):
        return es.checkpoint(lambda: net.layer.weight)()

    transforms = {
        "jit": lambda f: es.jit(f)(XS),
        "vmap": lambda f: es.vmap(f)(XS),
        "scan": lambda f: es.scan(lambda c, x: (c, f(x)), None, XS),
    }
    for transform in transforms.values():
        for use in (write, start, lambda net: net.layer.weight):
            with case.error():
                es.mutable(
                    lambda net, use=use, transform=transform: transform(
                        lambda x: in_thread(use, net)
                    )
                )(net)
    new = es.mutable(lambda net: (in_thread(write, net), start(net)))(net)[1]
    assert (new.mean == XS).all()


@COPIED.raises(
    "write in another thread under `jit`",
    es.TraceError,
    "this code runs inside a JAX transform",
    "`Layer.count`",
    instead="start threads outside, one `es.mutable` in each",
)
def _(case):
    net = case.keep(Net(), XS)

    def write(net):
        net.layer.count = 5

    for jit in (jax.jit, eqx.filter_jit, es.jit):
        with case.error():
            jit(lambda net: es.mutable(lambda net: in_thread(write, net))(net))(net)
    assert in_thread(es.mutable(net), XS)[1].layer.count == 1


@COPIED.raises(
    "compute in another thread under `jit`",
    jax.errors.UnexpectedTracerError,
    "Encountered an unexpected tracer",
    instead="start threads outside, one `es.mutable` in each",
)
def _(case):
    net = case.keep(Net(), XS)
    with case.error():
        es.jit(es.mutable(lambda net: in_thread(net, XS)))(net)


@COPIED.raises(
    "write in another thread after the call",
    FROZEN,
    "that owned this module has closed",
    "in a closure, a generator, a thread",
    instead="wait for the thread in the call",
)
def _(case):
    net, kept = case.keep(Net(), XS), []
    es.mutable(kept.append)(net)
    with case.error():
        in_thread(kept[0], XS)


@COPIED.works(
    "thread one model in many threads at once",
    "each works on its own private copy",
)
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


@COPIED.works(
    "raise an exception after some state was written",
    "the exception propagates, and the model is unchanged",
)
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


@COPIED.works(
    "catch an exception from `es.vmap` or `es.scan` in a call",
    "the writes of the failed transform are dropped, earlier ones are kept",
)
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
