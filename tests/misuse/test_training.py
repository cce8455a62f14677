"""Programs that use layers, keys, optimizers and `es.capture` wrongly."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest
from misuse import fails, FROZEN, Layer, loss_fn, Net, XS

import eqx_state as es


# --- Keys and layers ------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@fails(
    FROZEN,
    "is outside `es.mutable`",
    "A stream of keys writes in eval mode, too",
    "key=self.keys() if self.training else None",
)
def test_a_stream_of_keys_outside_a_call(training):
    es.RngStream(0).train(training)()


@pytest.mark.parametrize("use", [es.RngStream, lambda seed: es.reseed(Layer(), seed)])
@pytest.mark.parametrize("seed", [0.5, "42", None])
def test_a_seed_that_is_not_an_integer(use, seed):
    says = "is neither a PRNG key nor an integer seed"
    with fails(TypeError, says, "`jax.random.key(42)`, or `42`"):
        use(seed)


@pytest.mark.parametrize("run", [es.mutable, es.value_and_grad])
@fails(
    TypeError,
    "`layers[1]` is a `BatchNorm` whose state is in an `eqx.nn.State`",
    "es.nn.Stateful(BatchNorm(...))",
)
def test_a_batch_norm_of_equinox_without_its_state(run):
    norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
    model = eqx.nn.Sequential([eqx.nn.Identity(), norm])
    f = lambda model, xs: es.vmap(model, axis_name="batch")(xs).sum()  # noqa: E731
    run(f)(model, XS[None])


@fails(
    TypeError, "the first argument is the number of channels", "BatchNorm('batch', 8)"
)
def test_batch_norm_with_its_axis_first():
    es.nn.BatchNorm("batch", 8)


@pytest.mark.parametrize("make", [jr.key, jr.PRNGKey])
@fails(TypeError, "the first argument is the fraction", "`es.nn.Dropout(0.5, key=key)`")
def test_dropout_with_only_a_key(make):
    es.nn.Dropout(make(0))


@pytest.mark.parametrize("norm", [es.nn.BatchNorm(3), es.nn.BatchNorm(3).eval()])
@fails(
    ValueError,
    "normalizes real numbers, but was given",
    "complex64",
    "jnp.concatenate([x.real, x.imag], axis=1)",
)
def test_batch_norm_of_complex_numbers(norm):
    es.mutable(norm)(jax.lax.complex(XS, XS)[None])


@fails(ValueError, "from `key<fry>[]` to `key<fry>[2]`", "self.rng, key = jax.random")
def test_a_key_that_becomes_two():
    def split(dropout):
        dropout.rng = jr.split(dropout.rng)

    es.mutable(split)(es.nn.Dropout(0.5, key=jr.key(0)))


@fails(es.NotInitializedError, "a placeholder", "`es.lazy(eqx.nn.Linear, 4, 2)`")
def test_a_lazy_layer_that_is_given_its_arguments_later():
    es.lazy(eqx.nn.Linear)(4, 2)


@fails(
    ValueError, "`dropout` is a layer, `es.nn.Dropout`, in `", "`p=0.1` of a dropout"
)
def test_a_number_in_the_place_of_a_layer():
    class Block(es.Module):
        dropout: es.nn.Dropout

    es.configure(Block(es.nn.Dropout(0.5, key=jr.key(0))), dropout=0.1)


@fails(NotImplementedError, "astype", "`es.map` called the function with `rng`")
def test_a_function_of_numbers_on_a_key():
    dropout = es.nn.Dropout(0.5, key=jr.key(0))
    es.map(lambda x: x.astype(jnp.bfloat16), dropout, on=es.TreePart)


# --- The optimizer --------------------------------------------------------------------


def sgd(model):
    return es.Optimizer(optax.sgd(1.0)).init(model)


@fails(es.NotInitializedError, "`es.Optimizer.update` was called before", "(tx).init(m")
def test_an_update_before_init(net):
    optimizer = es.Optimizer(optax.sgd(1.0))
    optimizer.init(net)  # the new optimizer is dropped
    optimizer.update(*es.grad(loss_fn)(net))


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.freeze(),
        lambda net: net.replace(layer=[Layer(), Layer()]),
        lambda net: net.replace(layer=Layer(weight=jnp.ones(3))),
    ],
    ids=["frozen", "structure", "shape"],
)
@fails(ValueError, "is not what `init` was given", "optimizer.refit(model)", "weight")
def test_a_different_model(net, change):
    other = change(net)
    optimizer = es.Optimizer(optax.adam(1.0)).init(net)
    optimizer.update(es.filter(other, es.trainable), other)


@pytest.mark.parametrize("init", [lambda net: net, optax.LookaheadParams.init_synced])
@pytest.mark.parametrize(
    "wrap",
    [lambda tx: tx, optax.chain, lambda tx: {...: tx}],
    ids=["", "chain", "rules"],
)
@fails(
    TypeError,
    "does not support `optax.lookahead`",
    "optax.LookaheadParams",
    "es.partition(model",
)
def test_lookahead(net, init, wrap):
    es.Optimizer(wrap(optax.lookahead(optax.sgd(0.1), 5, 0.5))).init(init(net))


@fails(ValueError, "or optax would broadcast them", "layer.weight", "f32[5]")
def test_gradients_of_each_example(net):
    params = es.filter(net, es.trainable)
    grads = jax.tree.map(lambda p: jnp.ones((5, *p.shape)), params)
    sgd(net).update(grads, net)


@fails(
    ValueError,
    "its gradient is `None`",
    "selects `[0].layer.weight`",
    "es.Optimizer(tx, wrt=wrt)",
)
def test_a_filter_for_the_gradient_only(net):
    model = [net, jnp.ones(3)]
    wrt = es.all_of(es.trainable, es.under(lambda m: m[1]))
    grads, model = es.grad(lambda m: m[1].sum(), wrt=wrt)(model)
    es.Optimizer(optax.sgd(1.0), wrt=wrt).init(model).update(grads, model)
    sgd(model).update(grads, model)


def step(model, optimizer):
    grads, model = es.grad(loss_fn)(model)
    return optimizer.update(grads, model)


@pytest.mark.parametrize(
    "swapped",
    [
        lambda net: step(sgd(net), net),
        lambda net: es.jit(step)(*step(net, sgd(net))[::-1]),
        lambda net: sgd(sgd(net)),
    ],
    ids=["arguments", "results", "init"],
)
@fails(
    ValueError,
    "`es.Optimizer` was passed instead of the model",
    "model, optimizer = optimizer.update(grads, model)",
)
def test_model_and_optimizer_are_swapped(net, swapped):
    swapped(net)


@fails(ValueError, "was given a tuple instead of the gradients")
def test_the_pair_for_a_model_that_is_not_a_tuple(net):
    sgd(net).update((es.filter(net, es.trainable), net), net)


def test_gradients_may_be_a_tuple():
    models = (Net(), Net())
    grads, models = es.grad(lambda models: loss_fn(models[0]))(models)
    assert sgd(models).update(grads, models)[0][0].layer.weight == -1.0


@fails(TypeError, "`es.mutable(cast=...)`: the keys of rules", "path_matches('weight')")
def test_a_cast_by_name(net):
    es.mutable(net, cast={"weight": jnp.bfloat16})


# --- Looking inside -------------------------------------------------------------------


def mlp():
    return eqx.nn.MLP(2, 2, 3, 1, key=jr.key(0))


@fails(
    es.TraceError,
    "returned inside a JAX transform",
    "did not see what `layers[0]`, `layers[1]`",
)
def test_outputs_inside_a_jit_of_equinox():
    run = es.capture(lambda m, x: eqx.filter_jit(m)(x), outputs="layers[?]")
    run(mlp(), jnp.ones(2))


@pytest.mark.parametrize(
    "options", [{"outputs": "layer[0]"}, {"replace": {"layer[0]": 0}}]
)
@fails(ValueError, "matches no module that can be called", '`"layers[0]"`')
def test_a_name_of_no_module(options):
    es.capture(mlp(), **options)(jnp.ones(2))


@fails(TypeError, "Call it outside of transforms")
def test_a_search_that_is_compiled(net):
    es.jit(es.find_nonfinite(net))(XS)
