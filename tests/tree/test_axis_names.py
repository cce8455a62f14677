"""`es.axis_names` and `es.Axes`: where names are declared, and the arrays they fit."""

import types
import typing
from typing import Annotated, Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float, Int, Key

import eqx_state as es


T = TypeVar("T")


def names_of_field(annotation: Any, value: Any, base: type = es.Module) -> Any:
    cls = types.new_class(
        "Holder",
        (base,),
        {},
        lambda body: body.update(
            __annotations__={"x": annotation}, __module__=__name__
        ),
    )
    return es.axis_names(cls(value)).x


def linear(key: int = 0) -> eqx.nn.Linear:
    return eqx.nn.Linear(2, 3, key=jr.key(key))


# --- The text of a shape annotation ---------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape", "names"),
    [
        ("#mlp ?model_dim", (3, 2), ("mlp", "model_dim")),
        ("", (), ()),
        # Sizes and expressions are not names.
        ("rows=3 embed", (3, 2), (None, "embed")),
        ("#3 _ _last", (3, 2, 2), (None, None, None)),
        ("n n+1 {self.size} min(n,m)", (1, 2, 3, 1), ("n", None, None, None)),
        # Any number of axes.
        ("...", (3, 2), (None, None)),
        ("*batch embed", (2,), ("embed",)),
        ("a *#rest", (4, 3, 2), ("a", None, None)),
        ("a ... b", (4, 3, 2), ("a", None, "b")),
        # A stack has additional leading axes.
        ("_ 3 mlp", (1, 2, 3, 4, 5), (None, None, None, None, "mlp")),
    ],
)
def test_names_that_fit_an_array(text, shape, names):
    assert names_of_field(Float[Array, text], jnp.zeros(shape)) == names


# --- Where axis names can be declared -------------------------------------------------

AB = Float[Array, "a b"]
Weights = typing.NewType("Weights", AB)  # pyright: ignore[reportArgumentType]


# These are strings so that each is tested evaluated, and as text, as with `from
# __future__ import annotations`.
@pytest.mark.parametrize(
    "annotation",
    [
        "dict[str, list[AB]]",
        "es.Parameter[dict[str, list[AB]]]",
        "dict[str, list[es.Parameter[AB]] | None]",
        "typing.Mapping[str, typing.Sequence[AB]]",
        "dict[str, tuple[AB, ...]]",
        """Annotated[dict[str, list], es.Axes(**{"['w'][0]": "a b"})]""",
        """dict[str, Annotated[list, es.Axes(**{"[0]": "a b"})]]""",
        """dict[str, list[Annotated[Array, es.Axes(**{"": "a b"})]]]""",
    ],
)
def test_names_in_containers(annotation):
    container = tuple if "tuple" in annotation else list
    value = {"w": container([jnp.zeros((3, 2))])}
    names = names_of_field(eval(annotation), value)
    assert names == {"w": container([("a", "b")])}


def test_names_come_through_type_variables():
    class Box(eqx.Module, Generic[T]):
        content: T

    class Weight(es.Module, Generic[T]):
        w: es.Parameter[T]
        text: "es.BatchStat[T]"

    class Holder(es.Module):
        plain: Box[AB]
        layer: Box[Annotated[eqx.nn.Linear, es.Axes(weight="a b")]]
        weight: Weight[AB]

    class Child(Box[AB]):
        pass

    weight = Weight(jnp.zeros((3, 2)), jnp.zeros((3, 2)))
    holder = Holder(Box(jnp.zeros((3, 2))), Box(linear()), weight)
    names = es.axis_names(holder)
    assert names.plain.content == names.weight.w == names.weight.text == ("a", "b")
    assert [p.kind for p in es.parts(holder)[-2:]] == [es.Parameter, es.BatchStat]
    assert names.layer.content.weight == ("a", "b")
    assert es.axis_names(Child(jnp.zeros((3, 2)))).content == ("a", "b")


# --- Trees ----------------------------------------------------------------------------


def test_every_array_has_a_tuple_and_everything_else_none():
    class Net(es.Module):
        layer: eqx.nn.Linear
        key: Key[Array, " keys"]
        table: Int[np.ndarray, "n"]  # noqa: F821 (an axis)
        name: str

    names = es.axis_names((Net(linear(), jr.split(jr.key(0)), np.zeros(3), "net"), 1.0))
    assert names[0].layer.weight == (None, None)
    assert (names[0].key, names[0].table) == (("keys",), ("n",))
    assert (names[0].name, names[1]) == (None, None)


