"""`es.custom_vjp`: that of JAX, for functions of modules that write state."""

import dataclasses
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, rejects, reuses_keys

import eqx_state as es


# The same model, with its keys, is called in several ways. The zoo has the check.
pytestmark = reuses_keys

FROZEN = dataclasses.FrozenInstanceError


# A traced call keeps its rules, and they keep the modules of the call, which hold
# values of the trace. They are freed together with the program.
kept_by_jax = pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks,
    reason="JAX keeps the rules, and they the modules",
)


def no_rule(*args):
    raise AssertionError("not differentiated")


# --- As in JAX ------------------------------------------------------------------------


def make(module, f, fwd, bwd, **options):
    rule = module.custom_vjp(f, **options)
    rule.defvjp(fwd, bwd)
    return rule


def scaled(d, x, *, by=1.0):
    return d["a"] * x * by


CASES = {
    "an array": (
        dict(f=jnp.sin, fwd=lambda x: (jnp.sin(x), x), bwd=lambda x, g: (5 * g * x,)),
        (2.0,),
        {},
    ),
    "a dict, and zero": (
        dict(
            f=lambda d, x: d["a"] * x,
            fwd=lambda d, x: (d["a"] * x, (d, x)),
            bwd=lambda r, g: ({"a": 7 * g, "b": None}, None),
        ),
        ({"a": 2.0, "b": (3.0, 4.0)}, 5.0),
        {},
    ),
    "a list for a tuple": (
        dict(f=lambda x: x, fwd=lambda x: (x, None), bwd=lambda _, g: [3 * g]),
        (2.0,),
        {},
    ),
    "integers": (
        dict(
            f=lambda x, n: x**n,
            fwd=lambda x, n: (x**n, n),
            bwd=lambda n, g: (2 * g, np.zeros((), jax.dtypes.float0)),
        ),
        (2.0, jnp.array(3)),
        {},
    ),
    "static arguments": (
        dict(
            f=lambda f, x, n: f(x) * n,
            fwd=lambda f, x, n: (f(x) * n, x),
            bwd=lambda f, n, x, g: (g * f(x) * n,),
            nondiff_argnums=(0, 2),
        ),
        (jnp.cos, 2.0, 3),
        {},
    ),
    "static names": (
        dict(
            f=lambda x, n: x * n,
            fwd=lambda x, n: (x * n, x),
            bwd=lambda n, x, g: (g * n,),
            nondiff_argnames=("n",),
        ),
        (2.0, 3),
        {},
    ),
    "by name, and a default": (
        dict(
            f=lambda x, y=2.0, z=3.0: x * y * z,
            fwd=lambda x, y, z: (x * y * z, None),
            bwd=lambda _, g: (g, 2 * g, 3 * g),
        ),
        (2.0,),
        {"z": 4.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_on_arrays_it_is_that_of_jax(name):
    options, args, kwargs = CASES[name]
    ours, theirs = (make(m, **options) for m in (es, jax))
    close(ours(*args, **kwargs), theirs(*args, **kwargs))
    place = 1 if callable(args[0]) else 0
    for transform in (lambda f: f, jax.jit):
        results = []
        for f in (ours, theirs):

            def loss(x, f=f):
                given = [*args]
                given[place] = x
                return jnp.sum(jnp.asarray(f(*given, **kwargs)))

            results.append(transform(jax.value_and_grad(loss))(args[place]))
        close(*results)


def test_the_signature_is_that_of_jax():
    ours, theirs = (
        {p.name: (p.kind, p.default) for p in inspect.signature(f).parameters.values()}
        for f in (es.custom_vjp, jax.custom_vjp)
    )
    assert ours == theirs


def test_one_static_argument_need_not_be_in_a_tuple():
    f = es.custom_vjp(lambda x, name: x, nondiff_argnums=-1)
    f.defvjp(lambda x, name: (x, None), lambda name, _, g: (len(name) * g,))
    assert jax.grad(f)(1.0, "abc") == 3.0


def test_static_arguments_that_are_not_there():
    with pytest.raises(ValueError, match="`y`, and the arguments are x, z"):
        es.custom_vjp(lambda x, z: x, nondiff_argnames="y")
    with pytest.raises(ValueError, match="names argument 2, and there are 1 arg"):
        make(es, lambda x: x, no_rule, no_rule, nondiff_argnums=2)(1.0)


def test_a_static_name_may_be_a_string():
    f = es.custom_vjp(lambda x, name: x, nondiff_argnames="name")
    f.defvjp(lambda x, name: (x, None), lambda name, _, g: (len(name) * g,))
    assert jax.grad(f)(1.0, "abc") == 3.0


def test_forward_mode_is_the_error_of_jax():
    f = make(es, **CASES["an array"][0])
    with pytest.raises(TypeError, match=r"can't apply forward-mode"):
        es.jvp(f, (1.0,), (1.0,))


def test_defvjp_returns_the_function():
    f = es.custom_vjp(jnp.sin).defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    assert jax.grad(f)(0.0) == 2.0
    assert f.__name__ == "sin"


# --- State ----------------------------------------------------------------------------


class Layer(es.Module):
    weight: es.Parameter = 3.0
    plain: es.State = 0  # how often the function ran
    ruled: es.State = 0  # how often the forward rule did
    mean: es.BatchStat = 0.0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))
    name: str = eqx.field(static=True, default="layer")

    @es.custom_vjp
    def __call__(self, x):
        self.plain = self.plain + 1
        self.mean = self.mean + x
        self.rng, key = jr.split(self.rng)
        self.sow("seen", x)
        return self.weight * x * jr.uniform(key)

    def _fwd(self, x):
        self.ruled = self.ruled + 1
        self.mean = jax.lax.stop_gradient(self.mean + 2 * x)
        self.rng, key = jr.split(self.rng)
        self.sow("seen", 2 * x)
        return self.weight * x * jr.uniform(key), (self, x)

    def _bwd(residuals, g):
        self, x = residuals
        assert self.name == "layer"
        grads = jax.tree.map(lambda _: None, self).replace(weight=10 * g * x)
        return grads, 20 * g * self.weight

    __call__.defvjp(_fwd, _bwd)


def direct(layer, x):
    return layer(x)


def jitted(layer, x):
    return es.jit(lambda x: layer(x))(x)


def scanned(layer, x):
    return es.scan(lambda c, x: (c, layer(x)), 0, x[None])[1][0]


def checkpointed(layer, x):
    return es.checkpoint(layer)(x)


def branched(layer, x):
    return es.cond(x > -9, layer, lambda x: -layer(x), x)


def by_vjp(layer, x):
    return es.vjp(layer, x)[0]


def by_filter_jit(layer, x):
    return eqx.filter_jit(jnp.sin)(x) * 0 + layer(x)


WAYS = [direct, jitted, scanned, checkpointed, branched, by_vjp, by_filter_jit]
X = jnp.array(2.0)


@kept_by_jax
@pytest.mark.parametrize("way", WAYS)
def test_the_state_of_the_function_that_ran_counts(way):
    draw = float(jr.uniform(jr.split(jr.key(0))[1]))
    if way is not by_vjp:
        out, new = es.mutable(way)(Layer(), X)
        close(out, jnp.array(6.0 * draw))
        assert (new.plain, new.ruled, new.mean) == (1, 0, 2.0)
    for jit in (lambda f: f, es.jit):
        (out, new), grads = jit(es.value_and_grad(way))(Layer(), X)
        close(out, jnp.array(6.0 * draw))
        assert (new.plain, new.ruled, new.mean) == (0, 1, 4.0)
        # Of two derivatives the inner one has the rule, as in JAX.
        assert way is by_vjp or grads.weight == 20.0
        assert new.rng == jr.split(jr.key(0))[0]


@kept_by_jax
def test_lanes_carry_state_and_keys():
    def loss(layer, xs):
        return es.vmap(lambda x: layer(x), axes={es.State: 0, es.Rng: es.SPLIT})(
            xs
        ).sum()

    layer = Layer(plain=jnp.zeros(2, int), ruled=jnp.zeros(2, int), mean=jnp.zeros(2))
    (_, new), grads = es.value_and_grad(loss)(layer, jnp.array([1.0, 2.0]))
    close((new.ruled, new.plain), (jnp.ones(2, int), jnp.zeros(2, int)))
    close((new.mean, grads.weight), (jnp.array([2.0, 4.0]), jnp.array(30.0)))
    assert new.rng != layer.rng


@kept_by_jax
def test_a_key_that_nothing_draws_from_stays():
    @es.custom_vjp
    def scale(layer, x):
        return layer.weight * x

    scale.defvjp(lambda layer, x: (layer.weight * x, layer), lambda layer, g: (None, g))
    layer = Layer()
    for f in (lambda layer, xs: es.vmap(lambda x: scale(layer, x))(xs), scale):
        _, new = es.jit(es.mutable(f))(layer, jnp.ones(2))
        close(new, layer)
        (_, new), _ = es.value_and_grad(lambda m, x, f=f: f(m, x).sum())(layer, X[None])
        close(new, layer)


def test_both_arguments_and_the_state_have_their_cotangents():
    def f(layer, x):
        out, vjp_fn = es.vjp(lambda layer, x: layer(x), layer, x)
        return vjp_fn(1.0)

    (grads, by_x), new = es.mutable(f)(Layer(), X)
    assert (grads.weight, by_x, grads.plain, new.ruled) == (20.0, 60.0, None, 1)


@kept_by_jax
def test_a_gradient_through_state_that_the_rule_does_not_write_flows():
    class Mean(es.Module):
        mean: es.BatchStat = 1.0

        @es.custom_vjp
        def __call__(self, x):
            self.mean = self.mean + x
            return x

        def _fwd(self, x):
            return x, None

        __call__.defvjp(_fwd, lambda _, g: (Mean(5 * g), g))

    def f(model, x, jit):
        def g(model):
            y = jit(lambda x: model(x))(x)
            return y, 3.0 * model.mean

        (_, mean), vjp_fn = es.vjp(g, model)
        return mean, vjp_fn((0.0, 1.0))[0].mean, vjp_fn((1.0, 0.0))[0].mean

    for jit in (lambda f: f, es.jit):
        assert es.mutable(f)(Mean(), X, jit)[0] == (3.0, 3.0, 5.0)
        assert es.mutable(lambda m, j=jit: (j(m)(X), m.mean))(Mean())[0][1] == 3.0


class Raw(Layer):
    @es.custom_vjp
    def __call__(self, x):
        return self.weight * x

    def _fwd(self, x):
        self.mean = self.mean + x
        return self.weight * x, x

    def _bwd(x, g):
        return None, g

    __call__.defvjp(_fwd, _bwd)


class Foreign(Raw):
    @es.custom_vjp
    def __call__(self, x):
        return self.weight * x

    def _fwd(self, x):
        shape = jax.ShapeDtypeStruct((), "float32")
        self.mean = jax.pure_callback(lambda x: np.asarray(x), shape, self.mean + x)
        return self.weight * x, None

    __call__.defvjp(_fwd, Raw._bwd)


@pytest.mark.parametrize("cls", [Raw, Foreign])
def test_a_gradient_through_state_that_it_writes_is_an_error(cls):
    def loss(net, x):
        return net["layer"](x) + net["layer"].mean

    net = {"layer": cls()}
    for way in (es.value_and_grad(loss), es.jit(es.value_and_grad(loss))):
        with rejects(net, es.TraceError, r"flows through `\['layer'\].mean`",
                     "self.mean = jax.lax.stop_gradient"):  # fmt: skip
            way(net, X)
    # Where nothing flows, there is nothing to lose.
    (_, new), grads = es.value_and_grad(lambda m, x: m(x))(cls(), X)
    assert (new.mean, grads.weight) == (2.0, 0.0)
    (_, new), _ = es.value_and_grad(lambda m, x: m(x) + jax.lax.stop_gradient(m.mean))(
        cls(), X
    )
    assert new.mean == 2.0


def test_state_without_a_gradient_is_told_from_state_that_has_one():
    class Both(Raw):
        kept: es.State = 0.0

        @es.custom_vjp
        def __call__(self, x):
            return self.weight * x

        def _fwd(self, x):
            self.kept = jax.lax.stop_gradient(self.kept + x)
            self.mean = self.mean + x
            return self.weight * x, x

        __call__.defvjp(_fwd, Raw._bwd)

    (_, new), grads = es.value_and_grad(lambda m, x: m(x) + m.kept)(Both(), X)
    assert (new.kept, new.mean, grads.weight) == (2.0, 2.0, 0.0)
    with rejects(Both(), es.TraceError, "flows through `mean`"):
        es.value_and_grad(lambda m, x: m(x) + m.kept + m.mean)(Both(), X)


def test_the_forward_rule_is_traced_only_where_it_may_be_needed():
    traces = []

    def fwd(layer, x):
        traces.append(1)
        return layer.weight * x, None

    f = make(es, lambda layer, x: layer.weight * x, fwd, lambda _, g: (None, g))
    assert es.mutable(f)(Layer(), X)[0] == 6.0
    assert traces == []  # nobody differentiates
    assert es.value_and_grad(f)(Layer(), X)[0][0] == 6.0
    assert len(traces) == 1


@kept_by_jax
def test_in_a_loop_it_takes_an_explicit_stop_gradient():
    def loss(layer, xs):
        return es.scan(lambda c, x: (c, layer(x)), 0, xs)[1].sum()

    with rejects(Raw(), es.TraceError, "flows through `mean`", "in a loop"):
        es.value_and_grad(loss)(Raw(), X[None])
    (_, new), _ = es.value_and_grad(loss)(Layer(), X[None])
    assert new.mean == 4.0


@kept_by_jax
def test_what_is_sown_comes_out_of_the_function_that_ran():
    _, sown = es.capture(Layer())(X)
    assert sown == {"seen": 2.0}
    for f in (direct, scanned):
        grad = es.capture(es.value_and_grad(f))
        _, sown = grad(Layer(), X)
        close(jnp.ravel(sown["seen"]), jnp.array([4.0]))


@kept_by_jax
def test_init_runs_through_it():
    class Lazy(es.Module):
        weight: es.Parameter | None = None

        @es.custom_vjp
        def __call__(self, x):
            if self.weight is None:
                self.weight = jnp.full(x.shape, 2.0)
            return self.weight * x

        __call__.defvjp(no_rule, no_rule)

    model = Lazy().init(0, jnp.ones(3))
    close(model.weight, jnp.full(3, 2.0))
    close(es.jit(es.mutable(model))(jnp.ones(3))[0], model.weight)


class Stacked(es.Module):
    """Under two decorators, in either order."""

    weight: es.Parameter = 2.0
    count: es.State = 0

    @es.vmap
    @es.custom_vjp
    def outside(self, x):
        self.count = self.count + 1
        return self.weight * x

    @es.custom_vjp
    @es.vmap
    def inside(self, x):
        self.count = self.count + 1
        return self.weight * x

    def _fwd(self, x):
        self.count = self.count + 10
        return self.weight * x, None

    def _bwd(_, g):
        return None, 5 * g

    outside.f.defvjp(_fwd, _bwd)
    inside.defvjp(es.vmap(_fwd, in_axes=(None, 0), out_axes=(0, None)), _bwd)


@kept_by_jax
@pytest.mark.parametrize("name", ["outside", "inside"])
def test_it_may_be_one_of_several_decorators(name):
    def loss(model, xs):
        return jnp.sum(getattr(model, name)(xs))

    xs = jnp.array([1.0, 2.0])
    assert es.mutable(loss)(Stacked(), xs)[1].count == 1
    if name == "outside":
        (_, by_x), (model, _) = es.grad(loss, argnums=(0, 1))(Stacked(), xs)
        close((by_x, model.count), (jnp.full(2, 5.0), jnp.array(10)))
    assert getattr(Stacked, name).__name__ == name


def test_outside_a_scope_it_works_as_long_as_nothing_is_written():
    f = es.custom_vjp(lambda m, x: m.weight * x)
    f.defvjp(lambda m, x: (m.weight * x, m), lambda m, g: (m, 7 * g))
    assert jax.grad(lambda x: f(Layer(), x))(2.0) == 7.0
    grads = eqx.filter_grad(f)(Layer(weight=4.0), 1.0)
    assert (grads.weight, grads.mean) == (4.0, 0.0)
    with rejects(Layer(), FROZEN, r"Layer\.plain"):
        Layer()(X)


# --- Errors ---------------------------------------------------------------------------


def closes(which):
    """A call in which one function has the layer from outside."""

    def run(layer, x):
        f, fwd, bwd = lambda x: 2 * x, lambda x: (2 * x, None), lambda _, g: (g,)
        rules = {"f": f, "fwd": fwd, "bwd": bwd}
        rule = rules[which]
        rules[which] = lambda *args: (layer, rule(*args))[1]
        return make(es, **rules)(x)

    return run


CLOSING = {
    **{name: closes(name) for name in ("f", "fwd", "bwd")},
    "itself": lambda layer, x: make(es, layer, no_rule, no_rule)(x),
    "method": lambda layer, x: make(es, layer.__call__, no_rule, no_rule)(x),
    "static": lambda layer, x: make(
        es, lambda layer, x: x, no_rule, no_rule, nondiff_argnums=(0,)
    )(layer, x),
}


@pytest.mark.parametrize("name", CLOSING)
def test_a_module_that_is_only_closed_over_is_to_be_passed(name):
    run = CLOSING[name]
    for call in (es.mutable(run), run, es.jit(es.mutable(run))):
        with rejects(Layer(), ValueError, "has a `Layer` from outside", "Pass it"):
            call(Layer(), X)


def test_a_module_that_is_also_passed_may_be_closed_over():
    def run(net, x):
        f = make(
            es,
            lambda net, x: net["a"].weight * x,
            lambda net, x: (net["a"].weight * x, x),
            lambda x, g: (None, net["a"].weight * g),
        )
        return f(net, x)

    assert jax.grad(lambda x: es.mutable(run)({"a": Layer()}, x)[0])(2.0) == 3.0
    # A module without arrays has no gradient to lose.
    relu = eqx.nn.Lambda(jax.nn.relu)
    f = make(es, lambda x: relu(x), lambda x: (relu(x), None), lambda _, g: (2 * g,))
    assert jax.grad(f)(-1.0) == 2.0


@pytest.mark.parametrize("outer", [lambda f: f, es.jit], ids=["eager", "jit"])
def test_the_backward_rule_is_given_copies_that_it_cannot_write(outer):
    def bwd(layer, g):
        layer.plain = 3
        return None, g

    def fwd(layer, x):
        return layer.weight * x, layer

    def run(layer, x):
        rule = make(es, lambda layer, x: layer.weight * x, fwd, bwd)
        return es.vjp(lambda x: rule(layer, x), x)[1](1.0)

    for call in (run, es.mutable(run)):
        with rejects(Layer(), FROZEN, r"Cannot write `Layer\.plain`"):
            outer(call)(Layer(), X)


def test_a_scope_that_the_backward_rule_opens_is_its_own():
    def bwd(layer, g):
        _, new = es.mutable(lambda layer: setattr(layer, "plain", 3))(layer)
        return None, new.plain.astype(g.dtype)

    rule = make(es, lambda n, x: x, lambda layer, x: (x, layer), bwd)
    assert jax.grad(rule, 1)(Layer(), 1.0) == 3.0

    def wrong(layer, g):
        es.mutable(lambda _: setattr(layer, "plain", 3))(layer)

    rule = make(es, lambda n, x: x, lambda layer, x: (x, layer), wrong)
    with pytest.raises(FROZEN, match="has the original from outside"):
        jax.grad(rule, 1)(Layer(), 1.0)


def test_rules_are_called_as_jax_calls_them():
    def rule(f=lambda x, y: x, fwd=lambda x, y: (x, y), bwd=lambda r, g: (g, g), **how):
        return make(es, f, fwd, bwd, **how)

    match = "forward rule of `<lambda>` is called with the arguments of the function"
    with pytest.raises(TypeError, match=f"{match}.*: missing a required argument: 'z'"):
        rule(fwd=lambda x, y, z: None)(1.0, 2.0)
    match = (
        "backward rule of `<lambda>` is called with .*nondiff.*: too many positional"
    )
    with pytest.raises(TypeError, match=match):
        rule(bwd=lambda r, g: g, nondiff_argnums=1)(1.0, 2.0)
    assert rule(bwd=lambda *args: None)(1.0, 2.0) == 1.0


def test_a_cotangent_is_of_the_type_of_its_argument():
    def rule(cotangent):
        return make(
            es, lambda d: d["a"], lambda d: (d["a"], 0), lambda _, g: (cotangent,)
        )

    given = {"a": jnp.ones(2), "n": jnp.array(1)}
    loss = lambda f: jax.grad(lambda a: f({**given, "a": a}).sum())(given["a"])  # noqa: E731
    for wrong in (jnp.ones(3), jnp.ones(2, jnp.bfloat16)):
        match = r"argument 0 is `b?f.*` at `\['a'\]`, where the argument is `f32\[2\]`"
        with pytest.raises(ValueError, match=match):
            loss(rule({"a": wrong, "n": None}))
    for right in (np.ones(2), np.ones(2, np.float32)):
        assert loss(rule({"a": right, "n": None})).tolist() == [1.0, 1.0]
    f = make(es, lambda x: x, lambda x: (x, 0), lambda _, g: (jnp.ones(3),))
    with pytest.raises(ValueError, match=r"argument 0 is `f32\[3\]`, where"):
        jax.grad(lambda x: f(x).sum())(X * jnp.ones(2))


def sowing(name):
    class Sower(es.Module):
        weight: es.Parameter = 2.0

        @es.custom_vjp
        def __call__(self, x):
            self.sow("a", x)
            return self.weight * x, "word"

        def _fwd(self, x):
            self.sow(name, x)
            return (self.weight * x, name), None

        __call__.defvjp(_fwd, lambda _, g: (None, g[0]))

    return Sower()


@kept_by_jax
def test_other_values_in_the_rule_than_in_the_function_are_an_error():
    def loss(model, x):
        return es.scan(lambda c, x: (c, model(x)[0]), 0, x[None])[1].sum()

    with pytest.raises(
        ValueError, match=r"`[ab]` was sown in the function of an `es.c"
    ):
        es.capture(es.value_and_grad(loss))(sowing("b"), X)
    with pytest.raises(TypeError, match=r"return different values at `\[1\]`"):
        es.value_and_grad(loss)(sowing("a"), X)
    assert es.value_and_grad(lambda m, x: m(x)[0])(sowing("b"), X)[0][0] == 4.0


class Inner(es.Module):
    weight: es.Parameter = 2.0

    def __call__(self, x):
        return self.weight * x


class Observed(es.Module):
    inner: Inner = dataclasses.field(default_factory=Inner)

    @es.custom_vjp
    def __call__(self, x):
        return self.inner(x)

    __call__.defvjp(
        lambda self, x: (self.inner.weight * x, None), lambda _, g: (None, g)
    )


@kept_by_jax
def test_outputs_are_captured_in_the_function_that_ran():
    def loss(model, x):
        return es.scan(lambda c, x: (c, model(x)), 0, x[None])[1].sum()

    _, outputs = es.capture(Observed(), outputs=Inner)(X)
    assert outputs == {"inner": 4.0}
    with pytest.raises(ValueError, match=r"`inner` was captured in the function of an"):
        es.capture(es.value_and_grad(loss), outputs=Inner)(Observed(), X)


def rule(fwd=lambda m, x: (x, None), bwd=lambda _, g: (None, g)):
    return make(es, lambda m, x: x, fwd, bwd)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (rule(fwd=lambda m, x: x), r"returns a pair, `\(out, residuals\)`.*returned `"),
        (rule(bwd=lambda _, g: g), r"returns a tuple .* which are 2 here.*returned `"),
        (rule(bwd=lambda _, g: (g,)), r"which are 2 here"),
        (rule(bwd=lambda _, g: ({"b": g}, g)), "for argument 0 has another structure"),
        (rule(bwd=lambda _, g: (g, g)), "for argument 0 has another structure"),
        (rule(bwd=lambda _, g: (Layer(g, (g, g)), g)), "first at `plain`"),
    ],
    ids=["pair", "tuple", "count", "structure", "array", "inside"],
)
def test_rules_that_return_something_else(rule, message):
    with pytest.raises(TypeError, match=message):
        jax.grad(lambda x: rule(Layer(), x))(2.0)


