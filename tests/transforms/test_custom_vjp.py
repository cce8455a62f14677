"""`es.custom_vjp`: `jax.custom_vjp`, for functions of modules that write state."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, rejects, reuses_keys

import eqx_state as es


# The tests call one model, with its keys, in several ways. The zoo checks key reuse.
pytestmark = reuses_keys


# A traced call keeps its rules alive, and they keep the modules of the call, which
# contain values of the trace. All are freed together with the program.
kept_by_jax = pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks,
    reason="JAX keeps the rules, and they the modules",
)


def no_rule(*args):
    raise AssertionError("not differentiated")


# --- Like JAX -------------------------------------------------------------------------


def make(module, f, fwd, bwd, **options):
    rule = module.custom_vjp(f, **options)
    rule.defvjp(fwd, bwd)
    return rule


def rules_for(f, by=1.0):
    """The function, and rules whose derivatives are `by` times the arguments."""
    fwd = lambda *args: (f(*args), args)  # noqa: E731
    bwd = lambda args, g: tuple(by * g * x for x in args)  # noqa: E731
    return {"f": f, "fwd": fwd, "bwd": bwd}


def times(x, y=2.0, z=3.0):
    return x * y * z


OF_A_DICT = {
    "f": lambda d, x: d["a"] * x,
    "fwd": lambda d, x: (d["a"] * x, (d, x)),
    "bwd": lambda r, g: [{"a": 7 * g, "b": None}, None],
}
OF_AN_INTEGER = {
    "f": lambda x, n: x**n,
    "fwd": lambda x, n: (x**n, n),
    "bwd": lambda n, g: (2 * g, np.zeros((), jax.dtypes.float0)),
}
APPLIED = {
    "f": lambda f, x, n: f(x) * n,
    "fwd": lambda f, x, n: (f(x) * n, x),
    "bwd": lambda f, n, x, g: (g * f(x) * n,),
}
# Function, rules and options; positional arguments; keyword arguments.
CASES = {
    "an array": (rules_for(jnp.sin, 5), (2.0,), {}),
    "a dict, and zero": (OF_A_DICT, ({"a": 2.0, "b": (3.0, 4.0)}, 5.0), {}),
    "integers": (OF_AN_INTEGER, (2.0, jnp.array(3)), {}),
    "by name": ({**APPLIED, "nondiff_argnames": ("f", "n")}, (jnp.cos, 2.0, 3), {}),
    "a default": (rules_for(times), (2.0,), {"z": 4.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_on_arrays_it_equals_that_of_jax(name):
    options, args, kwargs = CASES[name]
    ours, theirs = (make(m, **options) for m in (es, jax))
    close(ours(*args, **kwargs), theirs(*args, **kwargs))
    i = 1 if callable(args[0]) else 0

    def gradient(f):
        run = lambda x: f(*args[:i], x, *args[i + 1 :], **kwargs)  # noqa: E731
        return jax.value_and_grad(run)(args[i])

    close(gradient(ours), gradient(theirs))


@kept_by_jax
@pytest.mark.parametrize("static", [{"nondiff_argnums": -1}, {"nondiff_argnames": "s"}])
def test_one_static_argument_need_not_be_in_a_tuple(static):
    f = es.custom_vjp(lambda x, s: x, **static)
    assert f is f.defvjp(lambda x, s: (x, None), lambda s, _, g: (len(s) * g,))
    assert jax.grad(f)(1.0, "abc") == 3.0
    assert "name=<lambda>" in str(jax.make_jaxpr(lambda x: f(x, "abc"))(1.0))


# --- State ----------------------------------------------------------------------------


class Layer(es.Module):
    weight: es.Parameter = 3.0
    plain: es.State = 0  # number of calls of the function
    ruled: es.State = 0  # number of calls of the forward rule
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
        self.mean = self.mean + 2 * x
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


def by_vjp(layer, x):
    return es.vjp(layer, x)[0]


WAYS = [direct, jitted, scanned, by_vjp]
X = jnp.array(2.0)


@kept_by_jax
@pytest.mark.parametrize("way", WAYS)
def test_only_the_function_or_rule_that_ran_writes_state(way):
    draw = float(jr.uniform(jr.split(jr.key(0))[1]))
    if way is not by_vjp:
        out, new = es.mutable(way)(Layer(), X)
        close(out, jnp.array(6.0 * draw))
        assert (new.plain, new.ruled, new.mean) == (1, 0, 2.0)
    (out, new), grads = es.value_and_grad(way)(Layer(), X)
    close(out, jnp.array(6.0 * draw))
    assert (new.plain, new.ruled, new.mean) == (0, 1, 4.0)
    # In nested derivatives, the inner one uses the rule, as in JAX.
    assert way is by_vjp or grads.weight == 20.0
    assert new.rng == jr.split(jr.key(0))[0]


class Sine(es.Module):
    """A rule that recomputes the forward pass, with `self` among the residuals."""

    weight: es.Parameter = 2.0
    ruled: es.State = 0
    shift: es.State = 0.0

    def wave(self, x):
        return jnp.sin(self.weight * x + self.shift)

    @es.custom_vjp
    def __call__(self, x):
        return self._fwd(x)[0]

    def _fwd(self, x):
        y = self.wave(x)
        self.ruled = self.ruled + 1
        return y, (self, x)

    def _bwd(residuals, g):
        self, x = residuals
        return es.vjp(Sine.wave, self, x)[1](g)

    __call__.defvjp(_fwd, _bwd)


class OfMethod(Sine):
    @es.custom_vjp
    def __call__(self, x):
        return self._fwd(x)[0]

    def _bwd(residuals, g):
        self, x = residuals
        (by_x,) = es.vjp(self.wave, x)[1](g)
        return None, by_x

    __call__.defvjp(Sine._fwd, _bwd)


@kept_by_jax
@pytest.mark.parametrize("cls", [Sine, OfMethod])
@pytest.mark.parametrize("way", WAYS)
def test_a_rule_returns_self_as_a_residual_and_calls_vjp_of_a_method(way, cls):
    (y, (new, _)), (grads, by_x) = es.value_and_grad(way, argnums=(0, 1))(cls(), X)
    close((y, new.ruled), (jnp.sin(2 * X), 1))
    if way is not by_vjp:
        by_self = 2 * jnp.cos(2 * X) if cls is Sine else 0.0
        close((grads.weight, by_x), (by_self, 2 * jnp.cos(2 * X)))
        slope = lambda m, x: es.grad(lambda x: way(m, x))(x)[0]  # noqa: E731
        (_, by_x), (new, _) = es.grad(slope, argnums=(0, 1))(cls(), X)
        close((by_x, new.ruled), (-4 * jnp.sin(2 * X), 1))


class Nested(es.Module):
    layer: Layer
    ruled: es.State = 0

    @ft.partial(es.custom_vjp, nondiff_argnums=2)
    def __call__(self, x, by):
        return self.layer(x)

    def _fwd(self, x, by):
        for _ in range(by):  # `by` remains a number
            self.ruled = self.ruled + 1
            self.layer.ruled = self.layer.ruled + 1
        return self(x, by), None

    __call__.defvjp(_fwd, lambda by, _, g: (None, 3 * g))


@kept_by_jax
def test_modules_inside_are_written_also_if_the_rule_is_traced_after_the_call():
    def loss(net, x):
        return es.jit(lambda x: net(x, 5))(x) * 2

    grad = es.grad(loss, argnums=(0, 1))
    (_, by_x), (new, _) = grad(Nested(Layer()), X)
    assert (by_x, new.layer.plain, new.layer.ruled, new.ruled) == (6.0, 1, 5, 5)


def scale(layer, x):
    return layer.weight * x


@kept_by_jax
def test_a_key_that_is_not_drawn_from_does_not_change():
    rule = make(es, scale, lambda *args: (scale(*args), None), lambda _, g: (None, g))
    layer = Layer()
    for f in (lambda layer, xs: es.vmap(lambda x: rule(layer, x))(xs), rule):
        _, new = es.jit(es.mutable(f))(layer, jnp.ones(2))
        close(new, layer)
        (_, new), _ = es.value_and_grad(lambda m, x, f=f: f(m, x).sum())(layer, X[None])
        close(new, layer)


# --- Keys -----------------------------------------------------------------------------


class Noise(es.Module):
    w: es.Parameter
    rng: es.Rng
    inner: list[es.Rng]

    def draw(self):
        (self.rng, k), self.inner = jr.split(self.rng), [*jr.split(self.inner[0])[:1]]
        return jr.normal(k) + jr.normal(self.inner[0])

    def __call__(self, x):
        return self.w * x + self.draw()


def by_rule(m):
    """A draw in a rule, which stores new keys and returns one."""
    f = lambda m, x: (x + m.draw(), m.rng)  # noqa: E731
    fwd, bwd = (lambda m, x: (f(m, x), None)), (lambda _, g: (None, g[0]))
    return make(es, f, fwd, bwd)(m, m.w)


def by_jax(m):
    """The same with a rule of the user's, who assigns the keys."""
    f = lambda k, x: (x + jr.normal(k), jr.split(k)[0])  # noqa: E731
    fwd, bwd = (lambda k, x: (f(k, x), None)), (lambda _, g: (None, g[0]))
    x, m.rng = make(jax, f, fwd, bwd)(m.rng, m.w)
    _, m.inner = make(jax, f, fwd, bwd)(m.inner[0], x), [m.rng]
    return x, m.rng


