"""`es.Module`: an ordinary Equinox module, and what it adds."""

import abc
import copy
import dataclasses
import pickle
import weakref
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array

import eqx_state as es


T = TypeVar("T")
ONE = jnp.ones(2)


class Norm(es.Module):
    scale: es.Parameter
    mean: es.BatchStat
    count: es.State = 0

    def __call__(self, x):
        return self.center(x)

    def center(self, x):
        return self.scale * (x - self.mean)


class Model(es.Module):
    norms: list[Norm]
    linear: eqx.nn.Linear
    name: str = eqx.field(static=True, default="model")


def make_norm() -> Norm:
    return Norm(ONE, jnp.zeros(2))


def make_model() -> Model:
    return Model([make_norm(), make_norm()], eqx.nn.Linear(2, 2, key=jr.key(0)))


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


MODES = [
    lambda m: m,
    es.eval,
    es.freeze,
    lambda m: es.eval(es.freeze(m, lambda m: m.norms[0])),
]


# --- A frozen pytree ------------------------------------------------------------------


@pytest.mark.parametrize("mode", range(len(MODES)))
def test_a_fresh_and_an_unflattened_module_have_one_structure(mode):
    model = MODES[mode](make_model())
    leaves, structure = jax.tree.flatten(model)
    new = jax.tree.unflatten(structure, leaves)
    assert same(new, model)
    assert hash(jax.tree.structure(new)) == hash(structure)
    assert jax.tree.structure(MODES[mode](make_model())) == structure
    assert type(new) is Model
    assert eqx.tree_equal(new, model)


@pytest.mark.parametrize("mode", range(len(MODES)))
@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_equal_and_frozen(mode, copied):
    model = MODES[mode](make_model())
    new = copied(model)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert eqx.tree_equal(new, model)
    assert new is not model
    for module in (new, new.norms[0]):
        name = dataclasses.fields(module)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError, match="outside `es"):
            setattr(module, name, None)
    with pytest.raises(dataclasses.FrozenInstanceError, match="name"):
        del new.name


def test_equality_hashing_and_weak_references():
    class Small(es.Module):
        n: int
        name: str = eqx.field(static=True)

    small = Small(1, "a")
    assert small == Small(1, "a")
    assert small != Small(1, "b")
    assert small != Small(1, "a").eval()
    assert hash(small) == hash(Small(1, "a"))
    assert weakref.ref(small)() is small


# --- The flags ------------------------------------------------------------------------


def test_the_flags_are_static_and_hidden():
    norm = make_norm()
    assert (norm.training, norm.frozen) == (True, False)
    assert repr(norm) == "Norm(scale=f32[2], mean=f32[2], count=i32[])"
    assert repr(norm) == repr(norm.eval().freeze())
    for flag in ("training", "frozen"):
        with pytest.raises(TypeError, match=flag):
            Norm(ONE, ONE, **{flag: True})
    with pytest.raises(TypeError, match="argument"):
        Norm(ONE, ONE, 0, True)


@pytest.mark.parametrize("name", ["initialized", "init", "filter"])
def test_the_flags_are_the_only_reserved_names(name):
    namespace = {"es": es, "__name__": __name__}
    exec(f"class Mine(es.Module):\n    {name}: es.State\n    last: es.State", namespace)
    mine = namespace["Mine"](ONE, ONE)
    assert getattr(mine, name) is ONE
    assert len(jax.tree.leaves(es.eval(mine))) == 2


# --- An ordinary dataclass ------------------------------------------------------------


def test_post_init_check_init_and_converters():
    class Base(es.Module):
        x: Array = eqx.field(converter=jnp.asarray)
        y: es.State = dataclasses.field(kw_only=True, default=1.0)

        def __check_init__(self):
            checked.append(self.x)

    class Sub(Base):
        z: es.State = 0

        def __post_init__(self):
            self.z = 2.0

        def __check_init__(self):
            if self.y > 5:
                raise ValueError("`y` is too large")

    checked = []
    sub = Sub(1)
    assert (sub.x, sub.y, sub.z) == (1, 1.0, 2.0)
    assert checked == [sub.x]
    assert all(map(eqx.is_array, jax.tree.leaves(sub)))
    with pytest.raises(ValueError, match="too large"):
        Sub(1, y=6.0)


def test_a_default_that_a_written_init_does_not_assign_is_in_the_tree():
    class Net(es.Module):
        label: ClassVar[str] = "net"
        name: str = "net"
        count: es.State = 0
        table: es.Buffer = np.arange(3)

        def __init__(self):
            pass

    assert [part.name for part in es.parts(Net())] == ["count", "table"]


def test_a_property_may_replace_a_field():
    class Parent(es.Module):
        total: es.State
        count: es.State = 0

        def __call__(self, x):
            self.count = self.count + 1
            return self.total * x

    class Child(Parent):
        def __init__(self):
            self.count = 0

        @property
        def total(self):
            return 10 * self.count

    y, model = es.mutable(lambda m, x: es.checkpoint(m)(x))(Child(), 2)
    assert (y, model.count) == (20, 1)


def test_generics_and_mixins():
    class Mixin:
        def twice(self):
            return 2 * self.x

    class Box(Mixin, es.Module, Generic[T]):
        x: es.Parameter[T]

    box = Box[Array](ONE)
    assert jax.tree.structure(jax.tree.map(lambda x: x, box)) == jax.tree.structure(box)
    assert box.twice()[0] == 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="x"):
        box.x = ONE