def test_modes_of_cotangents_do_not_count_and_what_has_none_is_dropped():
    def bwd(layer, g):
        return eqx.tree_at(lambda m: m.plain, layer.eval(), 5), g

    f = rule(fwd=lambda m, x: (x, m), bwd=bwd)
    grads = eqx.filter_grad(f)(Layer(), 1.0)
    assert (grads.weight, grads.plain) == (3.0, None)


def test_a_call_that_does_not_fit():
    with pytest.raises(AttributeError, match=r"`sin` was called.*`sin.defvjp\(fwd, b"):
        es.custom_vjp(jnp.sin)(1.0)
    with pytest.raises(TypeError, match=r"do not fit the signature of `<lambda>`: too"):
        rule()(1.0, 2.0, 3.0)
    with pytest.raises(TypeError, match=r"rules of `scaled`.*`by` is only given by na"):
        make(es, scaled, no_rule, no_rule)({"a": 1.0}, 2.0)
    f = make(es, lambda n, x: n * x, no_rule, no_rule, nondiff_argnums=(0,))
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"the tracer `~float32"):
        jax.jit(f)(1.0, 2.0)


def test_state_that_is_overwritten_has_no_derivative():
    class Last(es.Module):
        last: es.State = 1.0

    def f(model, x):
        model.last = jax.lax.stop_gradient(x)
        return 2 * x

    rule = es.custom_vjp(f).defvjp(lambda m, x: (f(m, x), None), lambda _, g: (None, g))

    def loss_fn(model, x):
        return rule(model, x) + 3 * model.last

    (loss, new), grads = es.value_and_grad(loss_fn, wrt=es.State)(Last(), 5.0)
    assert (loss, new.last, grads.last) == (25.0, 5.0, 0.0)


