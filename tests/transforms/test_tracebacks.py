"""Tracebacks show the user's frames; ours only with `jax_traceback_filtering=off`."""

import contextlib
import os
import traceback

import jax
import jax.numpy as jnp
import pytest

import eqx_state as es
from eqx_state._compat import boundary, hide_frames


OURS = os.path.dirname(es.__file__)
X = jnp.ones(3)


class Layer(es.Module):
    weight: es.Parameter = 2.0
    count: es.State = 0

    def __call__(self, x):
        raise RuntimeError("mine")

    def writes(self, x):
        self.weight = x

    def looped(self, x):
        return es.scan(lambda carry, x: (carry, self(x)), None, x)


def loss(layer, xs):
    return es.vmap(lambda x: layer.looped(jnp.stack([x, x])))(xs).sum()


def step(layer, xs):
    return es.value_and_grad(loss)(layer, xs)


RULE = es.custom_vjp(lambda layer, x: layer(x)).defvjp(loss, loss)
SHARDED = es.shard_map(
    lambda x: Layer()(x),
    mesh=jax.sharding.Mesh(jax.devices()[:1], "data"),
    in_specs=jax.P(),
    out_specs=jax.P(),
)

CALLS = {
    "mutable": lambda: es.mutable(Layer())(X),
    "capture": lambda: es.capture(Layer())(X),
    "value_and_grad": lambda: es.value_and_grad(loss)(Layer(), X),
    "vmap": lambda: es.vmap(Layer())(X),
    "checkpoint": lambda: es.checkpoint(Layer())(X),
    "scan": lambda: Layer().looped(X),
    "while_loop": lambda: es.while_loop(lambda x: x > 0, Layer(), X[0]),
    "fori_loop": lambda: es.fori_loop(0, 2, lambda i, x: Layer()(x), X),
    "cond": lambda: es.cond(True, Layer(), Layer(), X),
    "switch": lambda: es.switch(0, [Layer(), Layer()], X),
    "vjp": lambda: es.vjp(Layer(), X),
    "jvp": lambda: es.jvp(Layer(), (X,), (X,)),
    "hessian": lambda: es.hessian(Layer())(X),
    "custom_vjp": lambda: RULE(Layer(), X),
    "shard_map": lambda: SHARDED(X),
    "jit": lambda: es.jit(Layer())(X),
    "jit of a step": lambda: es.jit(step)(Layer(), X),
    "jit in a scope": lambda: es.mutable(es.jit(Layer()))(X),
    "init": lambda: es.init(Layer(), 0, X),
    "tabulate": lambda: es.tabulate(Layer(), X),
}


def frames_of(call):
    """The number of frames of the user, and the number of our frames."""
    with pytest.raises((RuntimeError, es.TraceError, AttributeError)) as info:
        call()
    files = [f.filename for f in traceback.extract_tb(info.value.__traceback__)]
    return files.count(__file__), sum(file.startswith(OURS) for file in files)


@contextlib.contextmanager
def filtering(mode):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_our_frames_are_removed_and_all_frames_of_the_user_remain(call):
    theirs, ours = frames_of(call)
    assert theirs >= 3
    assert ours == 0
    with filtering("off"):  # this setting also shows JAX's own frames
        everything, ours = frames_of(call)
    assert everything == theirs
    assert ours >= 2


def test_with_tracebackhide_our_frames_remain_and_are_marked():
    with filtering("tracebackhide"):
        for call in (CALLS["mutable"], CALLS["jit"]):
            with pytest.raises(RuntimeError, match="mine") as info:
                call()
            frames = [frame for frame, _ in traceback.walk_tb(info.value.__traceback__)]
            ours = [f for f in frames if f.f_code.co_filename.startswith(OURS)]
            assert len(ours) >= 3
            assert all(f.f_locals.get("__tracebackhide__") for f in ours)


@pytest.mark.parametrize("name", ["jit of a step", "mutable"])
def test_one_note_tells_how_to_see_them(name):
    with pytest.raises(RuntimeError, match="mine") as info:
        CALLS[name]()
    (note,) = info.value.__notes__
    assert "JAX_TRACEBACK_FILTERING=off" in note


def test_without_a_note_the_error_is_the_users():
    for call in (CALLS["mutable"], CALLS["jit"]):
        with filtering("remove_frames"), pytest.raises(RuntimeError, match="mine"):
            call()


def test_an_inner_boundary_does_not_hide_frames_again():
    error = RuntimeError("mine")
    seen = []

    @boundary
    def outer():
        try:
            raise error
        except RuntimeError:
            seen.append(error.__traceback__)
            hide_frames(error)
            seen.append(error.__traceback__)
            raise

    with pytest.raises(RuntimeError, match="mine"):
        outer()
    assert seen[0] is seen[1]
    assert len(error.__notes__) == 1
