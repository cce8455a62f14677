"""`es.grad` and `es.value_and_grad` inside a scope: lifted like every transform.

The model of the call is copied. Owned modules that the function reaches otherwise are
the objects themselves, and their state is updated once.
"""

import dataclasses
import functools as ft

import equinox as eqx
import jax.numpy as jnp
import pytest
from helpers import close, rejects

import eqx_state as es


class Critic(es.Module):
    w: es.Parameter = 3.0
    calls: es.State = 0
    mean: es.BatchStat = 0.0

    def __call__(self, x):
        self.calls = self.calls + 1
        self.mean = self.w * x.sum()
        return (self.w * x**2).sum()

    def penalty(self, x):
        return (es.grad(lambda x: self(x))(x)[0] ** 2).sum()


X = jnp.array([1.0, 2.0])


def check_penalty(penalty, jit=lambda f: f):
    """Compare the value of a gradient penalty, its gradient and the state by hand."""
    (loss, new), grads = jit(es.value_and_grad(penalty))(Critic(), X)
    # The penalty is |2wx|², so its derivative is 8w|x|².
    close((loss, grads.w), (180.0, 120.0))
    close((new.calls, new.mean, new.w), (1, 9.0, 3.0))


def with_aux(critic, x):
    loss = es.grad(lambda x: (critic(x), critic.calls), has_aux=True)
    grads, (calls, new) = loss(x)
    close((calls, new), (1, x))
    return grads


def two_arguments(critic, x):
    f = es.grad(lambda x, critic, y: critic(x + y), argnums=(0, 2))
    (by_x, by_y), _ = f(x, critic, jnp.zeros(2))
    return (by_x + by_y) / 2


REACHED = {
    "closure": lambda critic, x: es.grad(lambda x: critic(x))(x)[0],
    "value": lambda critic, x: es.value_and_grad(lambda x: critic(x))(x)[1],
    "function": lambda critic, x: es.grad(critic, argnums=0)(x)[0],
    "argument": lambda critic, x: es.grad(lambda x, f: f(x))(x, critic)[0],
    "keyword": lambda critic, x: es.grad(lambda x, f: f(x))(x, f=critic)[0],
    "partial": lambda critic, x: es.grad(ft.partial(_call, critic), argnums=0)(x)[0],
    "aux": with_aux,
    "two arguments": two_arguments,
    "cast": lambda critic, x: es.grad(
        lambda x: critic(x.astype(jnp.float32)), cast=jnp.float16
    )(x)[0],
}


def _call(critic, x):
    return critic(x)


@pytest.mark.parametrize("grad", REACHED.values(), ids=REACHED)
def test_a_module_that_is_not_differentiated_updates_its_state_once(grad):
    check_penalty(lambda critic, x: (grad(critic, x) ** 2).sum())


