"""Programs that use random keys wrongly."""

import equinox as eqx
import jax
import jax.random as jr
from catalogue_entry import Draw, program, XS

import eqx_state as es


@program("draw from one key twice")
def _(case):
    class Wrong(Draw):
        def __call__(self, x):
            # A new shape, because JAX 0.8 does not check functions that are already
            # compiled.
            return x + jr.normal(self.rng, (5, *x.shape)).sum(0)

    with jax.debug_key_reuse(True):
        draw = case.keep(Draw(), XS)
        wrong = case.keep(Wrong(jr.key(1)))
        with case.error():
            es.mutable(lambda m: (m(XS), m(XS)))(wrong)
        (a, b), _ = es.mutable(lambda m: (m(XS), m(XS)))(draw.replace(rng=jr.key(2)))
    assert (a != b).any()


@program("draw from `self.rng` without advancing it")
def _(case):
    class Wrong(Draw):
        def __call__(self, x):
            return x + jr.normal(self.rng, x.shape)

    model = case.keep(Wrong(), XS)
    a, new = es.mutable(model)(XS)
    assert (es.mutable(new)(XS)[0] == a).all()


@program("make two layers with one key")
def _(case):
    models = case.keep(
        [Draw(), Draw()], call=es.mutable(lambda m: (m[0](XS), m[1](XS)))
    )
    draw = es.mutable(lambda ms: [m(XS) for m in ms])
    (a, b), _ = draw(models)
    (c, d), _ = draw(es.reseed(models, jr.key(5)))
    assert (a == b).all()
    assert (c != d).any()


@program(
    "call an `es.RngStream` in eval mode, without a scope",
    "is outside `es.mutable`",
    "key=self.keys() if self.training else None",
)
def _(case):
    class Noise(es.Module):
        drop: eqx.nn.Dropout
        keys: es.RngStream

        def __call__(self, x):
            return self.drop(x, key=self.keys())

    class Guarded(Noise):
        def __call__(self, x):
            return self.drop(x, key=self.keys() if self.training else None)

    noise = case.keep(Noise(eqx.nn.Dropout(0.5), es.RngStream(0)), XS)
    for wrong in (noise, noise.eval()):
        with case.error():
            wrong(XS)
    _, new = es.mutable(noise.eval())(XS)
    assert new.keys.key != noise.keys.key
    guarded = Guarded(noise.drop, noise.keys)
    assert (guarded.eval()(XS) == XS).all()
    assert (es.mutable(guarded)(XS)[0] != XS).any()


@program("draw from an `es.RngStream` in `__init__`", "split(key)", "RngStream(b)")
def _(case):
    class Net(es.Module):
        rngs: dict[str, es.RngStream]
        linear: eqx.nn.Linear

        def __init__(self):
            self.rngs = {"params": es.RngStream(0)}
            self.linear = eqx.nn.Linear(3, 3, key=self.rngs["params"]())

    class Split(Net):
        def __init__(self, key):
            a, b = jr.split(key)
            self.linear = eqx.nn.Linear(3, 3, key=a)
            self.rngs = {"dropout": es.RngStream(b)}

    with case.error():
        Net()
    case.keep(Split(jr.key(0)), call=es.mutable(lambda net: net.rngs["dropout"]()))


@program(
    "keep a legacy key (a `uint32` array) in a field without a kind",
    "Legacy.rng`",
    "`rng: es.Rng`",
)
def _(case):
    class Legacy(es.Module):
        rng: jax.Array
        __call__ = Draw.__call__

    model = case.keep(Legacy(jr.PRNGKey(0)))
    with case.error():
        es.mutable(model)(XS)
    assert es.mutable(Legacy(jr.key(0)))(XS)[1].rng != jr.key(0)


@program("seed with a float, or a string", "`jax.random.key(42)`, or `42`")
def _(case):
    model = case.keep(Draw(), XS)
    for seed in (0.5, "42", None):
        with case.error():
            es.RngStream(seed)
        with case.error():
            es.reseed(model, seed)


@program(
    "draw from a stream without a call: `jax.random.normal(self.keys)`", "RngStream"
)
def _(case):
    keys = case.keep(es.RngStream(0))
    with case.error():
        es.mutable(lambda keys: jr.normal(keys, (3,)))(keys)