class Net(es.Module):
    w: es.Parameter[Float[Array, "mlp embed"]]
    up: Annotated[eqx.nn.Linear, es.Axes(weight="mlp embed", bias="mlp")]
    state: es.State[Float[Array, " mlp"]]
    plain: eqx.nn.Linear


def net(key: int = 0) -> Net:
    return Net(jnp.ones((3, 2)), linear(key), jnp.ones(3), linear(key))


EXPECTED = {
    "w": ("mlp", "embed"),
    "up.weight": ("mlp", "embed"),
    "up.bias": ("mlp",),
    "state": ("mlp",),
    "plain.weight": (None, None),
    "plain.bias": (None,),
}


def by_name(tree: Any) -> dict[str, Any]:
    names = jax.tree.structure(tree).flatten_up_to(es.axis_names(tree))
    return {p.name: n for p, n in zip(es.parts(tree), names, strict=True)}


def test_names_of_a_filtered_tree():
    params = es.filter(net(), es.path_matches("*weight"))
    weights = {k: v for k, v in EXPECTED.items() if k.endswith("weight")}
    assert by_name(params) == weights
    assert by_name(es.filter(net(), es.Rng)) == {}
    assert by_name(es.filter(net(), es.Parameter).replace(up=None)) == {
        name: EXPECTED[name] for name in ("w", "plain.weight", "plain.bias")
    }


def test_the_leading_axis_of_a_stack_has_no_name():
    stack = eqx.filter_vmap(lambda key: net())(jnp.zeros(4))
    assert by_name(stack) == {k: (None, *v) for k, v in EXPECTED.items()}

    def lane(model, x):
        assert by_name(model) == EXPECTED
        return x

    es.vmap(lane, in_axes=({...: 0}, 0))(stack, jnp.zeros(4))


def test_the_layers_of_a_stack_have_their_names():
    class Model(es.Module):
        nets: es.nn.Stacked[Net]
        plain: Annotated[es.nn.Stacked, es.Axes(**{"layers.bias": "mlp"})]

    keys = jr.split(jr.key(0), 4)
    plain = es.nn.Stacked.make(lambda key: eqx.nn.Linear(2, 3, key=key), keys)
    model = Model(es.nn.Stacked.make(lambda key: net(), keys), plain)
    names = es.axis_names(model)
    assert names.nets.layers.w == (None, "mlp", "embed")
    assert names.plain.layers.bias == (None, "mlp")
    assert by_name(model.nets[2]) == EXPECTED


# --- The outer declaration wins -------------------------------------------------------


def test_the_outer_declaration_wins():
    class Outer(es.Module):
        net: Annotated[Net, es.Axes(**{"w": "x y", "up.weight": "x y"})]

    class Outest(es.Module):
        outers: Annotated[list[Outer], es.Axes(**{"[1].net.w": "z z"})]

    tree = Outest([Outer(net()), Outer(net())])
    renamed = EXPECTED | {"w": ("x", "y"), "up.weight": ("x", "y")}
    first = {f"outers[0].net.{k}": v for k, v in renamed.items()}
    renamed["w"] = ("z", "z")
    second = {f"outers[1].net.{k}": v for k, v in renamed.items()}
    assert by_name(tree) == first | second


def test_of_two_declarations_in_one_annotation_the_outer_wins():
    inner = Annotated[eqx.nn.Linear, es.Axes(weight="a b", bias="a")]
    both = Annotated[inner, es.Axes(weight="c d")]
    names = names_of_field(es.Buffer[both], linear())
    assert (names.weight, names.bias) == (("c", "d"), ("a",))
    inside = Annotated[AB, es.Axes(**{"": "c d"})]
    assert names_of_field(inside, jnp.zeros((3, 2))) == ("c", "d")


def test_in_a_union_the_declaration_that_fits_applies():
    norm = Annotated[eqx.nn.LayerNorm, es.Axes(weight="embed", bias="embed")]
    conv = Annotated[eqx.nn.Conv2d, es.Axes(weight="out in 3 3")]
    layer = Annotated[eqx.nn.Linear, es.Axes(weight="mlp embed")]
    annotation = norm | layer | conv | None
    assert names_of_field(annotation, eqx.nn.LayerNorm(3)).weight == ("embed",)
    assert names_of_field(annotation, linear()).weight == ("mlp", "embed")
    assert names_of_field(annotation, None) is None
    with pytest.raises(ValueError, match=r"does not contain `weight`"):
        names_of_field(layer | norm, eqx.nn.Identity())


# --- Names that do not fit ------------------------------------------------------------