AROUND = {
    "scan": lambda f, x: es.scan(lambda c, x: (c, f(x)), None, x[None])[1][0],
    "loop": lambda f, x: es.fori_loop(0, 1, lambda _, c: c + f(x), 0.0),
    "cond": lambda f, x: es.cond(True, f, jnp.sum, x),
    "jit": lambda f, x: es.jit(f)(x),
    "vmap": lambda f, x: es.vmap(lambda _: f(x))(jnp.zeros(3))[0],
    "checkpoint": lambda f, x: es.checkpoint(f)(x),
    "vjp": lambda f, x: es.vjp(f, x)[0],
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_inside_other_transforms(around):
    check_penalty(lambda critic, x: around(critic.penalty, x))
    check_penalty(lambda critic, x: around(lambda x: critic.penalty(x), x))


@pytest.mark.parametrize("jit", [es.jit, eqx.filter_jit])
def test_around_which_a_jit_compiles(jit):
    check_penalty(Critic.penalty, jit)


def test_a_gradient_of_a_gradient_writes_once():
    def second(critic, x):
        first = lambda x: es.grad(lambda x: critic(x))(x)[0].sum()  # noqa: E731
        return es.grad(first)(x)[0]

    y, new = es.mutable(second)(Critic(), X)
    close((y, new.calls), (jnp.full(2, 6.0), 1))


def test_gradients_flow_through_the_state_that_a_gradient_writes():
    def f(critic, x):
        es.grad(lambda x: critic(x))(x)
        return critic.mean

    (_, new), grads = es.value_and_grad(f)(Critic(), X)
    close((grads.w, new.mean), (3.0, 9.0))


def test_a_model_of_the_call_beside_modules_that_it_only_reads_or_writes():
    class Pair(es.Module):
        a: Critic
        b: Critic

        def loss(self, x):
            grads, self.a = es.grad(lambda a, b: a(x) * b(x) * self.b.w)(self.a, self.b)
            return grads.w

    pair = Pair(Critic(2.0), Critic(3.0))
    y, new = es.mutable(pair.loss)(X)
    close((y, new.a.calls, new.b.calls), (5.0 * 15.0 * 3.0, 1, 1))
    close((new.a.w, new.b.w), (2.0, 3.0))


class Both(es.Module):
    a: Critic
    b: Critic

    def loss(self, x):
        return self.a(x) * self.b(x)


CLASHES = {
    "reached twice": {
        "closure": lambda m, x: es.grad(lambda a: a(x) * m.a(x))(m.a),
        "part": lambda m, x: es.grad(lambda m_: m_.loss(x) * m.a(x))(m),
        "receiver": lambda m, x: es.grad(lambda m_, y: m_.loss(y) * m.a(y))(m, x),
        "two models": lambda m, x: es.grad(
            lambda a, b: a(x) * b(x) * m.a(x), argnums=(0, 1)
        )(m.a, m.b),
        "argument": lambda m, x: es.grad(lambda a, b: a(x) * b(x))(m.a, m.a),
    },
    "through the closure": {
        "closure": lambda m, x: es.grad(lambda a: a.w * m.a(x))(m.a),
        "part": lambda m, x: es.grad(lambda m_: m_.b(x) * m.a(x))(m),
        "argument": lambda m, x: es.grad(lambda a, b: a.w * b(x))(m.a, m.a),
        "list": lambda m, x: es.grad(lambda a: a[0].w * m.a(x))([m.a, m.b]),
    },
}


@pytest.mark.parametrize(
    ("said", "grad"),
    [(said, f) for said, fs in CLASHES.items() for f in fs.values()],
    ids=[f"{name}, {said}" for said, fs in CLASHES.items() for name in fs],
)
def test_a_model_of_the_call_that_is_also_written_itself(said, grad):
    model = Both(Critic(), Critic())
    with rejects(model, ValueError, rf"`a\.\w+` (is|was written) {said}"):
        es.mutable(lambda m, x: grad(m, x)[1])(model, X)


def test_a_method_that_writes_its_own_object_through_a_closure():
    class Net(es.Module):
        b: Critic

        def run(self, x):
            return es.grad(lambda net, x: net.b.w * self.b(x))(self, x)[0].b.w

    with rejects(Net(Critic()), ValueError, r"`b\.\w+` was written through"):
        es.mutable(Net(Critic()).run)(X)


def test_only_the_kinds_of_the_scope_may_be_written():
    def f(critic, x):
        def write(x):
            critic.w = x.sum()
            return critic.w

        return es.grad(write, kinds=es.TreePart)(x)[0]

    with rejects(
        Critic(), dataclasses.FrozenInstanceError, r"`w` is a `Parameter`, but"
    ):
        es.mutable(f)(Critic(), X)
    y, new = es.mutable(f, kinds=es.TreePart)(Critic(), X)
    close((y, new.w), (jnp.ones(2), 3.0))


def test_a_gradient_that_fails_leaves_the_module_alone():
    def f(critic, x):
        with pytest.raises(TypeError, match="gradient needs one real number"):
            es.grad(lambda x: (critic(x), x))(x)
        return critic.calls

    y, new = es.mutable(f)(Critic(), X)
    assert y == new.calls == 0


def test_values_that_are_captured_inside():
    class Loud(Critic):
        def __call__(self, x):
            self.sow("x", x)
            return super().__call__(x)

    class Net(es.Module):
        critic: Loud

        def __call__(self, x):
            return self.critic.penalty(x)

    (y, _), found = es.capture(Net(Loud()), outputs=Loud)(X)
    close((y, found), (180.0, {"critic.x": X, "critic": 15.0}))


def test_init_creates_the_fields_of_a_module_in_a_closure():
    class Lazy(es.Module):
        bias: es.State = None
        calls: es.State = 0

        def __call__(self, x):
            if self.initializing:
                self.bias = jnp.ones(x.shape)
            self.calls = self.calls + 1
            return (x**2 + self.bias).sum()

    class Net(es.Module):
        lazy: Lazy

        def __call__(self, x):
            return es.grad(lambda x: self.lazy(x))(x)[0]

    net = Net(Lazy()).init(0, X)
    close((net.lazy.bias, net.lazy.calls), (jnp.ones(2), 0))
    y, net = es.mutable(net)(X)
    close((y, net.lazy.calls), (2 * X, 1))


def test_outside_of_a_scope_a_gradient_carries_nothing():
    critic = Critic()
    with rejects(
        critic, dataclasses.FrozenInstanceError, r"Cannot write `Critic\.calls`"
    ):
        es.grad(lambda x: critic(x))(X)
    grads, _ = es.grad(lambda x: critic.w * x.sum())(X)
    close(grads, jnp.full(2, 3.0))
