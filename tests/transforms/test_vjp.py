"""`es.vjp`, `es.jvp`, `es.linearize`: those of JAX, with state threaded once."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, leaks_on_purpose, rejects, reuses_keys

import eqx_state as es


# The same model, with its keys, is called in several ways. The zoo has the check.
pytestmark = reuses_keys

FROZEN = dataclasses.FrozenInstanceError


class Cell(es.Module):
    weight: es.Parameter = 0.5
    count: es.State = 0
    mean: es.BatchStat = 0.0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))

    def __call__(self, x):
        self.count = self.count + 1
        self.rng, key = jr.split(self.rng)
        self.mean = 0.5 * self.mean + self.weight * x
        self.sow("seen", x)
        return jnp.sin(self.weight * x) * jr.uniform(key)


class Net(es.Module):
    cell: Cell = dataclasses.field(default_factory=Cell)
    other: Cell = dataclasses.field(default_factory=lambda: Cell(-1.5))
    steps: es.State = 0


def jvp_by_vjp(fun, primals, has_aux=False):
    out, vjp_fn, *aux = es.vjp(fun, *primals, has_aux=has_aux)
    return out, vjp_fn(ones(out)), *aux


def jvp_of_ones(fun, primals, has_aux=False):
    return es.jvp(fun, primals, ones(primals), has_aux=has_aux)


def linearized(fun, primals, has_aux=False):
    out, jvp_fn, *aux = es.linearize(fun, *primals, has_aux=has_aux)
    return out, jvp_fn(*ones(primals)), *aux


def ones(tree):
    # Integers and functions have no tangents.
    return jax.tree.map(lambda x: jnp.ones_like(x) if is_inexact(x) else None, tree)


def is_inexact(x):
    return eqx.is_inexact_array(x) or type(x) is float


WAYS = {"vjp": jvp_by_vjp, "jvp": jvp_of_ones, "linearize": linearized}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


# --- As in JAX ------------------------------------------------------------------------


def pair(x, y):
    return x["a"] * jnp.sin(y[0]), {"b": x["a"].sum()}


PLAIN = {
    "an array": (jnp.sin, (jnp.arange(3.0),)),
    "numbers": (lambda x, y: x * y, (2.0, 3.0)),
    "NumPy": (jnp.cumsum, (np.arange(3.0, dtype=np.float32),)),
    "complex": (lambda z: z * z, (jnp.array([1 + 2j, 3j]),)),
    "a dict and a tuple": (pair, ({"a": jnp.arange(2.0)}, (jnp.array(3.0),))),
    "a constant output": (lambda x: (x, jnp.ones(2)), (1.0,)),
    "no arguments": (lambda: jnp.ones(2), ()),
}


@pytest.mark.parametrize("name", PLAIN)
def test_on_arrays_they_are_those_of_jax(name):
    fun, primals = PLAIN[name]
    tangents = jax.tree.map(jnp.ones_like, primals)
    for has_aux in (False, True):
        f = (lambda *x: (fun(*x), {"n": 3, "x": x})) if has_aux else fun
        out, vjp_fn, *aux = es.vjp(f, *primals, has_aux=has_aux)
        out_, vjp_fn_, *aux_ = jax.vjp(f, *primals, has_aux=has_aux)
        cotangents = jax.tree.map(jnp.ones_like, out)
        close((out, vjp_fn(cotangents), aux), (out_, vjp_fn_(cotangents), aux_))
        close(
            es.jvp(f, primals, tangents, has_aux=has_aux),
            jax.jvp(f, primals, tangents, has_aux=has_aux),
        )
        out, jvp_fn, *aux = es.linearize(f, *primals, has_aux=has_aux)
        out_, jvp_fn_, *aux_ = jax.linearize(f, *primals, has_aux=has_aux)
        close((out, jvp_fn(*tangents), aux), (out_, jvp_fn_(*tangents), aux_))


def test_lists_and_the_flag_by_position_are_taken_as_by_jax():
    out = es.jvp(lambda x: (x * x, x), [3.0], [1.0], True)
    assert out == (9.0, 6.0, 3.0)


def test_second_derivatives_and_maps_of_the_linear_functions_are_those_of_jax():
    x = jnp.arange(3.0)

    def jacobian(module):
        def f(x):
            _, vjp_fn = module.vjp(lambda x: jnp.sin(x) * x[0], x)
            return jax.vmap(vjp_fn)(jnp.eye(3))[0]

        return module.jvp(f, (x,), (jnp.ones(3),))

    close(jacobian(es), jacobian(jax))


# --- What has tangents ----------------------------------------------------------------


def test_only_inexact_arrays_have_cotangents():
    def f(cell, x):
        return cell["n"] * cell["w"] * x[0], cell["n"]

    primals = {"w": jnp.ones(2), "n": 3, "f": jnp.sin}, (jnp.arange(2.0), jr.key(0))
    out, vjp_fn = es.vjp(f, *primals)
    float0 = np.zeros((), jax.dtypes.float0)
    for zero in (None, float0):
        grads = vjp_fn((jnp.ones(2), zero))
        close(grads, ({"w": jnp.array([0.0, 3.0]), "n": None, "f": None},
                      (jnp.full(2, 3.0), None)))  # fmt: skip
    tangents = {"w": jnp.ones(2), "n": float0, "f": None}, (jnp.zeros(2), None)
    _, (moved, none) = es.jvp(f, primals, tangents)
    _, jvp_fn = es.linearize(f, *primals)
    close(moved, jnp.array([0.0, 3.0]))
    close(jvp_fn(*tangents)[0], moved)
    assert none.dtype == jax.dtypes.float0
    assert out[1] == 3


def test_a_module_that_comes_out_has_cotangents_where_it_is_inexact():
    def f(cell):
        return cell.replace(weight=2 * cell.weight, count=cell.count + 1)

    out, vjp_fn = es.vjp(f, Cell())
    (grads,) = vjp_fn(out.filter(es.Parameter).replace(mean=1.0))
    assert (grads.weight, grads.mean, grads.count, grads.rng) == (2.0, 1.0, None, None)
    _, moved = es.jvp(f, (Cell(),), (Cell(1.0, None, 1.0, None),))
    assert (moved.weight, moved.mean) == (2.0, 1.0)
    assert moved.count.dtype == moved.rng.dtype == jax.dtypes.float0


# --- State ----------------------------------------------------------------------------


@each_way
def test_state_is_threaded_once(way):
    def through(net, x):
        return way(lambda cell, x: cell(x), (net.cell, x))[0]

    def plain(net, x):
        return net.cell(x)

    close(es.mutable(through)(Net(), 0.7), es.mutable(plain)(Net(), 0.7))
    assert es.mutable(through)(Net(), 0.7)[1].cell.count == 1


@each_way
def test_the_module_may_be_the_function_its_method_or_in_its_closure(way):
    def ways(net, x):
        yield lambda: way(net.cell, (x,))
        yield lambda: way(net.cell.__call__, (x,))
        yield lambda: way(ft.partial(Cell.__call__, net.cell), (x,))
        yield lambda: way(lambda x: net.cell(x), (x,))

    def one(net, x, i):
        return list(ways(net, x))[i]()

    first = es.mutable(one)(Net(), 0.7, 0)
    for i in (1, 2, 3):
        close(es.mutable(one)(Net(), 0.7, i), first)
    assert first[1].cell.count == 1


def test_the_parts_of_a_module_in_an_argument_are_differentiated_with_its_state():
    def f(net, x):
        y, vjp_fn = es.vjp(lambda cell, x: (cell(x), cell.mean), net.cell, x)
        return vjp_fn((0.0, 1.0))

    (cell, x), new = es.mutable(f)(Net(), 0.7)
    assert type(cell) is Cell
    close((cell.weight, cell.mean, x), (jnp.array(0.7), jnp.array(0.5), jnp.array(0.5)))
    assert (cell.count, cell.rng) == (None, None)
    close(new.cell.mean, jnp.array(0.35))


@each_way
def test_what_the_function_closes_over_is_a_constant(way):
    def f(net):
        return way(lambda cell: cell.weight * net.cell.weight, (net.cell,))

    (out, moved), _ = es.mutable(f)(Net())
    grad = moved[0].weight if isinstance(moved, tuple) else moved
    assert (out, grad) == (0.25, 0.5)


def test_an_argument_that_is_given_twice_has_two_cotangents():
    def f(net):
        _, vjp_fn = es.vjp(lambda a, b: a.weight**2 * b.weight, net.cell, net.cell)
        return vjp_fn(1.0)

    (a, b), _ = es.mutable(f)(Net())
    assert (a.weight, b.weight) == (0.5, 0.25)


@each_way
@pytest.mark.parametrize("has_other", [False, True])
def test_state_that_is_written_both_ways_is_an_error(way, has_other):
    def closed(net):
        return way(lambda cell: cell(1.0) + net.cell.mean, (net.cell,))

    def twice(net):
        return way(lambda a, b: a(1.0) + b.mean, (net.cell, net.cell))

    with rejects(Net(), ValueError, r"`cell\.mean` is reached twice", "differentiat"):
        es.mutable(twice if has_other else closed)(Net())


@each_way
def test_outer_gradients_flow_through_the_state(way):
    def loss(net, x, way):
        way(net.cell, (x,))
        return net.cell.mean + 0.1 * net.cell(x)

    ours = es.value_and_grad(ft.partial(loss, way=way))(Net(), 0.7)
    plain = es.value_and_grad(ft.partial(loss, way=lambda f, x: f(*x)))(Net(), 0.7)
    close(ours, plain)
    assert ours[1].cell.weight != 0


@each_way
def test_the_auxiliary_output_and_the_rest_may_be_anything(way):
    def f(net):
        def g(x):
            return (net.cell(x), jnp.tanh), (net.other, "aux", 2 * net.cell.mean)

        (_, act), _, (other, word, mean) = way_with_aux(g)
        net.other = other
        return act is jnp.tanh, word, mean

    def way_with_aux(g):
        out, fn, *aux = es.vjp(g, 0.7, has_aux=True)
        if way is not jvp_by_vjp:
            return way(g, (0.7,), has_aux=True)
        return out, fn, *aux

    model = Net()
    (same, word, mean), new = es.mutable(f)(model)
    assert (same, word) == (True, "aux")
    assert new.other.weight is model.other.weight
    close(mean, 2 * new.cell.mean)


@each_way
def test_they_work_inside_the_other_transforms(way):
    def step(net, x, way):
        out = way(lambda cell, x: cell(x), (net.cell, x))[0]
        net.steps = net.steps + 1
        return out

    def run(net, xs, way):
        a = es.vmap(lambda x: step(net, x, lambda f, p: way(lambda c, x: x, p)))(xs)
        b = es.scan(lambda c, x: (c, step(net, x, way)), 0, xs)[1]
        c = es.checkpoint(lambda x: step(net, x, way))(xs[0])
        d = es.cond(c > 9, lambda: c, lambda: step(net, xs[1], way))
        e = way(lambda x: step(net, x, way), (xs[1],))[0]
        return a, b, c, d, e

    xs = jnp.array([0.3, 0.7])
    plain = es.mutable(run)(Net(), xs, lambda f, p: (f(*p),))
    close(es.jit(es.mutable(run))(Net(), xs, way), plain)
    assert plain[1].steps == 6


@each_way
def test_what_is_sown_comes_out_once(way):
    def f(net):
        return way(lambda cell: cell(0.7), (net.cell,))[0]

    (_, new), sown = es.capture(f)(Net())
    close(sown, {"cell.seen": jnp.array(0.7)})
    assert new.cell.count == 1


class Lazy(es.Module):
    weight: es.Parameter | None = None
    calls: es.State = 0

    def __call__(self, x):
        if self.weight is None:
            self.weight = jnp.full(x.shape, 2.0)
        self.calls = self.calls + 1
        return (self.weight * x).sum()


class Outer(es.Module):
    lazy: Lazy = dataclasses.field(default_factory=Lazy)

    def __call__(self, x):
        self.lazy(x)
        y, vjp_fn = es.vjp(lambda lazy, x: lazy(x), self.lazy, x)
        _, moved = es.jvp(self.lazy, (x,), (x,))
        _, jvp_fn = es.linearize(lambda lazy: lazy(x), self.lazy)
        return y, vjp_fn(1.0)[1], moved, jvp_fn(ones(self.lazy))


class OuterFirst(Outer):
    def __call__(self, x):
        (grads, _) = es.vjp(lambda lazy, x: lazy(x), self.lazy, x)[1](1.0)
        return 2.0 * grads.weight  # of what this very call has made


@pytest.mark.parametrize("cls", [Outer, OuterFirst])
def test_they_run_while_init_does(cls):
    x = jnp.arange(3.0)
    model = cls().init(0, x)
    close(model.lazy.weight, jnp.full(3, 2.0))
    assert model.lazy.calls == 0
    out, _ = es.mutable(model)(x)
    close(out, (jnp.array(6.0), 2 * jnp.ones(3), jnp.array(6.0), jnp.array(3.0))
          if cls is Outer else 2 * x)  # fmt: skip


def test_a_model_in_no_scope_is_an_ordinary_argument():
    cell = Cell(count=3)
    y, vjp_fn = es.vjp(lambda cell, x: cell.weight * x, cell, 2.0)
    (grads, by_x) = vjp_fn(1.0)
    assert (y, grads.weight, grads.mean, grads.count, by_x) == (
        1.0,
        2.0,
        0.0,
        None,
        0.5,
    )
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    (grads,) = es.vjp(lambda m: m(jnp.ones(2)), linear)[1](jnp.ones(2))
    close(grads.weight, jnp.ones((2, 2)))


# --- The functions that come back -----------------------------------------------------


def test_the_functions_pass_through_jit():
    def make(cell, x):
        _, vjp_fn = es.vjp(lambda cell, x: cell.weight * jnp.sin(x), cell, x)
        _, jvp_fn = es.linearize(lambda x: cell.weight * jnp.sin(x), x)
        return vjp_fn, jvp_fn

    expected = make(Cell(), 0.7)
    for jit in (es.jit, eqx.filter_jit):
        made = jit(make)(Cell(), 0.7)
        for call in (jit(lambda f, x: f(x)), lambda f, x: f(x)):
            for f, g in zip(made, expected, strict=True):
                close(call(f, 2.0), g(2.0))
    assert jax.tree.leaves(made)


def test_a_function_that_was_compiled_with_its_maker_compiles_once():
    make = es.jit(lambda x: es.vjp(jnp.sin, x)[1])
    call = es.jit(eqx.debug.assert_max_traces(lambda f, x: f(x), max_traces=1))
    for x in jnp.array([0.1, 0.2]):
        close(call(make(x), 1.0), (jnp.cos(x),))


def test_the_functions_may_be_called_after_the_scope_and_often():
    def f(net, x):
        return es.vjp(lambda cell: cell(x), net.cell)[1]

    vjp_fn, new = es.mutable(f)(Net(), 0.7)
    first, second = vjp_fn(1.0), vjp_fn(1.0)
    close(first, second)
    assert new.cell.count == 1


# --- Errors ---------------------------------------------------------------------------


@leaks_on_purpose
@pytest.mark.parametrize(
    "f",
    [
        lambda net: jax.vjp(net.cell, 1.0),
        lambda net: jax.jvp(net.cell, (1.0,), (1.0,)),
        lambda net: jax.linearize(net.cell, 1.0),
    ],
    ids=["vjp", "jvp", "linearize"],
)
def test_under_those_of_jax_a_write_is_an_error_that_names_ours(f):
    with rejects(Net(), es.TraceError, r"`cell\.count`", "`es.vjp`", "`es.linearize`"):
        es.mutable(f)(Net())


@each_way
def test_outside_a_scope_a_write_is_an_error(way):
    with rejects(Cell(), FROZEN, "Cell.count"):
        way(lambda cell, x: cell(x), (Cell(), 1.0))


@each_way
def test_without_a_pair_there_is_no_auxiliary_output(way):
    with pytest.raises(TypeError, match=r"returns a pair, `\(out, aux\)`.*f32\[\]`"):
        way(jnp.sin, (jnp.array(1.0),), has_aux=True)


@each_way
def test_a_function_that_raises_leaves_the_state_as_it_was(way):
    def f(net):
        def g(x):
            net.cell(x)
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            way(g, (1.0,))
        return net.cell.count

    assert es.mutable(f)(Net())[0] == 0


def test_a_model_that_is_not_initialized_is_named():
    with pytest.raises(
        es.NotInitializedError, match=r"`weight` is an `es.Initializer`"
    ):
        es.vjp(lambda m, x: m.weight * x, Cell(es.Initializer(jr.normal)), 1.0)


def test_a_module_in_two_places_of_an_argument_is_an_error():
    cell = Cell()
    with pytest.raises(ValueError, match="two places|twice"):
        es.vjp(lambda cells: cells[0].weight, [cell, cell])
