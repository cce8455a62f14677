"""Names of modules in profiles: each call of an `es.Module` is a `jax.named_scope`.

XLA keeps the names in the metadata of the instructions, as `op_name`.
"""

import abc
import contextlib
import fnmatch
import inspect
import pickle
import re
import traceback

import beartype
import beartype.roar
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqx_state as es


X = jnp.ones(3)


class Norm(es.Module):
    scale: es.Parameter
    mean: es.BatchStat

    def __call__(self, x):
        self.mean = 0.9 * self.mean + x
        return self.scale * x - self.mean


class Block(es.Module):
    norm: Norm

    def __call__(self, x):
        return jnp.sin(self.norm(x))


class Net(es.Module):
    blocks: list[Block]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Gain(es.Module):
    scale: es.Parameter

    def __call__(self, x):
        return self.scale * x


def norm():
    return Norm(jnp.ones(3), jnp.zeros(3))


def net(n=2):
    return Net([Block(norm()) for _ in range(n)])


def loss_fn(model, x):
    return jnp.sum(model(x) ** 2)


def step(model, optimizer, x):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, x)
    return loss, *optimizer.update(grads, model)


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile().as_text()


def instructions(text):
    """The instructions of all computations, without their metadata."""
    text = re.sub(r",? metadata=\{[^}]*\}", "", text)
    found = re.findall(r"^ +(?:ROOT )?%?\S+ = .*$", text, re.MULTILINE)
    assert found
    return found


def scopes(f, *args, prefix="jit(f)"):
    """The name stacks of the instructions of `f`, without that of the program."""

    def run(*args):
        return f(*args)

    run.__name__ = "f"
    names = re.findall(r'op_name="([^"]*)"', compiled(run, *args))
    stacks = {name.rpartition("/")[0] for name in names if name.startswith(prefix)}
    return {stack.removeprefix(prefix).removeprefix("/") for stack in stacks} - {""}


def in_scope(model, *args):
    return es.mutable(model)(*args)


# --- Names ----------------------------------------------------------------------------


def test_a_profile_of_a_training_step_has_the_names_of_the_layers():
    optimizer = es.Optimizer(optax.sgd(0.1)).init(net())
    program = es.jit(step).lower(net(), optimizer, X).compile()
    text = program.as_text()
    for i in range(2):
        assert f'op_name="jit(step)/jvp(Net)/blocks[{i}]/norm/mul"' in text
        assert f'op_name="jit(step)/jvp(Net)/blocks[{i}]/cos"' in text
        assert f'op_name="jit(step)/transpose(jvp(Net))/blocks[{i}]/norm/mul"' in text


def test_a_scope_names_the_last_step_of_the_path_and_the_class_of_the_root():
    layers = {f"Net/blocks[{i}]{below}" for i in range(2) for below in ("", "/norm")}
    assert scopes(in_scope, net(), X) == layers


def test_without_a_scope_each_call_has_the_name_of_its_class():
    class Around(es.Module):
        inner: Gain

        def __call__(self, x):
            return self.inner(x)

    assert scopes(lambda m, x: m(x), Around(Gain(X)), X) == {"Around/Gain"}


