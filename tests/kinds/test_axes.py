"""`es.Axes`: what it accepts, and how two of them compare."""

import pytest

import eqx_state as es


def test_axes_made_alike_are_equal_whatever_the_order():
    a = es.Axes(weight="mlp embed", bias="mlp")
    b = es.Axes(bias="mlp", weight=" mlp  embed ")
    assert a == b
    assert hash(a) == hash(b)
    assert a != es.Axes(weight="mlp embed")
    assert a != "mlp embed"


def test_axes_print_as_they_can_be_written():
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
