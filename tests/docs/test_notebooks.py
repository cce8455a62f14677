"""Each notebook contains the code of its example, and its output."""

import json
from pathlib import Path

import pytest
from load_scripts import tool


ROOT = Path(__file__).parents[2]


notebooks = tool("notebooks")
each_example = pytest.mark.parametrize("name", notebooks.names())


@each_example
def test_the_notebook_of_an_example_has_its_code(name):
    text = (notebooks.EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
    advice = f"the example has changed: `python tools/notebooks.py {name}`"
    assert text == notebooks.written(notebooks.notebook(name, *notebooks.kept(name))), (
        advice
    )


@each_example
def test_code_is_cut_and_nothing_is_lost(name):
    cells = notebooks.notebook(name, "", None)["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    script = (notebooks.EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    for part in code[:-1] if len(code) > 1 else code:
        assert part in script
        compile(part, name, "exec")
    titles = script.count("\n# %% ")
    assert len([c for c in cells if c["cell_type"] == "markdown"]) >= titles + 1


@each_example
def test_a_notebook_has_the_picture_of_the_documentation(name):
    _, picture = notebooks.kept(name)
    path = notebooks.PICTURES / f"{name}.png"
    assert (picture is not None) == path.exists()
    if picture is not None:
        assert picture == path.read_bytes()


@each_example
def test_the_page_has_the_output(name):
    text = (notebooks.EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
    printed, picture = notebooks.kept(name)
    page = notebooks.page(name, json.loads(text))
    assert page.startswith("# ")
    assert f"({name}.ipynb)" in page
    assert printed.rstrip() in page
    assert (f"assets/examples/{name}.png" in page) == (picture is not None)
    assert str(ROOT) not in page
    assert "/tmp" not in page


def test_a_markdown_cell_has_a_title_and_the_text_below_it():
    cells = notebooks.notebook("linear_regression", "", None)["cells"]
    titles = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    assert titles[-2] == "## Compare with the least squares solution"
    assert any("\n\nThe model is a second argument" in title for title in titles)