USES = {
    "vmap": lambda m, key, x: es.vmap(m)(x),
    "vmap of an argument": lambda m, key, x: es.vmap(
        lambda k: jr.normal(k), in_axes=({...: es.SPLIT},), axis_size=2
    )(key),
    "scan": lambda m, key, x: es.scan(lambda c, x: (c, m(x)), None, x)[1],
    "clone": lambda m, key, x: jr.normal(jr.clone(m.rng)) * jr.normal(jr.clone(key)),
}


def cotangent(loss, m, x):
    def f(m, x):
        out, pull = es.vjp(lambda m: loss(m, x), m)
        return out, pull(jnp.ones_like(out))[0].w

    (out, by_w), new = es.mutable(f)(m, x)
    return out, new, by_w


@pytest.mark.parametrize(
    ("rule", "use"),
    [
        *((by_rule, use) for use in USES),
        (by_jax, "vmap"),
        (by_jax, "vmap of an argument"),
    ],
)
def test_keys_that_leave_a_rule_are_ordinary_keys(rule, use):
    def loss(m, x):
        y, key = rule(m)
        return jnp.sum(USES[use](m, key, y * x))

    m = Noise(jnp.array(2.0), jr.key(0), [jr.key(1)])
    out, new = es.mutable(loss)(m, jnp.ones(2))
    after, grads = es.value_and_grad(loss)(m, jnp.ones(2))
    close(after, (out, new))
    close(es.jit(cotangent)(loss, m, jnp.ones(2)), (out, new, grads.w))


