"""`es.shard_map`: `jax.shard_map`, with state, keys and statistics passed through."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import close, rejects, reuses_keys
from jax.sharding import Mesh, PartitionSpec as P

import eqx_state as es


# The tests call one model, with its keys, in several ways. The zoo checks key reuse.
pytestmark = reuses_keys

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
LINE = Mesh(np.array(jax.devices()[:2]), "data")
ROWS = P("data")
XS = jnp.arange(8.0).reshape(4, 2)


def mapped(f, in_specs=ROWS, out_specs=ROWS, mesh=LINE, **options):
    return es.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


class Norm(es.Module):
    weight: es.Parameter = 2.0
    mean: es.BatchStat = 0.0
    calls: es.State = 0
    rng: es.Rng = dataclasses.field(default_factory=lambda: jr.key(0))

    def __call__(self, xs):
        self.calls = self.calls + 1
        mean = jax.lax.pmean(jnp.mean(xs), "data")
        self.mean = 0.5 * self.mean + 0.5 * mean
        return self.weight * (xs - mean)

    def noisy(self, xs):
        self.rng, key = jr.split(self.rng)
        noise = jr.normal(key, xs.shape)
        self.sow("noise", noise[0, 0])
        return xs + noise


# --- Like JAX -------------------------------------------------------------------------


PLAIN = {
    "one spec for all": (lambda x, y: x * y, dict(in_specs=ROWS, out_specs=ROWS)),
    "a spec for each": (
        lambda x, y: {"sum": jax.lax.psum(jnp.sum(x), "data"), "y": y},
        dict(in_specs=(ROWS, P(None, "data")),
             out_specs={"sum": P(), "y": P(None, "data")}),
    ),
    "unchecked": (
        lambda x, y: x, dict(in_specs=ROWS, out_specs=P(), check_vma=False)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_on_arrays_it_equals_that_of_jax(name):
    f, options = PLAIN[name]
    args = (XS, 2 * XS)
    ours, theirs = (m.shard_map(f, mesh=LINE, **options)(*args) for m in (es, jax))
    close(ours, theirs)


def test_the_mesh_may_come_from_the_context():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    norm = Norm()
    with jax.set_mesh(mesh):
        xs = jax.device_put(XS, jax.NamedSharding(mesh, ROWS))
        f = es.shard_map(norm, out_specs=ROWS)  # JAX infers the specs from the types
        out, new = es.jit(es.mutable(f))(xs)
        noisy, _ = es.mutable(es.shard_map(norm.noisy, out_specs=ROWS))(xs)
        assert noisy.sharding == xs.sharding
    expected, other = es.jit(es.mutable(mapped(norm)))(XS)
    close((np.asarray(out), float(new.mean)), (np.asarray(expected), float(other.mean)))


def test_values_that_are_not_arrays_pass_through():
    out = mapped(lambda d, n: {"x": d["x"] * n, "f": d["f"]}, (ROWS, None))(
        {"x": XS, "f": jnp.sin}, 3
    )
    close(out["x"], 3 * XS)
    assert out["f"] is jnp.sin


# --- State ----------------------------------------------------------------------------


WAYS = {
    "the closure": lambda norm, xs: mapped(lambda xs: norm(xs))(xs),
    "an argument": lambda norm, xs: mapped(
        lambda norm, xs: norm(xs), (P(), ROWS)
    )(norm, xs),
    "without a spec": lambda norm, xs: mapped(
        lambda norm, xs: norm(xs), (None, ROWS)
    )(norm, xs),
    "by rules": lambda norm, xs: mapped(
        lambda norm, xs: norm(xs), ({es.Rng: es.SPLIT, ...: P()}, ROWS)
    )(norm, xs),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_those_on_one_device(way):
    def loss(norm, xs):
        return jnp.mean(jnp.sin(WAYS[way](norm, xs))) + norm.mean * norm.weight

    def plain(norm, xs):
        mean = jnp.mean(xs)
        norm.mean = 0.5 * norm.mean + 0.5 * mean
        norm.calls = norm.calls + 1
        return jnp.mean(jnp.sin(norm.weight * (xs - mean))) + norm.mean * norm.weight

    ours = es.jit(es.value_and_grad(loss))(Norm(), XS)
    close(ours, es.value_and_grad(plain)(Norm(), XS))


@pytest.mark.parametrize(
    ("mesh", "checked"), [(LINE, False), (MESH, True)], ids=["line", "grid"]
)
def test_each_device_draws_from_its_own_key(mesh, checked):
    spec = P(tuple(mesh.axis_names))
    f = mapped(Norm().noisy, spec, spec, mesh, check_vma=checked)
    (out, new), sown = es.jit(es.capture(f))(XS)
    noise = np.asarray(out - XS)
    assert len(np.unique(noise)) == noise.size
    assert new.rng == jr.split(jr.key(0))[0]
    close(sown["noise"], jnp.asarray(noise[:: 4 // mesh.size, 0]))


@pytest.mark.parametrize("checked", [True, False])
def test_sown_values_are_differentiable_whether_devices_differ_or_not(checked):
    class Scale(es.Module):
        weight: es.Parameter = 3.0

        def __call__(self, xs):
            self.sow("shared", self.weight**2)
            self.sow("own", self.weight * jnp.sum(xs))
            return xs

    def loss(model):
        call = lambda model, xs: mapped(model, check_vma=checked)(xs)  # noqa: E731
        sown = es.capture(call)(model, XS)[1]
        assert sown["shared"].shape == sown["own"].shape == (2,)
        return jnp.sum(sown["shared"]) + jnp.sum(sown["own"])

    grads = jax.jit(jax.grad(loss))(Scale())
    assert grads.weight == 2 * 2 * 3 + XS.sum()


@pytest.mark.parametrize("entry", [P(), "rules"])
def test_an_owned_module_in_the_arguments_draws_as_if_closed_over(entry):
    class Keyed(es.Module):
        rng: es.State  # a slip: `es.Rng`

        def __call__(self, x):
            self.rng, key = jr.split(self.rng)
            return x + jr.normal(key)

    axes = {es.Rng: es.SPLIT, es.State: es.SPLIT} if entry == "rules" else entry
    model, xs = Keyed(jr.key(0)), jnp.ones(2)
    by_entry = mapped(lambda m, x: m(x), (axes, ROWS), ROWS)
    y, new = es.jit(es.mutable(by_entry))(model, xs)
    assert y[0] != y[1]
    closed_over = es.mutable(lambda m, x: mapped(m)(x))
    expected, after = es.jit(closed_over)(model, xs)
    assert (y == expected).all()
    assert eqx.tree_equal(new, after)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("entry", [P(), {es.Rng: P()}], ids=["split", "shared"])
def test_each_device_has_the_keys_of_a_module_that_no_scope_owns(entry, checked):
    def draw(argument, xs):
        (norm,), key = argument
        return es.mutable(norm.noisy)(0 * xs)[0], jr.normal(key, xs.shape) + 0 * xs

    entries = [[entry], P()], ROWS
    own, bare = mapped(draw, entries, check_vma=checked)([[Norm()], jr.key(1)], XS)
    assert (own[0] == own[2]).all() == (entry != P())
    assert (bare[0] == bare[2]).all()

    def returned(norm, xs):
        return norm.replace(weight=norm.weight + 1.0), xs

    run = mapped(returned, (entry, ROWS), (P(), ROWS), check_vma=checked)
    if entry == P():
        says = r"`out_specs=P\(\)`.* `rng` differs.*`in_specs=\(\{es\.Rng: P\(\)\}"
        with pytest.raises(ValueError, match=says):
            run(Norm(), XS)
    else:
        assert run(Norm(), XS)[0].weight == 3.0


def test_keys_in_arrays_and_legacy_keys_are_split():
    class Keys(es.Module):
        many: es.Rng
        legacy: es.Rng

        def __call__(self, x):
            keys = jax.vmap(jr.split)(self.many)
            self.many = keys[:, 0]
            self.legacy, key = jr.split(self.legacy)
            return x + jr.normal(keys[1, 1], x.shape) + jr.normal(key, x.shape)

    model = Keys(jr.split(jr.key(0), 3), jr.PRNGKey(1))
    out, new = es.jit(es.mutable(mapped(model)))(jnp.zeros(2))
    assert out[0] != out[1]
    assert new.many.shape == (3,)
    assert (new.many != model.many).all()
    assert (new.legacy != model.legacy).any()


def test_a_key_that_all_devices_assign_is_stored_and_an_unused_key_does_not_change():
    def assign(norm, xs):
        norm.rng = jr.key(7)
        return xs

    for mesh in (LINE, Mesh(np.array(jax.devices()[:1]), "data")):

        def run(norm, xs, mesh=mesh):
            return mapped(lambda xs: assign(norm, xs), mesh=mesh)(xs)

        assert es.jit(es.mutable(run))(Norm(), XS)[1].rng == jr.key(7)
    model = Norm()
    assert es.mutable(mapped(model))(XS)[1].rng is model.rng


def test_axes_give_every_device_its_part():
    model = Norm(weight=jnp.arange(2.0), mean=jnp.zeros(2))

    def run(model, xs):
        def f(xs):
            model.mean = model.mean + model.weight[0] * jnp.mean(xs)
            return xs

        axes = {es.path_matches("weight"): ROWS, es.BatchStat: ROWS, es.Buffer: None}
        return mapped(f, axes=axes)(xs)

    _, new = es.jit(es.mutable(run))(model, XS)
    close(new.mean, jnp.array([0.0, 5.5]))


def test_a_function_without_arguments_has_its_part_of_a_model():
    layer = Norm(weight=jnp.arange(2.0))
    f = eqx.Partial(lambda layer: 2 * layer.weight, layer)
    close(mapped(f, (), axes={es.Parameter: ROWS})(), jnp.array([0.0, 2.0]))
    match = r"(?s)`es\.shard_map`: `axes` would map `weight` of the `Norm`.*in_specs="
    with pytest.raises(ValueError, match=match):
        mapped(lambda: 2 * layer.weight, (), axes={es.Parameter: ROWS})()
    same = mapped(lambda: layer.weight, (), P(), axes={es.Parameter: P()})
    close(same(), layer.weight)


class Decorated(es.Module):
    weight: es.Parameter = 2.0
    calls: es.State = 0

    @es.shard_map(mesh=LINE, in_specs=(ROWS, P()), out_specs=ROWS)
    def __call__(self, xs, y):
        self.calls = self.calls + 1
        return self.weight * xs + y


def test_specs_of_a_decorated_method_do_not_count_self():
    out, new = es.mutable(Decorated())(XS, 1.0)
    close((out, new.calls), (2 * XS + 1, jnp.array(1)))


def test_it_works_inside_the_other_transforms():
    def step(norm, xs):
        norm.calls = norm.calls + 1
        return mapped(lambda xs: norm.weight * xs)(xs)

    def run(norm, xs):
        a = es.scan(lambda c, x: (c, step(norm, x)), 0, jnp.stack([xs, xs]))[1]
        b = es.vmap(lambda x: step(norm, x))(jnp.stack([xs, xs]))
        return a, b

    out, new = es.jit(es.mutable(run))(Norm(), XS)
    twice = jnp.stack([2 * XS, 2 * XS])
    close(out, (twice, twice))
    assert new.calls == 3


def test_a_partial_may_contain_arrays_of_an_outer_shard_map():
    def outer(xs):
        f = eqx.Partial(lambda xs, row: row + jnp.sum(xs), xs)
        spec = P(None, "model")
        return mapped(f, spec, spec, None, axis_names={"model"})(xs)

    sums = jnp.repeat(jnp.array([6.0, 22.0]), 2)[:, None]
    close(jax.jit(mapped(outer, mesh=MESH, axis_names={"data"}))(XS), XS + sums)


# --- Loops and branches ---------------------------------------------------------------


class Sum(es.Module):
    total: es.State = 0.0
    steps: es.State = 0

    def __call__(self, x):
        self.total = self.total + x
        self.steps = self.steps + 1
        return self.total


def scanned(model, xs):
    return es.scan(lambda c, x: (c + model(x), None), 0.0, xs)[0]


def scanned_carry(model, xs):
    new, _ = es.scan(lambda model, x: (model, model(x)), model, xs)
    model.total = new.total
    return new.total


def counted(model, xs):
    return es.fori_loop(0, 2, lambda i, y: model(xs[i]), 0.0)


def repeated(model, xs):
    return es.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, model(xs[0])), (0, 0.0)
    )[1]


def branched(model, xs):
    # The branch that is taken and writes is the last one.
    return es.switch(model.steps + 1, [lambda: xs[0], lambda: model(xs[0])])


LOOPS = [scanned, scanned_carry, counted, repeated, branched]


@pytest.mark.parametrize("loop", LOOPS)
def test_carried_state_becomes_varying_automatically(loop):
    def run(model, xs):
        def body(xs):
            y = loop(model, xs)
            model.total = jax.lax.pmean(model.total, "data")
            return y[None]

        return mapped(body)(xs)

    def by_hand(model, xs):
        ys, models = zip(*(es.mutable(loop)(model, x) for x in xs), strict=True)
        total = sum(m.total for m in models) / 2
        return jnp.stack(ys), models[0].replace(total=total)

    xs = jnp.arange(4.0)
    close(es.jit(es.mutable(run))(Sum(), xs), by_hand(Sum(), xs.reshape(2, 2)))


def test_state_that_varies_after_a_loop_is_an_error():
    f = es.mutable(lambda m, xs: mapped(lambda xs: scanned(m, xs)[None])(xs))
    with rejects(Sum(), ValueError, r"different values to `total`"):
        f(Sum(), jnp.arange(4.0))


def test_a_loop_of_one_step_over_an_array_of_numpy():
    one = np.ones(1, np.float32)
    f = mapped(lambda xs: es.scan(lambda c, x: (c + x, None), xs, one)[0])
    close(f(XS), XS + 1)


# --- Errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduced", "axes", "missing"),
    [
        ((), {}, '("data", "model")'),
        ("model", {}, '"data"'),
        ((), {es.BatchStat: P("data")}, '"model"'),
    ],
)
def test_the_error_names_the_mesh_axes_that_are_not_reduced(reduced, axes, missing):
    def f(norm, xs):
        mean = jnp.broadcast_to(jnp.mean(xs), norm.mean.shape)
        norm.mean = jax.lax.pmean(mean, reduced) if reduced else mean
        norm.rng, _ = jr.split(norm.rng)  # which differs along all axes
        return xs

    def run(norm, xs):
        spec, both = P("data", "model"), {**axes, es.Rng: es.SPLIT}
        return mapped(f, (both, spec), spec, MESH)(norm, xs)

    model = Norm(mean=jnp.zeros(2))
    ways = f"jax.lax.pmean(mean, {missing})", f"axes={{es.State: P({missing})}}"
    with rejects(model, ValueError, *map(re.escape, ways)):
        es.jit(es.mutable(run))(model, XS)


def test_without_the_check_shared_state_is_not_written():
    model = {"norm": Norm()}

    def f(model, xs, **options):
        return mapped(model["norm"], check_vma=False, **options)(xs)

    with rejects(
        model, ValueError, r"wrote `\['norm'\]\.mean`", r"axes=\{es\.BatchStat: P\(\)\}"
    ):
        es.jit(es.mutable(f))(model, XS)
    _, new = es.jit(es.mutable(lambda m, xs: f(m, xs, axes={es.State: P()})))(model, XS)
    assert (new["norm"].calls, new["norm"].mean) == (1, 1.75)

    def argument(spec):
        g = mapped(lambda norm, xs: norm(xs), (spec, ROWS), check_vma=False)
        return es.jit(es.mutable(lambda m, xs: g(m["norm"], xs)))(model, XS)

    with rejects(model, ValueError, "`es.shard_map.check_vma=False.`: .*is replicated"):
        argument(P())
    with pytest.raises(ValueError, match="this mapping is its entry of `in_specs`"):
        argument(P())
    assert argument({es.State: P()})[1]["norm"].calls == 1
    assert argument({es.State: P(), es.Parameter: P()})[1]["norm"].calls == 1


@pytest.mark.parametrize("axes", [None, {es.Rng: P()}], ids=["split", "replicated"])
def test_without_the_check_an_assigned_key_needs_a_spec(axes):
    stream, key = es.RngStream(0), jr.key(7)

    def f(stream, xs):
        def assign(xs):
            stream.key = key
            return xs

        mapped(assign, check_vma=False, axes=axes)(xs)

    _, new = es.mutable(f)(stream, XS)
    assert new.key != stream.key
    assert (new.key == key) == (axes is not None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(in_specs=0), TypeError, r"in_specs\[0\]\[0\] is 0 of type int"),
        (dict(in_specs=P("batch")), ValueError, r"(?s)'data'.*refers to 'batch'"),
        (dict(in_specs=(ROWS, ROWS)), ValueError, r"`in_specs` must be one entry"),
        (dict(in_specs=es.SPLIT), ValueError, r"`es.SPLIT` is .* `args\[0\]`"),
        (dict(mesh=None), ValueError, r"jax\.set_mesh"),
        (dict(axes={es.path_matches("x*"): P()}), ValueError, r"matches no array"),
        (dict(axes={es.State: es.SPLIT}), ValueError, r"`es.SPLIT` is .* `f.mean`"),
        (dict(axes={"State": P()}), TypeError, "`'State'` is not a filter"),
        (dict(axes={es.Parameter: ROWS}), ValueError, r"in_specs\[2\]\.weight is"),
    ],
)  # fmt: skip
def test_specs_that_do_not_fit(options, error, message):
    options = dict(mesh=LINE, in_specs=ROWS, out_specs=ROWS) | options
    with pytest.raises(error, match=message):
        es.shard_map(Norm().eval(), **options)(XS)


def test_specs_are_only_inferred_from_types():
    with pytest.raises(TypeError, match=r"in_specs .*axis_names=.*type AxisType\.Auto"):
        es.shard_map(lambda x: x, mesh=LINE, out_specs=ROWS)(XS)


@pytest.mark.parametrize("loop", ["cond", "while_loop"])
def test_devices_that_take_different_branches_write_different_states(loop):
    class Count(es.Module):
        n: es.State = 0.0

        def __call__(self, x):
            self.n = self.n + 1
            return x

        def run(self, x):
            is_large = x.sum() > 5
            if loop == "cond":
                return es.cond(is_large, lambda: self(x), lambda: x)
            return es.while_loop(lambda x: x.sum() < 10, lambda x: self(x) + 1, x)

    with rejects(model := Count(), ValueError, "wrote different values to `n`"):
        es.mutable(mapped(model.run))(XS)
    if loop == "cond":  # all devices take the same branch
        run = lambda m, x: es.cond(True, lambda: m(x), lambda: x)  # noqa: E731
        _, new = es.mutable(lambda m: mapped(lambda x: run(m, x))(XS))(model)
        assert new.n == 1
