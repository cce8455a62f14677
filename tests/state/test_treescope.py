"""What treescope draws of a module, and that it is no requirement."""

import builtins
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
import treescope

import eqx_state as es


# It looks at every name of JAX, the deprecated ones as well.
pytestmark = pytest.mark.filterwarnings("ignore:jax:DeprecationWarning")


class Cache(es.State):
    pass


class Block(es.Module):
    linear: eqx.nn.Linear
    norm: es.nn.BatchNorm


class Model(es.Module):
    blocks: list[Block]
    scales: dict[str, es.Parameter]
    constant: es.Buffer[Block]
    cache: Cache
    rng: es.Rng
    name: str = "model"


class Holds(es.Module):
    state: es.State


def make() -> Model:
    def block(i: int) -> Block:
        return Block(eqx.nn.Linear(2, 3, key=jr.key(i)), es.nn.BatchNorm(3))

    return Model([block(0)], {"a": jnp.ones(2)}, block(1), jnp.zeros((5, 2)), jr.key(2))


def lines(tree: object) -> list[str]:
    with treescope.using_expansion_strategy(max_height=None, target_width=0):
        return treescope.render_to_text(tree).splitlines()


def kinds(tree: object) -> list[tuple[str, str]]:
    """Name and kind of each array, in the order in which they are drawn."""
    found, name = [], ""
    for line in lines(tree):
        if match := re.match(r"""\s*(\w+|'\w+')(=|: )""", line):
            name = match[1]
        if match := re.search(r",.*  # (\w+)$", line):
            found.append((name, match[1]))
    return found


def test_each_array_has_the_name_of_its_kind():
    model = make()
    drawn = [kind for _, kind in kinds(model)]
    assert drawn == [part.kind.__name__ for part in es.parts(model) if part.kind]
    assert ("cache", "Cache") in kinds(model)
    assert ("weight", "Buffer") in kinds(model)
    assert ("weight", "Parameter") in kinds(model)
    assert ("'a'", "Parameter") in kinds(model)


def test_an_array_without_a_kind_has_no_mark():
    class Net(es.Module):
        index: jax.Array
        weight: es.Parameter

    net = Net(jnp.arange(3), jnp.ones(2))
    assert kinds(net) == [("weight", "Parameter")]
    assert any("index=" in line for line in lines(net))


def test_the_first_line_has_a_legend():
    assert lines(make())[0] == "Model(  # Parameter BatchStat Buffer Cache Rng"
    assert sum("BatchStat Buffer" in line for line in lines([make()])) == 1
    assert lines(es.nn.Dropout(0.5))[0] == "Dropout("


def test_each_kind_has_a_color_and_a_kind_of_ones_own_that_of_its_base():
    page = treescope.render_to_html([make(), es.RngStream(jr.key(0))], compressed=False)
    found = re.findall(r"background-color: (#\w{6});[^>]*>(\w+)<", page)
    colors = dict((kind, color) for color, kind in found)
    assert {*colors} == {"Parameter", "BatchStat", "Buffer", "Cache", "Rng"}
    assert len({*found}) == len({*colors.values()}) == 5
    state = treescope.render_to_html(Holds(jnp.ones(1)), compressed=False)
    assert f"{colors['Cache']};" in state


def test_the_tree_has_classes_fields_and_values():
    text = "\n".join(lines(make()))
    for fragment in (
        "Model(",
        "blocks=[",
        "linear=Linear(",
        "norm=BatchNorm(",
        "name='model'",
    ):
        assert fragment in text
    assert "training" not in text
    assert "module_init_done" not in text


def test_flags_are_shown_when_they_are_set():
    text = "\n".join(lines(es.eval(es.nn.BatchNorm(3)).freeze()))
    assert "training=False" in text
    assert "frozen=True" in text


@pytest.mark.parametrize(
    "tree", [[make()], {"a": (make(),)}, eqx.nn.Sequential([make()])]
)
def test_models_inside_other_trees(tree):
    assert kinds(tree) == kinds(make())


def test_one_array_in_two_places_may_be_of_two_kinds():
    class Two(es.Module):
        mean: es.BatchStat
        weight: es.Parameter

    x = jnp.ones(2)
    assert kinds(Two(x, x)) == [("mean", "BatchStat"), ("weight", "Parameter")]


def test_drawing_twice_draws_the_same():
    model = make()
    assert lines(model) == lines(model)
    assert kinds([model, model]) == 2 * kinds(model)


def test_a_class_of_ones_own_may_draw_itself():
    class Own(es.Module):
        w: es.Parameter

        def __treescope_repr__(self, path, subtree_renderer):
            from treescope import rendering_parts

            return rendering_parts.text("my own")

    class Outer(es.Module):
        own: Own

    assert "own=my own" in "\n".join(lines(Outer(Own(jnp.ones(2)))))


def test_what_is_no_concrete_array():
    abstract = eqx.filter_eval_shape(make)
    assert [kind for _, kind in kinds(abstract)] == [k for _, k in kinds(make())]

    class Lazy(es.Module):
        w: es.Parameter

    assert "w=Initializer" in "\n".join(lines(Lazy(es.Initializer(lambda key: key))))

    @jax.jit
    def traced(model):
        seen.append(kinds(model))
        return model.blocks[0].norm.mean

    seen: list[object] = []
    traced(es.filter(make()))
    assert len(seen[0]) == len(kinds(make()))


def test_paths_are_those_of_python():
    page = treescope.render_to_html(make(), compressed=False)
    assert ".blocks[0].linear.weight" in page
    assert ".scales[&#39;a&#39;]" in page or ".scales['a']" in page


def test_a_notebook_shows_html():
    model = make()
    page = model._repr_html_()
    assert "Parameter" in treescope.render_to_html(model, compressed=False)
    assert page.startswith("<")
    # treescope would add to the tree what a class has under this name.
    assert "Rich HTML representation" not in "\n".join(lines(model))


def test_without_treescope_there_is_no_html(monkeypatch):
    imported = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.partition(".")[0] == "treescope":
            raise ModuleNotFoundError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert make()._repr_html_() is None
    assert "Model(" in repr(make())


def test_treescope_is_imported_when_it_is_needed():
    code = "import sys, eqx_state; assert 'treescope' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