def test_a_number_that_is_given_may_be_written():
    class Last(es.Module):
        last: es.State = 1.0

    def f(model, x):
        model.last = x
        return 2 * x

    rule = es.custom_vjp(f).defvjp(lambda m, x: (f(m, x), None), lambda _, g: (None, g))
    y, new = es.mutable(rule)(Last(), 5.0)
    assert (y, new.last) == (10.0, 5.0)


def test_the_rules_of_a_method_may_be_transforms():
    class Net(es.Module):
        weight: es.Parameter

        @es.custom_vjp
        @es.vmap
        def __call__(self, x):
            return self.weight * x

        @es.vmap
        def _fwd(self, x):
            return self.weight * x, x

        __call__.defvjp(_fwd, lambda xs, g: (None, 10 * g))

    net, xs = Net(2.0), jnp.arange(3.0)
    assert (net(xs) == 2 * xs).all()
    assert jax.grad(lambda xs: net(xs).sum())(xs).tolist() == [10.0, 10.0, 10.0]


def test_a_program_has_the_name_of_the_function():
    def clipped(x):
        return x

    rule = es.custom_vjp(clipped).defvjp(lambda x: (x, None), lambda _, g: (g,))
    assert "name=clipped" in str(jax.make_jaxpr(rule)(1.0))
