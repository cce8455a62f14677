"""What functions hold is found, and made again as it was."""

import dataclasses
import enum
import functools as ft
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from helpers import leaks_on_purpose, rejects

import eqx_state as es


class Layer(es.Module):
    weight: es.Parameter = 2.0
    n: es.State = 0.0

    def __call__(self, x):
        self.n = self.n + 1
        return self.weight * x


class Holder(es.Module):
    layer: Layer


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


def through(name, f, x):
    if name == "scan":
        return es.scan(lambda carry, x: (carry, f(x)), None, x[None])[1][0]
    if name == "cond":
        return es.cond(x > 0, f, f, x)
    return {"jit": es.jit, "checkpoint": es.checkpoint}[name](f)(x)


TRANSFORMS = ["scan", "cond", "jit", "checkpoint"]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_cell_that_is_no_pytree_is_left_alone(name):
    by_kind = {es.Parameter: 1.0, es.State: 2.0}  # which have no order
    by_size = {Size.LARGE: 3.0, Size.SMALL: 1.0}

    def f(holder, x):
        scale = by_kind[es.State] * by_size[Size.LARGE]
        return through(name, lambda x: by_kind[es.State] * holder.layer(x), x) + scale

    y, new = es.mutable(f)(Holder(Layer()), jnp.array(1.0))
    assert (y, new.layer.n) == (10.0, 1.0)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_function_of_jaxs_partial_is_opened_in_a_plain_module_as_well(name):
    def f(holder, x):
        called = jtu.Partial(lambda x: holder.layer(x))
        lambdas = eqx.nn.Sequential([eqx.nn.Lambda(called), eqx.nn.Identity()])
        return through(name, lambdas, x)

    y, new = es.mutable(f)(Holder(Layer()), jnp.array(1.0))
    assert (y, new.layer.n) == (2.0, 1.0)


def test_what_a_node_in_a_closure_says_of_itself_is_never_stale():
    @jtu.register_dataclass
    @dataclasses.dataclass
    class Scaled:
        layer: Layer
        scale: float = dataclasses.field(metadata={"static": True})

    def f(x):
        return scaled.scale * scaled.layer.weight * x

    jitted = es.jit(f)
    for scale in (1.0, 3.0, 1.0):
        scaled = Scaled(Layer(), scale)
        assert jitted(jnp.array(1.0)) == 2 * scale


PARTIALS = [ft.partial, eqx.Partial, jtu.Partial]