def foreign(x):
    """A function that JAX cannot differentiate."""
    shape = jax.ShapeDtypeStruct((), "float32")
    return jax.pure_callback(lambda x: np.asarray(x), shape, x)


@kept_by_jax
def test_no_gradient_flows_through_written_state():
    def write(layer, x):
        layer.mean = foreign(layer.mean + x)
        return layer.weight * x

    rule = make(es, write, lambda *a: (write(*a), None), lambda _, g: (None, 7 * g))

    def loss(layer, x):
        out = rule(layer, x) + 3.0 * layer.mean
        es.scan(lambda _, x: (None, rule(layer, x)), None, x[None])
        return out + 3.0 * layer.mean

    for way in (lambda f: f, es.jit):
        grad = way(es.grad(loss, wrt=es.TreePart, argnums=(0, 1), has_aux=False))
        (grads, by_x), (new, _) = grad(Layer(), X)
        assert (by_x, grads.weight, grads.mean, new.mean) == (7.0, 0.0, 0.0, 4.0)


@kept_by_jax
def test_no_gradient_flows_through_state_that_only_the_function_writes():
    def write(layer, x):
        layer.mean = 2.0 * layer.mean
        return layer.weight * x

    rule = make(es, write, lambda *a: (scale(*a), None), lambda _, g: (None, g))

    def loss(layer, x):
        return rule(layer, x) + 3.0 * layer.mean

    for way in (lambda f: f, es.jit):
        grads, new = es.grad(way(loss), wrt=es.BatchStat)(Layer(), X)
        assert (grads.mean, new.mean) == (0.0, Layer().mean)


def test_a_gradient_flows_through_state_that_nothing_writes():
    rule = make(es, scale, lambda *args: (scale(*args), None), lambda _, g: (None, g))

    def loss(layer, x):
        return rule(layer, x) + 3.0 * layer.mean

    for way in (lambda f: f, es.jit):
        grads, _ = way(es.grad(loss, wrt=es.BatchStat))(Layer(), X)
        assert grads.mean == 3.0


def test_the_forward_rule_is_traced_only_where_it_may_be_needed():
    traces = []

    def fwd(layer, x):
        traces.append(1)
        return scale(layer, x), None

    f = make(es, scale, fwd, lambda _, g: (None, g))
    assert es.mutable(f)(Layer(), X)[0] == 6.0
    assert traces == []  # there is no derivative
    assert es.value_and_grad(f)(Layer(), X)[0][0] == 6.0
    assert len(traces) == 1


@kept_by_jax
def test_sown_values_are_those_of_the_function_or_rule_that_ran():
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
    shapes = eqx.filter_eval_shape(lambda x: Lazy().init(0, x), jnp.ones(3))
    assert shapes.weight.shape == (3,)


