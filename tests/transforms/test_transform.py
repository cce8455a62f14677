"""Common to all transforms: they are pytrees with the leaves of what they wrap."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import eqx_state as es
from eqx_state._transforms.cut import cut


class Net(es.Module):
    weight: es.Parameter = dataclasses.field(default_factory=lambda: jnp.ones(2))
    count: es.State = 0

    def __call__(self, x):
        return self.weight * x


MESH = Mesh(np.array(jax.devices()[:2]), "data")
HALF = {es.Parameter: jnp.bfloat16}
MADE = {
    "vmap": lambda f: es.vmap(
        f, 0, 1, axis_name="i", axis_size=2, spmd_axis_name="data", axes={es.State: 0}
    ),
    "checkpoint": lambda f: es.checkpoint(
        f,
        prevent_cse=False,
        policy=jax.checkpoint_policies.nothing_saveable,
        static_argnums=(1,),
        static_argnames=("mode",),
    ),
    "jit": lambda f: es.jit(f, donate="all", inline=True),
    "jit, default": es.jit,
    "mutable": lambda f: es.mutable(f, kinds=es.BatchStat, cast=HALF),
    "mutable, argnums": lambda f: es.mutable(f, argnums=(0, 1)),
    "value_and_grad": lambda f: es.value_and_grad(f, wrt=es.Parameter, has_aux=True),
    "grad": lambda f: es.grad(f, argnums=1, cast=HALF),
    "capture": lambda f: es.capture(f, outputs="*", kinds=es.BatchStat),
    "capture, argnums": lambda f: es.capture(f, argnums=(0, 1)),
    "shard_map": lambda f: es.shard_map(
        f, mesh=MESH, in_specs=P(), out_specs=P("data"), axes={es.State: P()}
    ),
    "shard_map, axes": lambda f: es.shard_map(
        f, mesh=MESH, out_specs=P(), axis_names={"data"}, check_vma=False
    ),
    "jacfwd": lambda f: es.jacfwd(f, argnums=(0, 1), has_aux=True, holomorphic=True),
    "jacrev": lambda f: es.jacrev(f, argnums=1, allow_int=True),
    "hessian": lambda f: es.hessian(f, argnums=1, has_aux=True),
    "custom_vjp": lambda f: es.custom_vjp(f, nondiff_argnums=(1,)),
    "find_nonfinite": es.find_nonfinite,
}


@pytest.mark.parametrize("name", MADE)
def test_a_transform_has_the_leaves_of_what_it_wraps(name):
    net = Net()
    made = MADE[name](net)
    assert [*map(id, jax.tree.leaves(made))] == [*map(id, jax.tree.leaves(net))]
    # Its options are part of the structure, which can be compared and hashed.
    structure = jax.tree.structure(made)
    assert structure == jax.tree.structure(MADE[name](net))
    assert hash(structure) == hash(jax.tree.structure(MADE[name](net)))
    assert structure not in [  # not a set, which would compare hashes first
        jax.tree.structure(other(net)) for key, other in MADE.items() if key != name
    ]


def test_a_transform_of_a_function_has_its_name_and_docstring():
    def f(x, y=1):
        """Doc."""

    for name, make in MADE.items():
        wrapped = make(f)
        assert inspect.unwrap(wrapped) is f, name
        assert (wrapped.__doc__, wrapped.__name__) == ("Doc.", "f")
        assert inspect.signature(wrapped) == inspect.signature(f)


LIKE_JAX = {
    "scan": jax.lax.scan,
    "while_loop": jax.lax.while_loop,
    "fori_loop": jax.lax.fori_loop,
    "cond": jax.lax.cond,
    "switch": jax.lax.switch,
    "checkpoint": jax.checkpoint,
    "custom_vjp": jax.custom_vjp,
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": jax.hessian,
    "shard_map": jax.shard_map,
}


@pytest.mark.parametrize("name", LIKE_JAX)
def test_the_signature_is_that_of_jax(name):
    ours, theirs = (
        {p.name: (p.kind, p.default) for p in inspect.signature(f).parameters.values()}
        for f in (getattr(es, name), LIKE_JAX[name])
    )
    ours_alone = {"shard_map": "axes", "while_loop": "max_steps"}
    if name in ours_alone:
        option = ours.pop(ours_alone[name])
        assert option == (inspect.Parameter.KEYWORD_ONLY, None)
    if name == "checkpoint":
        ours.pop("static_argnames")  # not in JAX < 0.10.2
        theirs.pop("static_argnames", None)
    # Older forms, which JAX still accepts.
    theirs = {k: v for k, v in theirs.items() if k not in ("operand", "concrete")}
    assert list(ours.items()) == list(theirs.items())


class Threaded(es.Module):
    n: es.State = 0

    def __call__(self, x):
        return x


THREADS = ["mutable", "value_and_grad", "grad", "capture", "find_nonfinite"]


@pytest.mark.parametrize("name", THREADS)
def test_a_class_in_place_of_a_model_is_an_error(name):
    transform = getattr(es, name)
    with pytest.raises(TypeError, match=r"(?s)the class `Threaded`.*es.mutable\(model"):
        transform(Threaded)
    # Calling the class creates modules.
    assert es.vmap(Threaded)(jnp.arange(3)).n.shape == (3,)


@pytest.mark.parametrize("name", ["mutable", "value_and_grad", "vmap", "checkpoint"])
def test_an_object_that_cannot_be_called_is_rejected_immediately(name):
    for x, given in (
        (3, "an `int`"),
        (None, "a `NoneType`"),
        ([Threaded()], "a `list`"),
    ):
        with pytest.raises(
            TypeError, match=f"was given {given}, which cannot be called"
        ):
            getattr(es, name)(x)
    with pytest.raises(TypeError, match="`es.Ema` was passed instead of the model"):
        getattr(es, name)(es.Ema(0.9).init(jnp.ones(3)))


class Sized(es.Module):
    w: es.Parameter
    size: object


def test_what_jax_does_not_trace_is_compared_by_type_and_value():
    def rest(size):
        return cut([Sized(jnp.ones(2), size), 2.0, jnp.sin])[1]

    assert jax.tree.leaves(rest(1)) == []
    assert (rest(1), hash(rest(1))) == (rest(1), hash(rest(1)))
    for size in (2, True, "other"):
        assert rest(1) != rest(size)
        assert rest(1).difference(rest(size)) == "[0].size"
    assert rest(1) != "rest"
    assert "sin" in repr(rest(1))