def test_abstract_methods_and_variables():
    class AbstractLayer(es.Module):
        size: eqx.AbstractVar[int]

        @abc.abstractmethod
        def __call__(self, x): ...

    class Layer(AbstractLayer):
        size: int = 3

        def __call__(self, x):
            return x

    assert Layer()(1) == 1
    with pytest.raises(TypeError, match="abstract"):
        AbstractLayer()


def test_modules_with_odd_special_methods():
    class Odd(es.Module):
        x: es.Parameter
        n: es.State = 0

        def forbidden(self, *_):
            raise AssertionError

        __eq__ = __iter__ = __getitem__ = __contains__ = forbidden
        __hash__ = None

        def __len__(self):
            return 0

    class Delegating(es.Module):
        inner: Any

        def __getattr__(self, name):
            return getattr(self.inner, name)

    model = Delegating([Odd(ONE), Odd(ONE)])
    assert same(es.update(es.eval(model), es.filter(model)).train(), model)
    assert same(eqx.combine(*es.partition(model, es.State)), model)
    assert same(es.map_modules(lambda module, name: module, model), model)
    frozen = es.freeze(model, lambda m: m.inner[1])
    assert [odd.frozen for odd in frozen.inner] == [False, True]
    assert same(copy.copy(model), model)
    assert jax.tree.structure(copy.deepcopy(model)) == jax.tree.structure(model)
    assert es.configure(model, n=2).inner[0].n == 2


# --- Plain JAX ------------------------------------------------------------------------


def test_plain_jax_takes_modules_of_arrays():
    norm = make_norm()
    out = jax.jit(lambda m, x: (m, m(x)))(norm, ONE)
    assert eqx.tree_equal(out[0], norm)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), norm, make_norm(), norm)
    ys, same_norms = jax.vmap(lambda m: (m(ONE), m))(stacked)
    assert ys.shape == (3, 2)
    assert eqx.tree_equal(same_norms, stacked)
    last, ys = jax.lax.scan(
        lambda m, x: (m.replace(mean=m.mean + x), m(x)), norm, jnp.ones((3, 2))
    )
    assert jnp.allclose(last.mean, 3.0)
    inexact = norm.replace(count=None)
    grads = jax.grad(lambda m: jnp.sum(m(3 * ONE)))(inexact)
    assert jax.tree.structure(grads) == jax.tree.structure(inexact)
    new = eqx.tree_at(lambda m: m.mean, norm.eval(), ONE)
    assert (new.mean is ONE, new.training) == (True, False)
    assert same(jax.tree.leaves(norm.center), jax.tree.leaves(norm))  # bound methods


def test_a_property_is_evaluated_once():
    class Twice(es.Module):
        count: es.State = 0

        @classmethod
        def make(cls):
            return cls()

        @property
        def maker(self):
            self.count = self.count + 1
            return type(self).make

        def __call__(self):
            return self.maker()

    made, model = es.mutable(Twice())()
    assert (made.count, model.count) == (0, 1)


def test_attribute_lookup_follows_other_base_classes():
    class Logged:
        def __getattribute__(self, name):
            return 7 if name == "seven" else super().__getattribute__(name)

    class Model(es.Module, Logged):
        def method(self):
            return self.seven

    model = Model()
    assert model.method() == model.seven == 7
    assert isinstance(model.method, eqx.Module)  # a pytree, as in Equinox


def test_a_class_may_contain_a_kind():
    class Holder(es.Module):
        class Cache(es.State):
            pass

        kind: ClassVar[type] = es.State
        cache: Cache = 0

    assert Holder.kind is es.State
    assert [part.kind for part in es.parts(Holder())] == [Holder.Cache]


def test_the_error_for_hashing_a_module_with_arrays_says_what_to_do():
    class Layer(es.Module):
        weight: es.Parameter

        def __call__(self, x):
            return self.weight * x

    class Static(es.Module):
        name: str

    assert hash(Static("a")) == hash(Static("a"))
    message = r"unhashable type: `.*Layer` with arrays.*\n\n.*\n.*es\.checkpoint"
    with pytest.raises(TypeError, match=message):
        jax.checkpoint(Layer(1.0))(2.0)


def test_copy_uses_the_reduce_method_of_the_class():
    class Reopened(es.Module):
        path: str
        handle: str

        def __reduce__(self):
            return Reopened, (self.path, "opened anew")

    assert copy.copy(Reopened("data", "opened")) == Reopened("data", "opened anew")


def test_getstate_and_setstate_are_a_pair():
    class Cached(es.Module):
        w: es.Parameter
        cache: dict = eqx.field(static=True, default_factory=dict)

        def __getstate__(self):
            return {k: x for k, x in self.__dict__.items() if k != "cache"}

        def __setstate__(self, state):
            assert "cache" not in state
            self.__dict__.update(state, cache={"new": True})

    model = Cached(1.0).eval()
    for new in (copy.copy(model), copy.deepcopy(model)):
        assert (new.w, new.training, new.cache) == (1.0, False, {"new": True})
        with pytest.raises(dataclasses.FrozenInstanceError, match="modules are frozen"):
            new.w = 2.0


def test_a_kind_must_be_an_annotation_and_not_a_value():
    with pytest.raises(TypeError, match=r"Net\.w` is set to a kind.*`w: es.Parameter`"):

        class Net(es.Module):
            w: object = es.Parameter