@pytest.mark.parametrize("partial", PARTIALS, ids=["functools", "eqx", "jax"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_function_in_a_partial_is_opened(name, partial):
    def f(holder, x):
        y = through(name, partial(lambda x: holder.layer(x)), x)
        holder.layer.weight = 2 * holder.layer.weight
        return y, through(name, partial(holder.layer), x)

    model = Holder(Layer())
    y, new = es.mutable(f, kinds=es.TreePart)(model, jnp.array(1.0))
    assert (y, new.layer.n) == ((2.0, 4.0), 2.0)


@pytest.mark.parametrize("partial", PARTIALS, ids=["functools", "eqx", "jax"])
def test_a_partial_that_only_reads_is_never_stale(partial):
    def f(holder, x):
        jitted = es.jit(partial(lambda x: holder.layer.n * x))
        first = jitted(x)
        holder.layer.n = jnp.array(5.0)
        return first, jitted(x)

    assert es.mutable(f)(Holder(Layer()), jnp.array(1.0))[0] == (0.0, 5.0)


def test_a_recursive_closure_sees_the_new_model_in_all_its_calls():
    model = Layer()

    def power(x, n):
        return x if n == 0 else power(model.weight * x, n - 1)

    jitted = es.jit(power)
    assert jitted(jnp.array(1.0), 3) == 8.0
    model = model.replace(weight=3.0)
    assert jitted(jnp.array(1.0), 3) == 27.0
    lanes = Layer(jnp.array([2.0, 3.0]), jnp.zeros(2))
    model = lanes
    mapped = es.vmap(power, in_axes=(0, None), axes={...: 0})
    assert mapped(jnp.ones(2), 3).tolist() == [8.0, 27.0]


# Functions that call themselves: `power(get)` multiplies `n` times by `get().weight`.


def decorated(get, jit):
    @jit
    def power(x, n):
        return x if n == 0 else power(get().weight * x, n - 1)

    return power


def in_turn(get, jit):
    def odd(x, n):
        return x if n == 0 else even(get().weight * x, n - 1)

    def even(x, n):
        return x if n == 0 else odd(get().weight * x, n - 1)

    return jit(even)


def between(get, jit):
    """One of the two holds no model itself."""

    def power(x, n):
        return x if n == 0 else again(get().weight * x, n - 1)

    def again(x, n):
        return power(x, n)

    return jit(again)


def in_a_list(get, jit):
    def odd(x, n):
        return x if n == 0 else even(get().weight * x, n - 1)

    def even(x, n):
        return x if n == 0 else odd(get().weight * x, n - 1)

    functions = [odd, even]
    return jit(lambda x, n: functions[n % 2](x, n))


def in_a_partial(get, jit):
    def power(scale, x, n):
        return x if n == 0 else partials[0](scale * get().weight * x, n - 1)

    partials = [ft.partial(power, 1.0)]
    return jit(partials[0])


def by_default(get, jit):
    def power(x, n, then=None):
        return x if n == 0 else then(get().weight * x, n - 1, then)

    power.__defaults__ = (power,)
    return jit(power)


RECURSIVE = [decorated, in_turn, between, in_a_list, in_a_partial, by_default]


@pytest.mark.parametrize("make", RECURSIVE)
def test_functions_that_call_each_other_see_the_new_model_in_all_calls(make):
    model = Layer()
    jitted = make(lambda: model, es.jit)
    assert jitted(jnp.array(1.0), 3) == 8.0
    model = model.replace(weight=3.0)
    assert jitted(jnp.array(1.0), 3) == 27.0
    mapped = make(lambda: model, lambda f: es.vmap(f, in_axes=(0, None), axes={...: 0}))
    model = Layer(jnp.array([2.0, 3.0]), jnp.zeros(2))
    if make is not decorated:  # which would map a lane once more
        assert mapped(jnp.ones(2), 3).tolist() == [8.0, 27.0]


@pytest.mark.parametrize("make", RECURSIVE)
def test_functions_that_call_each_other_write_to_one_model(make):
    def f(holder, x):
        def get():
            holder.layer(x)
            return holder.layer

        return make(get, es.jit)(x, 3)

    y, new = es.mutable(f)(Holder(Layer()), jnp.array(1.0))
    assert (y, new.layer.n) == (8.0, 3.0)


# What a function puts into what it holds, where a transform runs a copy of it.


def by_nonlocal(model):
    def f(x):
        nonlocal model
        y, model = es.mutable(model)(x)
        return y

    return f


def by_a_list(model):
    models = [model]

    def f(x):
        y, models[0] = es.mutable(models[0])(x)
        return y

    return f


def by_a_default(model):
    def f(x, models={"model": model}):  # noqa: B006
        y, models["model"] = es.mutable(models["model"])(x)
        return y

    return f


def by_forgetting(model):
    def f(x):
        nonlocal model
        y = model.weight * x
        del model
        return y

    return f


@pytest.mark.parametrize("make", [by_nonlocal, by_a_list, by_a_default, by_forgetting])
@pytest.mark.parametrize("jitted", [True, False])
def test_what_a_function_puts_into_its_closure_is_not_lost_silently(make, jitted):
    if jitted:
        model, transform = Layer(), es.jit
    else:
        model = Layer(jnp.array([2.0, 3.0]), jnp.zeros(2))
        transform = ft.partial(es.vmap, axes={...: 0})
    with rejects(model, es.TraceError, "`models?` was changed", r"def step\(model"):
        transform(make(model))(jnp.ones(2))


def test_a_function_may_forget_a_partial_that_holds_no_model():
    scale = eqx.Partial(jnp.multiply, jnp.array(2.0))

    @es.jit
    def f(x):
        nonlocal scale
        y = scale(x)
        del scale
        return y

    assert f(jnp.array(3.0)) == 6.0
    with pytest.raises(NameError, match="scale"):
        scale  # noqa: B018


def test_what_an_unmapped_function_puts_into_its_closure_is_there():
    model, seen = Layer(), []

    def f(x):
        nonlocal model
        seen.append(model)
        model = model.replace(weight=3.0)
        return x

    es.vmap(f)(jnp.ones(2))
    assert (seen[0].weight, model.weight) == (2.0, 3.0)


def test_defaults_and_their_names_stay():
    layer = Layer()

    def f(x, /, a=1.0, *, held=layer, b=2.0):
        """Documented."""
        return held(x) * a * b

    f.mark = "kept"
    y, new = es.mutable(lambda layer, x: es.jit(ft.partial(f, held=layer))(x))(
        layer, jnp.array(1.0)
    )
    assert (y, new.n) == (4.0, 1.0)
    assert es.jit(f).__doc__ == "Documented."


def test_a_copy_of_the_outer_module_loses_what_was_written_in_the_carry():
    def f(holder, xs, back):
        def step(layer, x):
            return (layer, layer(x)) if back is None else (back(holder), layer(x))

        holder.layer, ys = es.scan(step, holder.layer, xs)
        return ys

    model, xs = Holder(Layer()), jnp.ones(3)
    assert es.mutable(f)(model, xs, None)[1].layer.n == 3.0
    for back in (
        lambda holder: holder.layer,
        lambda holder: holder.layer.replace(),
        lambda holder: jax.tree.map(lambda x: x, holder.layer),
    ):
        with rejects(model, ValueError, r"`layer\.n` was written", "return cell, y"):
            es.mutable(f)(model, xs, back)


def test_what_comes_back_from_a_loop_may_be_returned_after_a_write():
    def f(holder, xs):
        def inner(layer, x):
            return layer, layer(x)

        def outer(layer, x):
            layer, ys = es.scan(inner, layer, jnp.stack([x, x]))
            layer(x)
            return layer, ys

        holder.layer, ys = es.scan(outer, holder.layer, xs)
        return ys

    assert es.mutable(f)(Holder(Layer()), jnp.ones(3))[1].layer.n == 9.0
    (layer, _), same = es.mutable(lambda h, xs: es.scan(step, h.layer, xs))(
        Holder(Layer()), jnp.ones(3)
    )
    assert (layer.n, same.layer.n) == (3.0, 0.0)


def step(layer, x):
    return layer, layer(x)


# What functions share is shared in the copies that run, too.


class Mul(es.Module):
    w: es.Parameter

    def __call__(self, x):
        return self.w * x


def by_a_shared_dict(model):
    shared = {"layer": model, "hidden": jnp.zeros(())}

    def encode(x):
        shared["hidden"] = shared["layer"](x)

    def decode():
        return shared["hidden"] + 1

    return encode, decode


def by_a_dict_without_order(model):
    shared = {"layer": model, 1: jnp.zeros(())}

    def encode(x):
        shared[1] = shared["layer"](x)

    return encode, lambda: shared[1] + 1


def by_a_shared_list(model):
    shared = [model]

    def encode(x):
        shared.append(shared[0](x))

    return encode, lambda: shared.pop() + 1


def by_a_shared_cell(model):
    shared = model, jnp.zeros(())

    def encode(x):
        nonlocal shared
        shared = model, model(x)

    return encode, lambda: shared[1] + 1


SHARED = [by_a_shared_dict, by_a_dict_without_order, by_a_shared_list, by_a_shared_cell]


@leaks_on_purpose
@pytest.mark.parametrize("make", SHARED)
@pytest.mark.parametrize("name", ["jit", "vmap"])
def test_functions_share_what_they_change(make, name):
    transform = {"jit": es.jit, "vmap": ft.partial(es.vmap, axes={...: 0})}[name]
    model = Mul(jnp.array([2.0, 3.0]))

    def run(transform):
        encode, decode = make(model)

        def step(x):
            encode(x)
            return decode()

        return transform(step)(jnp.ones(2)).tolist()

    assert run(transform) == run(lambda f: f) == [3.0, 4.0]


def test_a_number_put_beside_a_module_is_there_afterwards():
    shared, plain = {"layer": Mul(2.0), "calls": [0]}, [0]

    @es.jit
    def f(x):
        shared["calls"][0] += 1
        shared["last"] = "seen"
        plain[0] += 1
        return shared["layer"](x)

    calls = shared["calls"]
    assert f(jnp.array(3.0)) == 6.0
    assert list(shared) == ["layer", "calls", "last"]
    assert shared["calls"] is calls
    assert (calls, plain) == ([1], [1])


def test_what_other_code_changes_while_a_copy_runs_is_an_error():
    model = Mul(2.0)
    shared = {"layer": model, "hidden": 1.0}

    class Other:  # an object, into which no transform looks
        def change(self):
            self.shared["hidden"] = 2.0

    other = Other()
    other.shared = shared

    def f(x):
        other.change()
        return shared["layer"](x) * shared["hidden"]

    with rejects(model, es.TraceError, "`shared` was changed while", "argument"):
        es.jit(f)(jnp.ones(2))


def test_an_error_is_not_put_down_to_a_lazy_model_in_an_object():
    class Other:  # an object, into which no transform looks
        model = None

    other = Other()
    other.model = Mul(es.Initializer(jax.random.normal))

    def f(x):
        return other + x

    with pytest.raises(TypeError, match="unsupported operand"):
        es.checkpoint(f)(1.0)


def test_a_function_that_is_returned_is_the_callers():
    model = Mul(2.0)
    held = [model, 3.0]

    def scale(x):
        return held[0](x)

    @es.jit
    def f(x):
        return scale(x), {"scale": scale, "bound": model.__call__}

    for _ in range(2):
        y, out = f(jnp.array(3.0))
        assert y == 6.0
        assert out["scale"] is scale
        assert out["bound"](3.0) == 6.0


def test_one_module_in_two_cells_is_one_in_the_copy():
    def two(a, b):
        return lambda: (a is b, a.w * b.w)

    one, other = Mul(2.0), Mul(3.0)
    for a, b, product in [(one, one, 4.0), (one, other, 6.0), (other, other, 9.0)]:
        assert es.jit(two(a, b))() == (a is b, product)


def test_a_module_that_changes_places_is_another_program():
    one, other = Mul(2.0), Mul(3.0)
    layers = [one, other, one]
    traces = []

    @es.jit
    def f(x):
        traces.append(len(layers))
        for layer in layers:
            x = layer(x) + 1
        return x, layers[0] is layers[-1]

    def expected():
        y = 1.0
        for layer in layers:
            y = layer.w * y + 1
        return y, layers[0] is layers[-1]

    for new in ([one, other, one], [one, other, other], [one, other, one], [one]):
        layers[:] = new
        assert f(jnp.array(1.0)) == expected()
    assert traces == [3, 3, 1]


def test_a_setting_beside_a_module_is_never_stale():
    model = Mul(2.0)
    setting = {"deep": [1.0]}
    held = (model, setting)

    @es.jit
    def f(x):
        return held[0](x) * held[1]["deep"][0]

    assert f(jnp.array(3.0)) == 6.0
    setting["deep"][0] = 2.0
    assert f(jnp.array(3.0)) == 12.0


@pytest.mark.parametrize("name", ["transform", "method", "eqx", "jax", "custom"])
def test_what_wraps_a_module_in_a_closure_is_never_stale(name):
    def wrap(model):
        return {
            "transform": lambda: es.vmap(lambda x: model(x)),
            "method": lambda: ft.partial(types.MethodType(Mul.__call__, model)),
            "eqx": lambda: eqx.Partial(lambda m, x: m(x), model),
            "jax": lambda: jtu.Partial(lambda m, x: m(x), model),
            "custom": lambda: Node(model),
        }[name]()

    wrapped = wrap(Mul(2.0))

    @es.jit
    def f(x):
        return wrapped(x)

    x = jnp.ones(1)
    assert f(x) == 2.0
    wrapped = wrap(Mul(3.0))
    assert f(x) == 3.0


def test_what_a_partial_in_a_closure_has_is_never_stale():
    @es.jit
    def f(x):
        return scale(x)

    for by in (2.0, 3.0):
        scale = eqx.Partial(jnp.multiply, jnp.array(by))
        assert f(jnp.array(1.0)) == by


@pytest.mark.parametrize("transform", [es.jit, es.vmap], ids=["jit", "vmap"])
def test_a_function_beside_a_module_stays_the_function_that_it_is(transform):
    def scale(x):
        return 3 * x

    model, seen = Mul(2.0), []
    held = [model, scale, [scale]]

    @transform
    def f(x):
        seen.extend([held[1], *held[2]])
        return held[0](held[1](x))

    assert f(jnp.ones(2)).tolist() == [6.0, 6.0]
    assert seen[0] is seen[1] is scale


@jtu.register_pytree_node_class
class Node:
    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)

    def tree_flatten(self):
        return (self.model,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


# What a copy has of the original.


def test_a_copy_has_the_attributes_and_the_annotations_of_the_original():
    model = Mul(2.0)

    def scale(x: float) -> float:
        scale.calls += 1
        return model(x)

    scale.calls = 0
    partial = ft.partial(scale)
    partial.note = 3.0

    @es.jit
    def f(x):
        assert list(scale.__annotations__) == ["x", "return"]
        return partial(x) * partial.note

    assert f(jnp.array(1.0)) == 6.0
    assert scale.calls == 1


def test_a_partial_of_a_class_of_its_own_is_not_copied():
    class Times(ft.partial):
        def __call__(self, x):
            return super().__call__(x) * self.by

    class ModuleTimes(eqx.Partial):
        by: float = 5.0

        def __init__(self, f):
            super().__init__(f)

        def __call__(self, x):
            return super().__call__(x) * self.by

    one, other = Times(Mul(2.0)), ModuleTimes(Mul(2.0))
    one.by = 5.0
    x = jnp.array(1.0)
    for held in (one, other):
        assert es.jit(lambda x, held=held: held(x))(x) == 10.0
        assert es.jit(held)(x) == 10.0


def test_a_key_that_is_renamed_is_renamed_outside():
    held = {"model": Mul(2.0), "a": 3.0}

    @es.jit
    def f(x):
        held["b"] = held.pop("a")
        return held["model"](x) * held["b"]

    assert f(jnp.array(1.0)) == 6.0
    assert list(held) == ["model", "b"]


def test_what_cannot_be_flattened_is_left_alone():
    class Broken:
        pass

    def fail(x):
        raise ValueError("not now")

    jtu.register_pytree_node(Broken, fail, lambda aux, children: Broken())
    broken, model = Broken(), Mul(2.0)
    f = es.jit(lambda x: x if broken is None else model(x))
    assert f(jnp.array(1.0)) == 2.0


def test_a_long_chain_may_be_closed_over():
    chain = None
    for i in range(1500):
        chain = [i, chain]
    assert es.jit(lambda x: x + chain[0])(jnp.array(1.0)) == 1500.0


def test_a_function_in_a_partial_may_come_to_hold_a_module():
    box = [None]

    def g(x):
        return x if box[0] is None else box[0](x)

    f = es.jit(eqx.Partial(lambda h, x: h(x), g))
    x = jnp.array(1.0)
    assert (f(x), f(x)) == (1.0, 1.0)
    for factor in (2.0, 3.0):
        box[0] = Mul(factor)
        assert (f(x), f(x)) == (factor, factor)
    box[0] = None
    assert f(x) == 1.0
