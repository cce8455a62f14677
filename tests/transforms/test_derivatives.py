"""`es.vjp`, `es.jvp`, `es.linearize` and the Jacobians: like JAX's, with state."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, rejects, reuses_keys
from models import Lazy

import eqx_state as es


# The tests call one model, with its keys, in several ways. The zoo checks key reuse.
pytestmark = reuses_keys

FLOAT0 = np.zeros((), jax.dtypes.float0)
X = jnp.array([0.3, 0.7, -0.2])


class Cell(es.Module):
    weight: es.Parameter = 0.5
    count: es.State = 0
    mean: es.BatchStat = 0.0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))

    def __call__(self, x):
        self.count = self.count + 1
        self.rng, key = jr.split(self.rng)
        self.mean = 0.5 * self.mean + jnp.sum(self.weight * x)
        self.sow("seen", x)
        return jnp.sin(self.weight * x) * jr.uniform(key)


class Net(es.Module):
    cell: Cell = dataclasses.field(default_factory=Cell)
    other: Cell = dataclasses.field(default_factory=lambda: Cell(-1.5))
    steps: es.State = 0


# --- One calling convention for all ---------------------------------------------------


def ones(tree):
    # Integers and functions do not have tangents.
    return jax.tree.map(lambda x: jnp.ones_like(x) if is_inexact(x) else None, tree)


def is_inexact(x):
    return eqx.is_inexact_array(x) or type(x) is float


def vjp(fun, *primals, **options):
    out, vjp_fn, *aux = es.vjp(fun, *primals, **options)
    return out, vjp_fn(ones(out)), *aux


def jvp(fun, *primals, **options):
    return es.jvp(fun, primals, ones(primals), **options)


def linearize(fun, *primals, **options):
    out, jvp_fn, *aux = es.linearize(fun, *primals, **options)
    return out, jvp_fn(*ones(primals)), *aux


def jacobian(name):
    def run(fun, *primals, has_aux=False):
        argnums = tuple(range(len(primals)))
        found = getattr(es, name)(fun, argnums, has_aux)(*primals)
        return (None, *found) if has_aux else (None, found)

    return run


JACOBIANS = ["jacfwd", "jacrev", "hessian"]
WAYS = {"vjp": vjp, "jvp": jvp, "linearize": linearize}
ALL = WAYS | {name: jacobian(name) for name in JACOBIANS}
# `hessian` stands for all Jacobians: it is a `jacfwd` of a `jacrev`.
FOUR = WAYS | {"hessian": ALL["hessian"]}
each = pytest.mark.parametrize("way", FOUR.values(), ids=FOUR)
each_jacobian = pytest.mark.parametrize("name", JACOBIANS)


# --- Like JAX -------------------------------------------------------------------------


def pair(x, y):
    return x["a"] * jnp.sin(y[0]), {"b": x["a"].sum()}


PLAIN = {
    "numbers": (lambda x, y: x * y, (2.0, 3.0)),
    "NumPy": (jnp.cumsum, (np.arange(3.0, dtype=np.float32),)),
    "complex": (lambda z: z * z, (jnp.array([1 + 2j, 3j]),)),
    "a dict and a tuple": (pair, ({"a": jnp.arange(2.0)}, (jnp.array(3.0),))),
    "a constant output": (lambda x: (x, jnp.ones(2)), (1.0,)),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("has_aux", [False, True])
def test_on_arrays_they_equal_those_of_jax(name, has_aux):
    fun, primals = PLAIN[name]
    f = (lambda *x: (fun(*x), {"n": 3, "x": x})) if has_aux else fun

    def run(module):
        tangents = jax.tree.map(jnp.ones_like, primals)
        out, vjp_fn, *aux = module.vjp(f, *primals, has_aux=has_aux)
        grads = vjp_fn(jax.tree.map(jnp.ones_like, out))
        yield out, grads, aux
        yield module.jvp(f, primals, tangents, has_aux)
        out, jvp_fn, *aux = module.linearize(f, *primals, has_aux=has_aux)
        yield out, jvp_fn(*tangents), aux

    close([*run(es)], [*run(jax)])


def product(x, y):
    return x * jnp.sin(y), {"sum": x.sum() + y[0] * y[1]}


PLAIN_JACOBIANS = {
    "the last": (product, {"argnums": -1}, (X, X + 1)),
    "both, in a list": (product, {"argnums": [1, 0]}, (X, X + 1)),
    "a dict": (lambda d: d["a"] * d["b"], {}, ({"a": X, "b": X * 2},)),
    "an auxiliary output": (lambda x: (x * x, {"n": x}), {"has_aux": True}, (X,)),
    "holomorphic": (lambda z: z * z * z, {"holomorphic": True}, (X + 1j,)),
    "by name": (lambda x, y=2.0: y * x**3, {}, (X,)),
}


@each_jacobian
@pytest.mark.parametrize("case", PLAIN_JACOBIANS)
def test_on_arrays_a_jacobian_equals_that_of_jax(name, case):
    fun, options, args = PLAIN_JACOBIANS[case]
    kwargs = {"y": 3.0} if case == "by name" else {}

    def run(module):
        return getattr(module, name)(fun, **options)(*args, **kwargs)

    close(run(es), run(jax))


# --- Which values have tangents -------------------------------------------------------


def test_only_inexact_arrays_have_tangents_and_cotangents():
    def f(cell, x):
        return cell["n"] * cell["w"] * x[0], cell["n"]

    primals = {"w": jnp.ones(2), "n": 3, "f": jnp.sin}, (jnp.arange(2.0), jr.key(0))
    (_, n), vjp_fn = es.vjp(f, *primals)
    assert n == 3
    expected = {"w": jnp.array([0.0, 3.0]), "n": None, "f": None}
    for zero in (None, FLOAT0):
        close(vjp_fn((jnp.ones(2), zero)), (expected, (jnp.full(2, 3.0), None)))
    tangents = {"w": jnp.ones(2), "n": FLOAT0, "f": None}, (jnp.zeros(2), None)
    _, (moved, none) = es.jvp(f, primals, tangents)
    close(es.linearize(f, *primals)[1](*tangents)[0], moved)
    close(moved, expected["w"])
    assert none.dtype == jax.dtypes.float0


@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
def test_a_jacobian_is_none_for_values_that_are_not_inexact(name):
    model = {"w": X, "n": jnp.array(2), "f": jnp.sin, "k": jr.key(0)}
    f = lambda m: {"out": m["n"] * m["w"], "f": m["f"]}  # noqa: E731
    expected = {"w": 2 * jnp.eye(3), "n": None, "f": None, "k": None}
    close(getattr(es, name)(f)(model), {"out": expected, "f": None})


def test_a_returned_module_has_cotangents_for_its_inexact_arrays():
    def f(cell):
        return cell.replace(weight=2 * cell.weight, count=cell.count + 1)

    out, vjp_fn = es.vjp(f, Cell())
    (grads,) = vjp_fn(out.filter(es.Parameter).replace(mean=1.0))
    assert (grads.weight, grads.mean, grads.count, grads.rng) == (2.0, 1.0, None, None)
    _, moved = es.jvp(f, (Cell(),), (Cell(1.0, None, 1.0, None),))
    assert (moved.weight, moved.mean) == (2.0, 1.0)
    assert moved.count.dtype == moved.rng.dtype == jax.dtypes.float0


def test_only_forward_mode_differentiates_a_while_loop():
    def cube(x):
        step = lambda c: (c[0] + 1, c[1] * x)  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < 3, step, (0, 1.0))[1]

    assert es.jacfwd(cube)(2.0) == 12.0
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        es.jacrev(cube)(2.0)


def test_integers_are_allowed_on_request_and_text_always():
    f = es.jacrev(lambda n, x: {"a": n * x}, (0, 1), allow_int=True)
    assert f(jnp.array(3), 2.0) == {"a": (None, 3.0)}
    with pytest.raises(TypeError, match="argument 0 has no inexact arrays"):
        es.jacrev(lambda n: 2 * n, allow_int=True)(jnp.array(3))
    for jacobian in (es.jacfwd, es.jacrev):
        with pytest.raises(TypeError, match="argument 0 has no inexact arrays"):
            jacobian(lambda n, x: n * x, (0, 1))(jnp.array(3), 2.0)
    named, tangent = {"x": 2.0, "names": np.array(["a"])}, {"x": 1.0, "names": None}
    assert es.jvp(lambda d: d["x"] * 3.0, (named,), (tangent,)) == (6.0, 3.0)


# --- State ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ALL.values(), ids=ALL)
def test_state_is_updated_once(way):
    def f(net, x):
        return way(lambda x: net.cell(x), x)

    out, expected = es.mutable(lambda net, x: net.cell(x))(Net(), X)
    key = jr.split(jr.key(0))[1]
    _, by_hand = way(lambda x: jnp.sin(0.5 * x) * jr.uniform(key), X)
    (found, derivative), new = es.mutable(f)(Net(), X)
    close((new, derivative), (expected, by_hand))
    if way in WAYS.values():
        close(found, out)


FORMS = {
    "module": lambda cell: cell,
    "method": lambda cell: cell.__call__,
    "partial": lambda cell: ft.partial(Cell.__call__, cell),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_module_that_is_called_is_not_an_argument(form):
    def f(net, x):
        return es.vjp(form(net.cell), x)[1](jnp.ones(3))

    grads, new = es.mutable(f)(Net(), X)
    assert len(grads) == new.cell.count == 1


def test_each_place_in_an_argument_has_its_own_tangents_and_cotangents():
    def run(pair):
        return 3.0 * pair[0].weight + 5.0 * pair[1].weight

    def f(net):
        _, once = es.vjp(lambda cell: cell.weight * net.cell.weight, net.cell)
        assert once(1.0)[0].weight == 0.5  # the closure is a constant
        pair = net.cell, net.cell
        one = es.filter(net.cell.replace(weight=1.0), es.Parameter)
        _, by_first = es.jvp(run, (pair,), ((one, None),))
        _, by_both = es.jvp(run, (pair,), ((one, one),))
        (cotangents,) = es.vjp(run, pair)[1](1.0)
        jacobian = es.jacfwd(run)(pair)
        found = [x.weight for x in (*cotangents, *jacobian)]
        return [by_first, by_both, *found]

    assert es.mutable(f)(Net())[0] == [3.0, 8.0, 3.0, 5.0, 3.0, 5.0]


@pytest.mark.parametrize("has_other", [False, True])
def test_state_that_is_written_both_ways_is_an_error(has_other):
    def closed(net):
        return es.vjp(lambda cell: cell(1.0) + net.cell(1.0), net.cell)[0]

    def twice(net):
        return es.vjp(lambda a, b: a(1.0) + b(1.0), net.cell, net.cell)[0]

    with rejects(Net(), ValueError, r"`cell\.\w+` is reached twice", "differentiat"):
        es.mutable(twice if has_other else closed)(Net())


@each
def test_outer_gradients_flow_through_the_state(way):
    def loss(net, x, way):
        way(lambda cell, x: cell(x), net.cell, x)
        return net.cell.mean + 0.1 * net.cell(x).sum()

    ours = es.value_and_grad(ft.partial(loss, way=way))(Net(), X)
    plain = es.value_and_grad(ft.partial(loss, way=lambda f, *x: f(*x)))(Net(), X)
    close(ours, plain)
    assert ours[1].cell.weight != 0


@each
def test_the_auxiliary_output_may_be_anything(way):
    def f(net):
        def g(x):
            return net.cell(x), (net.other, "aux", 2 * net.cell.mean)

        _, _, (net.other, word, mean) = way(g, 0.7, has_aux=True)
        return word, mean

    model = Net()
    (word, mean), new = es.mutable(f)(model)
    assert word == "aux"
    close(mean, 2 * new.cell.mean)
    assert new.other.weight is model.other.weight
    if way in WAYS.values():  # outputs that are not arrays do not change
        assert way(lambda x: (x, jnp.tanh, 3), X)[0][1:] == (jnp.tanh, 3)


def test_they_work_inside_the_other_transforms():
    def step(net, x, way):
        way(lambda x: net.cell(x).sum(), x)
        net.steps = net.steps + 1
        return net.cell.mean

    def run(net, xs, way):
        a = es.scan(lambda c, x: (c, step(net, x, way)), 0, xs)[1]
        b = es.checkpoint(lambda x: step(net, x, way))(xs[0])
        c = es.cond(b > 9, lambda: b, lambda: step(net, xs[1], way))
        way(lambda x: step(net, x, way), xs[1])
        return a, b, c

    xs = jnp.array([0.3, 0.7])
    ours = es.jit(es.mutable(run))(Net(), xs, vjp)
    close(ours, es.mutable(run)(Net(), xs, lambda f, *args: f(*args)))
    assert ours[1].steps == 5
    by_lane = es.vmap(lambda x: vjp(lambda x: x**2, x)[1][0])(xs)
    close(by_lane, 2 * xs)


@each
def test_sown_values_are_returned_once(way):
    def f(net):
        way(lambda cell: cell(X), net.cell)

    close(es.capture(f)(Net())[1], {"cell.seen": X})


@each
def test_they_work_inside_init(way):
    call = lambda m, x: way(lambda x: m(x).sum(), x)  # noqa: E731
    expected = es.init(Lazy(), 0, X)
    assert eqx.tree_equal(es.init(Lazy(), 0, X, call=call), expected)


def test_a_model_outside_a_scope_is_an_ordinary_argument():
    y, vjp_fn = es.vjp(lambda cell, x: cell.weight * x, Cell(count=3), 2.0)
    grads, by_x = vjp_fn(1.0)
    assert (y, grads.weight, grads.mean, grads.count) == (1.0, 2.0, 0.0, None)
    assert by_x == 0.5


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

    @es.vmap
    @es.jacfwd
    def lanes(self, x):
        return self.weight * x**2


def test_argnums_of_a_decorated_method_do_not_count_self():
    def run(model):
        return model.forward(3.0), model.reverse(2.0, 3.0)

    (a, (b, aux)), new = es.mutable(run)(Decorated())
    assert (a, b, aux, new.count) == (12.0, 24.0, "aux", 2)
    assert Decorated(count=5).lanes(jnp.ones(2)).tolist() == [4.0, 4.0]
    assert Decorated.forward.__name__ == "forward"


class Tied(es.Module):
    pair: eqx.nn.Shared

    def __call__(self, x):
        a, b = self.pair()
        return a(b(x)).sum()


def test_gradients_of_tied_layers_have_the_stored_structure():
    def run(model, x):
        (by_vjp, _) = es.vjp(lambda model, x: model(x), model, x)[1](1.0)
        (_, new), grads = es.value_and_grad(lambda model: model(x))(model)
        return by_vjp, new, grads

    pair = Cell(rng=jr.key(1)), Cell()
    model = Tied(eqx.nn.Shared(pair, lambda x: x[1], lambda x: x[0]))
    (by_vjp, inner, grads), new = es.mutable(run)(model, X)
    for tree in (by_vjp, inner, grads, new):
        assert type(tree.pair) is eqx.nn.Shared
    assert (new.pair.pytree[0].count, inner.pair.pytree[0].count) == (2, 4)
    assert grads.pair.pytree[0].weight != 0


# --- The returned functions -----------------------------------------------------------


def test_the_functions_pass_through_jit():
    def make(cell, x):
        _, vjp_fn = es.vjp(lambda cell, x: cell.weight * jnp.sin(x), cell, x)
        _, jvp_fn = es.linearize(lambda x: cell.weight * jnp.sin(x), x)
        return vjp_fn, jvp_fn

    expected = make(Cell(), 0.7)
    for jit in (es.jit, eqx.filter_jit):
        made = jit(make)(Cell(), 0.7)
        for f, g in zip(made, expected, strict=True):
            close(f(2.0), g(2.0))
            # Their leaves are arrays, so `jax.jit` takes them, too.
            for call in (jit, jax.jit):
                close(call(lambda f, x: f(x))(f, 2.0), g(2.0))


def test_a_function_returned_by_a_jitted_function_compiles_once():
    make = es.jit(lambda x: es.vjp(jnp.sin, x)[1])
    call = es.jit(eqx.debug.assert_max_traces(lambda f, x: f(x), max_traces=1))
    for x in jnp.array([0.1, 0.2]):
        close(call(make(x), 1.0), (jnp.cos(x),))


# --- Invalid tangents and cotangents --------------------------------------------------


class Layer(es.Module):
    weight: es.Parameter
    count: es.State
    name: object = "layer"

    def __call__(self, x):
        return self.weight * x, self.count


ONES = jnp.ones(2)
LAYER = Layer(ONES, jnp.array(3))
TAKE = {
    "vjp": lambda given: es.vjp(lambda layer: layer, LAYER)[1](given),
    "jvp": lambda given: es.jvp(lambda layer: layer(2.0), (LAYER,), (given,)),
    "linearize": lambda given: es.linearize(lambda m: m(2.0), LAYER)[1](given),
}


@pytest.mark.parametrize("name", TAKE)
def test_none_and_zeros_are_accepted_where_there_are_no_tangents(name):
    for count in (None, FLOAT0):
        TAKE[name](Layer(ONES, count, None))
    if name != "vjp":
        TAKE[name](Layer(ONES, None, None).eval())  # modes may differ


def test_none_in_a_gradient_counts_as_zeros():
    class Norm(es.Module):
        scale: es.Parameter
        mean: es.BatchStat

        def __call__(self, x):
            return self.scale * (x - self.mean)

    def by_both(*tangents):
        _, moved = es.jvp(lambda norm, x: norm(x), (norm, x), tangents)
        close(es.linearize(lambda norm, x: norm(x), norm, x)[1](*tangents), moved)
        return moved

    norm, x = Norm(2.0, jnp.array([1.0, 3.0])), jnp.array([4.0, 5.0])
    grads, _ = es.grad(lambda norm: jnp.sum(norm(x)))(norm)
    assert grads.mean is None
    dx = jnp.ones(2)
    close(by_both(grads, dx), grads.scale * (x - norm.mean) + norm.scale * dx)
    close(by_both(None, dx), norm.scale * dx)


BAD = {
    "structure": ({"w": ONES}, r"\[0\]`: .*`{'w': f32"),
    "integer": (Layer(ONES, 1, None), r"\[0\]\.count`: .*`None`"),
    "static": (Layer(ONES, None, "x"), r"\[0\]\.name`: .*`None`"),
    "shape": (Layer(jnp.ones(3), None, None), r"\(2,\)|float32\[2\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_tangents_that_do_not_fit_are_an_error_that_names_the_path(case):
    given, message = BAD[case]
    for name in ("jvp", "linearize"):
        with pytest.raises((TypeError, ValueError), match=message):
            TAKE[name](given)


def test_a_wrong_number_of_tangents_is_an_error():
    for call in (
        lambda: es.jvp(jnp.sin, (1.0,), (1.0, 2.0)),
        lambda: es.linearize(jnp.sin, 1.0)[1](1.0, 2.0),
    ):
        with pytest.raises(TypeError, match=r"differ in structure.*`\(f32\[\],\)`"):
            call()


# --- Other errors ---------------------------------------------------------------------


@pytest.mark.parametrize("given", [((1.0,), 1.0), (jnp.ones(1), (1.0,))])
def test_jvp_takes_tuples(given):
    with pytest.raises(TypeError, match=r"must be tuples.*`(float|ArrayImpl)`"):
        es.jvp(jnp.sin, *given)


@pytest.mark.parametrize(
    ("argnums", "error", "message"),
    [
        (2, TypeError, r"argnums=2\)` was called with 2 positional"),
        ((0, -3), TypeError, r"argnums=\(0, -3\)\)` was called with 2 positional"),
        ((0, -2), ValueError, r"argnums=\(0, -2\)\)` names argument 0 twice"),
        (1, TypeError, "argument 1 has no inexact arrays"),
        ("x", TypeError, r"argnums='x'.*an integer, or a tuple"),
    ],
    ids=["beyond", "before", "twice", "integer", "name"],
)
def test_arguments_that_cannot_be_differentiated(argnums, error, message):
    with pytest.raises(error, match=message):
        es.jacrev(lambda x, n: x * x * n, argnums)(2.0, 3)


def test_has_aux_requires_a_pair():
    with pytest.raises(TypeError, match=r"return a pair, `\(out, aux\)`.*f32\[3\]`"):
        es.vjp(lambda x: x, X, has_aux=True)


def test_a_model_that_is_not_ready_is_named():
    with pytest.raises(es.NotInitializedError, match="`weight` is an `es.Init"):
        es.vjp(lambda m, x: m.weight * x, Cell(es.Initializer(jr.normal)), 1.0)
    with pytest.raises(es.NotInitializedError, match="`weight` is an `es.Init"):
        es.vjp(Cell(es.Initializer(jr.normal)), 1.0)
    cell = Cell()
    with pytest.raises(ValueError, match="two places|twice"):
        es.vjp(lambda cells: cells[0].weight, [cell, cell])