class Stacked(es.Module):
    """Methods with two decorators, in either order."""

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
    inside.defvjp(es.vmap(lambda self, x: self._fwd(x), out_axes=(0, None)), _bwd)


@kept_by_jax
@pytest.mark.parametrize("name", ["outside", "inside"])
def test_it_may_be_one_of_several_decorators(name):
    def loss(model, xs):
        return jnp.sum(getattr(model, name)(xs))

    xs = jnp.array([1.0, 2.0])
    assert es.mutable(loss)(Stacked(), xs)[1].count == 1
    (_, by_x), (model, _) = es.grad(loss, argnums=(0, 1))(Stacked(), xs)
    close((by_x, model.count), (jnp.full(2, 5.0), jnp.array(10)))
    assert getattr(Stacked, name).__name__ == name


# --- Errors ---------------------------------------------------------------------------


def closes(which):
    """A call in which one of the functions closes over the layer."""

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
def test_a_module_that_is_only_closed_over_is_an_error(name):
    run = CLOSING[name]
    for call in (es.mutable(run), run):
        with rejects(Layer(), ValueError, "closes over the `Layer`", "Pass it"):
            call(Layer(), X)


def test_a_module_that_is_also_passed_may_be_closed_over():
    def run(net, x):
        fwd = lambda net, x: (scale(net["a"], x), x)  # noqa: E731
        bwd = lambda x, g: (None, net["a"].weight * g)  # noqa: E731
        return make(es, lambda net, x: scale(net["a"], x), fwd, bwd)(net, x)

    assert jax.grad(lambda x: es.mutable(run)({"a": Layer()}, x)[0])(2.0) == 3.0
    # A module without arrays has no gradient that could be lost.
    relu = eqx.nn.Lambda(jax.nn.relu)
    f = make(es, lambda x: relu(x), lambda x: (relu(x), None), lambda _, g: (2 * g,))
    assert jax.grad(f)(-1.0) == 2.0


def test_the_backward_rule_may_open_a_scope():
    def bwd(layer, g):
        _, new = es.mutable(lambda layer: setattr(layer, "plain", 3))(layer)
        return None, new.plain.astype(g.dtype)

    rule = make(es, lambda n, x: x, lambda layer, x: (x, layer), bwd)
    assert jax.grad(rule, 1)(Layer(), 1.0) == 3.0


def rule(fwd=lambda m, x: (x, None), bwd=lambda _, g: (None, g), **options):
    return make(es, lambda m, x: x, fwd, bwd, **options)


def test_a_forward_rule_that_returns_no_pair_is_an_error_of_jax():
    with pytest.raises(TypeError, match="fwd rule <lambda> .* must produce a pair"):
        jax.grad(lambda x: rule(fwd=lambda m, x: x)(Layer(), x))(2.0)


def sowing(name, word):
    class Sower(es.Module):
        weight: es.Parameter = 2.0

        @es.custom_vjp
        def __call__(self, x):
            self.sow("a", x)
            return self.weight * x, "word"

        def _fwd(self, x):
            self.sow(name, x)
            return (self.weight * x, word), None

        __call__.defvjp(_fwd, lambda _, g: (None, g[0]))

    return Sower()


@kept_by_jax
def test_the_function_and_its_rule_must_return_the_same_structure():
    def loss(model, x):
        return es.scan(lambda c, x: (c, model(x)[0]), 0, x[None])[1].sum()

    grad = es.capture(es.value_and_grad(loss))
    pairs = (sowing("b", "word"), "name=b"), (sowing("a", "b"), "None, b")
    for model, shown in pairs:
        with pytest.raises(TypeError, match=rf"rule _fwd for.*structure:\n.*{shown}"):
            grad(model, X)
    # If the call is differentiated directly, JAX does not call the function.
    assert es.value_and_grad(lambda m, x: m(x)[0])(sowing("b", "b"), X)[0][0] == 4.0


def test_a_call_that_does_not_fit():
    with pytest.raises(AttributeError, match="No VJP defined .* function sin"):
        es.custom_vjp(jnp.sin)(1.0)
    f = make(es, lambda x, *, by=1.0: x, no_rule, no_rule)
    with pytest.raises(TypeError, match=r"rules of `<lambda>`.*`by` is keyword-only"):
        f(2.0)
    with pytest.raises(ValueError, match="'y'.*function has no such parameter"):
        rule(nondiff_argnames="y")
    with pytest.raises(TypeError, match="2 positional arguments, so argument 2"):
        rule(nondiff_argnums=2)(1.0, 2.0)
