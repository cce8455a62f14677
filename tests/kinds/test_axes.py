"""`es.Axes`: which arguments it accepts, and when two of them are equal."""

import pytest

import eqx_state as es


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
        ("_3", "fixed axis be anonymous"),
    ],
)
def test_axes_that_jaxtyping_does_not_accept_are_an_error(dims, reason):
    with pytest.raises(ValueError, match=reason) as info:
        es.Axes(weight=dims)
    assert str(info.value).startswith(f"`es.Axes(weight={dims!r})`: ")
