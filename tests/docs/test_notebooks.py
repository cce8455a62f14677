"""The notebooks of the examples: they have the scripts' code, and their output."""

import importlib.util
import json
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


def load_tool():
    path = ROOT / "tools" / "notebooks.py"
    spec = importlib.util.spec_from_file_location("notebooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()
each_example = pytest.mark.parametrize("name", tool.names())


@each_example
def test_the_notebook_of_an_example_has_its_code(name):
    text = (tool.EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
    advice = f"the example has changed: `python tools/notebooks.py {name}`"
    assert text == tool.written(tool.notebook(name, *tool.kept(name))), advice


@each_example
def test_code_is_cut_and_nothing_is_lost(name):
    cells = tool.notebook(name, "", None)["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    script = (tool.EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    for part in code[:-1] if len(code) > 1 else code:
        assert part in script
        compile(part, name, "exec")
    titles = script.count("\n# %% ")
    assert len([c for c in cells if c["cell_type"] == "markdown"]) >= titles + 1


@each_example
def test_the_picture_is_that_of_the_documentation(name):
    _, picture = tool.kept(name)
    path = tool.PICTURES / f"{name}.png"
    assert (picture is not None) == path.exists()
    if picture is not None:
        assert picture == path.read_bytes()


@each_example
def test_the_page_has_the_output(name):
    text = (tool.EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
    printed, picture = tool.kept(name)
    page = tool.page(name, json.loads(text))
    assert page.startswith("# ")
    assert f"({name}.ipynb)" in page
    assert printed.rstrip() in page
    assert (f"assets/examples/{name}.png" in page) == (picture is not None)
    assert str(ROOT) not in page
    assert "/tmp" not in page


def test_a_title_and_what_is_said_below_it():
    cells = tool.notebook("linear_regression", "", None)["cells"]
    titles = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    assert titles[-2] == "## Compare with the least squares solution"
    assert any("\n\nThe model is a second argument" in title for title in titles)