MODELS = {
    "list": ([norm(), norm()], lambda m: m[1], "[1]"),
    "dict": ({"a": {"b": norm()}}, lambda m: m["a"]["b"], r"[\'a\'][\'b\']"),
    "nested list": (Net([[Block(norm())]]), lambda m: m.blocks[0][0].norm, "norm"),
    "both indices": (
        Net([[norm()], [norm()]]),
        lambda m: m.blocks[1][0],
        "blocks[1][0]",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_may_be_a_container(case):
    model, where, expected = MODELS[case]
    assert scopes(es.mutable(lambda m, x: where(m)(x)), model, X) == {expected}


TRANSFORMS = {
    "vmap": (lambda f, x: es.vmap(f)(x[None]), "vmap(gain)"),
    "eqx.filter_vmap": (lambda f, x: eqx.filter_vmap(f)(x[None]), "vmap(Gain)"),
    "checkpoint": (lambda f, x: es.checkpoint(f)(x), "checkpoint/gain"),
    "jit": (lambda f, x: es.jit(f)(x), "jit(Gain)/gain"),
    "scan": (
        lambda f, x: es.scan(lambda c, y: (c, f(y)), None, x[None]),
        "while/body/*/gain",  # JAX's versions name the step differently
    ),
}


@pytest.mark.parametrize("case", TRANSFORMS)
def test_the_names_are_inside_the_transforms_of_the_calls(case):
    transform, expected = TRANSFORMS[case]

    class Outer(es.Module):
        gain: Gain

        def __call__(self, x):
            return transform(self.gain, x)

    assert fnmatch.filter(scopes(in_scope, Outer(Gain(X)), X), f"Outer/{expected}")


# --- Ways to define `__call__` --------------------------------------------------------


class Scaled(es.Module):
    def __call__(self, x):
        """Scale `x`."""
        return 2 * x


class Inherits(Scaled):
    pass


class CallsSuper(Scaled):
    def __call__(self, x):
        return super().__call__(x) + 1


class Diamond(Inherits, CallsSuper):
    pass


class AbstractCall(es.Module):
    @abc.abstractmethod
    def __call__(self, x):
        return 5 * x


class Concrete(AbstractCall):
    def __call__(self, x):
        return super().__call__(x) + 1


class Jitted(es.Module):
    @es.jit
    def __call__(self, x):
        return 7 * x


class CallsJitted(Jitted):
    def __call__(self, x):
        return super().__call__(x) + 1


class Checkpointed(es.Module):
    @es.checkpoint
    def __call__(self, x):
        return 8 * x


class Alias(es.Module):
    __call__ = Scaled.__call__


@beartype.beartype
class Checked(es.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return 15 * x


WAYS = {
    Scaled: 2,
    CallsSuper: 3,
    Diamond: 3,
    Concrete: 6,
    CallsJitted: 8,
    Alias: 2,
    Checked: 15,
}


@pytest.mark.parametrize("cls", WAYS)
def test_a_call_has_one_name_however_it_is_defined(cls):
    scale = WAYS[cls]
    assert (cls()(X) == scale).all()
    found = scopes(in_scope, cls(), X)
    assert cls.__name__ in found
    assert not [x for x in found if x.count(cls.__name__) != 1]
    assert (es.capture(cls(), outputs=cls)(X)[1][""] == scale).all()


def test_a_call_that_a_transform_decorates_has_the_name_of_the_transform():
    class Net(es.Module):
        layer: Checkpointed

        def __call__(self, x):
            return self.layer(x)

    assert scopes(in_scope, Net(Checkpointed()), X) == {"Net/checkpoint"}
    assert scopes(in_scope, Jitted(), X) == {"jit(__call__)"}


def test_an_abstract_call_stays_abstract():
    with pytest.raises(TypeError, match="abstract"):
        AbstractCall()


def test_a_class_looks_as_its_body_says():
    assert Scaled.__call__.__doc__ == "Scale `x`."
    assert str(inspect.signature(Scaled())) == "(x)"
    assert str(inspect.signature(Scaled.__call__)) == "(self, x)"
    assert pickle.loads(pickle.dumps(Scaled.__call__)) is Scaled.__call__
    program = Jitted.__call__.lower(Jitted(), X).compile()
    assert (program(Jitted(), X) == 7 * X).all()


def test_a_decorator_of_the_class_checks_the_arguments_of_its_call():
    with pytest.raises(beartype.roar.BeartypeCallHintParamViolation, match="x=3"):
        Checked()(3)


def test_the_call_of_one_class_on_a_different_object():
    assert (Scaled.__call__(object(), X) == 2 * X).all()
    assert (Scaled.__call__(Concrete(), X) == 2 * X).all()


def test_a_traceback_has_no_frame_of_the_library():
    class Fails(es.Module):
        def __call__(self, x):
            raise ValueError("no")

    class Around(es.Module):
        inner: Fails

        def __call__(self, x):
            return self.inner(x)

    with pytest.raises(ValueError, match="no") as info:
        Around(Fails())(X)
    frames = traceback.extract_tb(info.value.__traceback__)
    assert [f.filename for f in frames] == [__file__] * 3
    assert not hasattr(info.value, "__notes__")
    with pytest.raises(TypeError, match=r"Around.__call__\(\) missing") as info:
        Around(Fails())()
    assert len(traceback.extract_tb(info.value.__traceback__)) == 1


# --- Metadata only --------------------------------------------------------------------


def test_the_instructions_are_the_same_with_and_without_names(monkeypatch):
    def flat(model, optimizer, x):
        return eqx.filter(step(model, optimizer, x), eqx.is_array)

    optimizer = es.Optimizer(optax.sgd(0.1)).init(net())

    def texts():
        arrays, rest = eqx.partition((net(), optimizer, X), eqx.is_array)
        run = lambda arrays: flat(*eqx.combine(arrays, rest))  # noqa: E731
        lowered = jax.jit(run).lower(arrays)
        return lowered.as_text(), lowered.compile().as_text()

    named = texts()
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    unnamed = texts()
    assert named[0] == unnamed[0]
    assert "blocks[1]/norm" in named[1]
    assert "blocks[1]/norm" not in unnamed[1]
    assert instructions(named[1]) == instructions(unnamed[1])


def test_names_do_not_retrace():
    @jax.jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def helper(x):
        return jnp.cos(x)

    class UsesHelper(es.Module):
        scale: es.Parameter

        def __call__(self, x):
            return self.scale * helper(x)

    @es.jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def run(model, x):
        return es.mutable(model)(x)

    model = Net([UsesHelper(X) for _ in range(3)])
    for _ in range(3):
        _, model = run(model, X)
