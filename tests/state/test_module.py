"""`es.Module`: an ordinary Equinox module, and what it adds."""

import abc
import copy
import dataclasses
import pickle
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqx_state as es


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
def test_copies_are_equal_and_frozen(mode):
    model = MODES[mode](make_model())
    for new in (copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert jax.tree.structure(new) == jax.tree.structure(model)
        assert eqx.tree_equal(new, model)
        assert new is not model
        for module in (new, new.norms[0]):
            name = dataclasses.fields(module)[0].name
            with pytest.raises(dataclasses.FrozenInstanceError, match="outside `es"):
                setattr(module, name, None)
        with pytest.raises(dataclasses.FrozenInstanceError, match="name"):
            del new.name


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


def test_an_abstract_class():
    class AbstractLayer(es.Module):
        size: eqx.AbstractVar[int]

        @abc.abstractmethod
        def __call__(self, x): ...

    class Layer(AbstractLayer):
        size: int = 3

        def __call__(self, x):
            return x

    assert Layer()(1) == 1


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
