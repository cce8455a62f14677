"""`es.jacfwd`, `es.jacrev`, `es.hessian`: those of JAX, with state threaded once."""

import dataclasses
import functools as ft
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from helpers import close, rejects, reuses_keys

import eqx_state as es


# The same model, with its keys, is called in several ways. The zoo has the check.
pytestmark = reuses_keys

FROZEN = dataclasses.FrozenInstanceError
NAMES = ["jacfwd", "jacrev", "hessian"]
each = pytest.mark.parametrize("name", NAMES)
X = jnp.array([0.3, 0.7, -0.2])


class Noisy(es.Module):
    weight: es.Parameter = dataclasses.field(default_factory=lambda: jnp.ones(3))
    count: es.State = 0
    mean: es.BatchStat = 0.0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))

    def __call__(self, x):
        self.count = self.count + 1
        self.rng, key = jr.split(self.rng)
        self.mean = 0.5 * self.mean + jnp.sum(self.weight * x)
        self.sow("seen", x)
        return jnp.sum(jnp.sin(self.weight * x)) * jr.uniform(key) * x


class Pure(es.Module):
    """`Noisy` by hand, for one key."""

    key: es.Rng

    def __call__(self, weight, x):
        key = jr.split(self.key)[1]
        return jnp.sum(jnp.sin(weight * x)) * jr.uniform(key) * x


# --- As in JAX ------------------------------------------------------------------------


def product(x, y):
    return x * jnp.sin(y), {"sum": x.sum() + y[0] * y[1]}


PLAIN = {
    "an array": (lambda x: x * x[0], {}, (X,)),
    "a number": (jnp.sin, {}, (0.5,)),
    "the second": (product, {"argnums": 1}, (X, X + 1)),
    "the last": (product, {"argnums": -1}, (X, X + 1)),
    "both": (product, {"argnums": (0, 1)}, (X, X + 1)),
    "both, in a list": (product, {"argnums": [1, 0]}, (X, X + 1)),
    "a dict": (lambda d: d["a"] * d["b"], {}, ({"a": X, "b": X * 2},)),
    "a tuple": (lambda x, y: (x[0] * y, x[1]), {}, ((X, 2 * X), 3.0)),
    "an auxiliary output": (lambda x: (x * x, {"n": x}), {"has_aux": True}, (X,)),
    "holomorphic": (lambda z: z * z * z, {"holomorphic": True}, (X + 1j,)),
    "a constant output": (lambda x: (x, jnp.ones(2)), {}, (X,)),
}


@each
@pytest.mark.parametrize("case", PLAIN)
def test_on_arrays_it_is_that_of_jax(name, case):
    fun, options, args = PLAIN[case]
    ours, theirs = (getattr(m, name)(fun, **options)(*args) for m in (es, jax))
    close(ours, theirs)


@each
def test_the_signature_is_that_of_jax(name):
    ours, theirs = (
        [
            (p.name, p.kind, p.default)
            for p in inspect.signature(getattr(m, name)).parameters.values()
        ]
        for m in (es, jax)
    )
    assert ours == theirs


@each
def test_arguments_by_name_are_not_differentiated(name):
    fun = lambda x, *, scale: scale * x**3  # noqa: E731
    ours, theirs = (getattr(m, name)(fun)(0.5, scale=2.0) for m in (es, jax))
    close(ours, theirs)


@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
def test_there_is_none_for_what_is_not_inexact(name):
    model = {"w": X, "n": jnp.array(2), "f": jnp.sin, "k": jr.key(0)}

    def f(m):
        return {"out": m["n"] * m["w"], "f": m["f"]}

    jacobian = getattr(es, name)(f)(model)
    expected = {"w": 2 * jnp.eye(3), "n": None, "f": None, "k": None}
    close(jacobian, {"out": expected, "f": None})


# --- State ----------------------------------------------------------------------------


@each
def test_state_is_threaded_once_and_keys_are_drawn_from_once(name):
    model = Noisy()
    jacobian, new = es.mutable(getattr(es, name)(model))(X)
    _, expected = es.mutable(model)(X)
    close(new, expected)
    pure = ft.partial(Pure(model.rng), model.weight)
    close(jacobian, getattr(jax, name)(pure)(X))


@each
def test_modules_among_the_arguments_are_differentiated(name):
    model = Noisy()

    @es.mutable
    def run(model, x):
        f = lambda scale, model: scale * model(x)  # noqa: E731
        return getattr(es, name)(f, argnums=1)(2.0, model)

    jacobian, new = run(model, X)
    close(new, es.mutable(model)(X)[1])
    pure = lambda w: 2.0 * Pure(model.rng)(w, X)  # noqa: E731
    expected = getattr(jax, name)(pure)(model.weight)
    assert (jacobian.count, jacobian.rng) == (None, None)
    if name == "hessian":
        close(jacobian.weight.weight, expected)
        close(jacobian.mean.weight, jnp.zeros((3, 3)))
    else:
        close(jacobian.weight, expected)
        close(jacobian.mean, jnp.zeros(3))


@each
def test_several_arguments_and_an_auxiliary_output(name):
    def run(model, x, jacobian):
        def f(y, model):
            return jnp.sum(y * model(x)), (model.count, "aux")

        return jacobian(f, (0, 1), has_aux=True)(2.0, model)

    jacobian = getattr(es, name)
    (result, (count, word)), new = es.mutable(run)(Noisy(), X, jacobian)
    assert (count, word, new.count) == (1, "aux", 1)
    assert isinstance(result, tuple)
    assert len(result) == 2