def test_more_names_than_axes_are_an_error():
    class Net(es.Module):
        w: es.Parameter[Float[Array, "mlp embed"]]

    with pytest.raises(ValueError, match=r"Net.w` is annotated with more axes") as info:
        es.axis_names({"nets": [Net(jnp.zeros(3))]})
    assert "`mlp embed` at `['nets'][0].w`, but the array has shape (3,)" in str(
        info.value
    )


def test_more_names_than_axes_in_axes_name_the_field_that_declares_them():
    with pytest.raises(
        ValueError, match=r"`Net.up` .*: `mlp` at `up.bias`.*shape \(\)"
    ):
        es.axis_names(eqx.tree_at(lambda m: m.up.bias, net(), jnp.ones(())))


@pytest.mark.parametrize(
    ("value", "there"),
    [
        (eqx.nn.Identity(), "contains no arrays."),
        ([linear()], "contains `[0].weight`, `[0].bias`."),
    ],
    ids=["nothing", "list"],
)
def test_a_path_that_does_not_exist_is_an_error(value, there):
    class Net(es.Module):
        up: Annotated[Any, es.Axes(scale="mlp embed")]

    with pytest.raises(ValueError, match=r"Net.up` declares") as info:
        es.axis_names([Net(value)])
    message = str(info.value)
    assert "'mlp embed'})`, but `[0].up` does not contain `scale`" in message
    assert there in message


# --- Optimizers -----------------------------------------------------------------------


def test_moments_have_the_names_of_their_parameters():
    names = by_name((net(), es.Optimizer(optax.adam(0.1)).init(net())))
    params = [n for n in EXPECTED if n != "state"]
    moments = {k: v for k, v in names.items() if "opt_state" in k and v != ()}
    assert len(moments) == 2 * len(params)
    for name, value in moments.items():
        assert value == next(EXPECTED[p] for p in params if name.endswith(f".{p}"))


def test_an_optimizer_of_some_parameters():
    wrt = es.all_of(es.trainable, es.path_matches("*.weight"))
    tx = optax.masked(
        optax.adam(0.1), lambda tree: es.mask(tree, es.under(lambda m: m.up))
    )
    optimizer = es.Optimizer(tx, wrt=wrt).init(net())
    assert set(by_name(optimizer).values()) == {(), ("mlp", "embed")}


def test_a_state_with_fewer_axes_than_declared_has_no_names():
    class Matrix(es.Module):
        w: es.Parameter[AB]

    def init(layers):
        return jax.tree.map(lambda x: x.sum(0), layers[0])

    tx = optax.GradientTransformation(init, lambda u, state, params: (u, state))
    optimizer = es.Optimizer(tx).init([Matrix(jnp.ones((3, 2)))])
    assert by_name(optimizer) == {"opt_state.w": (None,)}


def test_a_placeholder_has_no_axes():
    class Late(es.Module):
        up: Annotated[eqx.nn.Linear, es.Axes(weight="mlp embed")]
        w: es.Parameter[AB] = es.Initializer(lambda key: jnp.zeros((3, 2)))

    late = Late(es.lazy(eqx.nn.Linear, 2, 8))
    assert (es.axis_names(late).up, es.axis_names(late).w) == (None, None)
    names = es.axis_names(jax.eval_shape(late.init, jr.key(0)))
    assert (names.up.weight, names.w) == (("mlp", "embed"), ("a", "b"))


# --- `es.Axes` ------------------------------------------------------------------------


def test_axes_with_the_same_names_are_equal_in_any_order():
    a = es.Axes(weight="mlp embed", bias="mlp")
    b = es.Axes(bias="mlp", weight=" mlp  embed ")
    assert a == b
    assert hash(a) == hash(b)
    assert a != es.Axes(weight="mlp embed")
    assert a != "mlp embed"


def test_the_repr_of_axes_is_valid_code():
    path = {"layers[0].weight": "mlp embed"}
    assert repr(es.Axes(**path)) == "es.Axes(**{'layers[0].weight': 'mlp embed'})"


def test_axes_that_are_not_text_are_an_error():
    with pytest.raises(TypeError, match=r"Axes\(weight=\('mlp', 'embed'\)\).* string"):
        es.Axes(weight=("mlp", "embed"))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        ("mlp, embed", "separated with spaces, not commas"),
        ("*a *b", "more than once"),
    ],
)
def test_axes_that_jaxtyping_does_not_accept_are_an_error(dims, reason):
    with pytest.raises(ValueError, match=reason) as info:
        es.Axes(weight=dims)
    assert str(info.value).startswith(f"`es.Axes(weight={dims!r})`: ")