@each
def test_outer_gradients_flow_through_the_state(name):
    def loss(model, x, jacobian):
        jacobian(model)(x)
        return model.mean

    ours = es.value_and_grad(loss)(Noisy(), X, getattr(es, name))
    plain = es.value_and_grad(loss)(Noisy(), X, lambda f: f)
    close(ours, plain)
    close(ours[1].weight, X)


@each
def test_it_works_inside_the_other_transforms(name):
    def step(model, x):
        return getattr(es, name)(lambda x: model(x)[:1].sum())(x)

    def run(model, xs):
        a = es.scan(lambda c, x: (c, step(model, x)), 0, xs)[1]
        b = es.checkpoint(lambda x: step(model, x))(xs[0])
        c = es.cond(b.sum() > 99, lambda: b, lambda: step(model, xs[1]))
        return a, b, c

    def by_hand(model, xs):
        a = [step(model, x) for x in xs]
        return jnp.stack(a), step(model, xs[0]), step(model, xs[1])

    xs = jnp.stack([X, 2 * X])
    ours = es.jit(es.mutable(run))(Noisy(), xs)
    close(ours, es.mutable(by_hand)(Noisy(), xs))
    assert ours[1].count == 4

    lanes = es.vmap(lambda x: getattr(es, name)(lambda x: x * x[0])(x))
    close(lanes(xs), jnp.stack([getattr(jax, name)(lambda x: x * x[0])(x) for x in xs]))


@each
def test_it_is_threaded_by_a_scope_and_takes_jit(name):
    mutable = es.mutable(getattr(es, name)(Noisy()))
    step = es.jit(eqx.debug.assert_max_traces(mutable, max_traces=1))
    jacobian, new = step(X)
    assert new.count == 1
    close(es.mutable(es.jit(getattr(es, name)(Noisy())))(X), (jacobian, new))


@each
def test_what_is_sown_comes_out_once(name):
    (_, new), sown = es.capture(getattr(es, name)(Noisy()))(X)
    close(sown, {"seen": X})
    assert new.count == 1


class Decorated(es.Module):
    weight: es.Parameter = 2.0
    count: es.State = 0

    @es.jacfwd
    def forward(self, x):
        self.count = self.count + 1
        return self.weight * x**2

    @ft.partial(es.jacrev, argnums=1, has_aux=True)
    def reverse(self, x, y):
        self.count = self.count + 1
        return self.weight * x * y**2, "aux"

    @es.hessian
    def second(self, x):
        self.count = self.count + 1
        return self.weight * x**3

    @es.vmap
    @es.jacfwd
    def lanes(self, x):
        return self.weight * x**2


def test_self_of_a_decorated_method_does_not_count():
    def run(model):
        return model.forward(3.0), model.reverse(2.0, 3.0), model.second(1.0)

    (a, (b, aux), c), new = es.mutable(run)(Decorated())
    assert (a, b, aux, c, new.count) == (12.0, 24.0, "aux", 12.0, 3)
    assert Decorated(count=5).lanes(jnp.ones(2)).tolist() == [4.0, 4.0]
    assert Decorated.forward.__name__ == "forward"


class Lazy(es.Module):
    weight: es.Parameter | None = None

    def __call__(self, x):
        if self.weight is None:
            self.weight = jnp.full(x.shape, 2.0)
        return jnp.sum(self.weight * x**2)


@each
def test_it_runs_while_init_does(name):
    class Outer(es.Module):
        lazy: Lazy

        def __call__(self, x):
            return getattr(es, name)(self.lazy)(x)

    model = Outer(Lazy()).init(0, X)
    close(model.lazy.weight, jnp.full(3, 2.0))
    out, _ = es.mutable(model)(X)
    close(out, 4 * jnp.eye(3) if name == "hessian" else 4 * X)


# --- Errors ---------------------------------------------------------------------------


@each
def test_outside_a_scope_a_write_is_an_error(name):
    with rejects(Noisy(), FROZEN, r"Noisy\.count"):
        getattr(es, name)(Noisy())(X)


@each
@pytest.mark.parametrize(
    ("argnums", "error", "message"),
    [
        (2, ValueError, r"called with 2 positional arguments, so .* no argument 2"),
        ((0, -3), ValueError, r"argnums=-3.*no argument -3"),
        ((0, -2), ValueError, r"argnums=\(0, -2\).*names argument 0 twice"),
        (1, TypeError, r"argument 1 has no inexact arrays"),
        ("x", TypeError, r"argnums='x'.*an integer, or a tuple"),
    ],
    ids=["beyond", "before", "twice", "integer", "name"],
)
def test_arguments_that_cannot_be_differentiated(name, argnums, error, message):
    with pytest.raises(error, match=message):
        getattr(es, name)(lambda x, n: x * x * n, argnums)(2.0, 3)


def test_integers_are_allowed_on_request():
    for argnums, expected in ((0, None), ((0,), (None,))):
        f = es.jacrev(lambda n: {"a": 2 * n}, argnums, allow_int=True)
        assert f(jnp.array(3)) == {"a": expected}


@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
def test_without_holomorphic_complex_arguments_are_an_error_of_jax(name):
    with pytest.raises(TypeError, match="holomorphic"):
        getattr(es, name)(lambda z: z * z)(1j)


@each
def test_without_a_pair_there_is_no_auxiliary_output(name):
    with pytest.raises(TypeError, match=r"returns a pair, `\(out, aux\)`"):
        getattr(es, name)(lambda x: x, has_aux=True)(1.0)
