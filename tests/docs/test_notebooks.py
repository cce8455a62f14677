"""The pages and notebooks of the examples, and whether their output is up to date."""

import jax
import nbformat
import pytest
from load_scripts import tool


notebooks = tool("notebooks")
each_example = pytest.mark.parametrize("name", notebooks.names())


def code_cells(name):
    made = nbformat.reads(notebooks.notebook(name), 4)
    nbformat.validate(made)
    return [cell for cell in made.cells if cell.cell_type == "code"]


@each_example
def test_output_and_picture_are_those_of_the_code(name):
    _, code = notebooks.printed(name)
    advice = f"the example has changed: `python tools/notebooks.py {name}`"
    assert code == notebooks.fingerprint(name), advice
    picture = notebooks.RESULTS / f"{name}.png"
    assert notebooks.draws(name) == picture.exists()


def test_a_picture_is_out_of_date_if_the_code_has_changed_but_not_for_a_comment(
    tmp_path, monkeypatch
):
    script, pictures = (
        '"""Doc."""\n\nimport _pictures\n{}',
        "{}\ndef a(): {}\ndef b(): {}",
    )

    def fingerprint(code="x = 1", shared="", own="1", other="1"):
        (tmp_path / "a.py").write_text(script.format(code))
        (tmp_path / "_pictures.py").write_text(pictures.format(shared, own, other))
        return notebooks.fingerprint("a")

    monkeypatch.setattr(notebooks, "EXAMPLES", tmp_path)
    for same in ({"code": "\n # why\nx = 1"}, {"other": "2"}):
        assert fingerprint(**same) == fingerprint()
    for changed in ({"code": "x = 2"}, {"shared": "C = 1"}, {"own": "2"}):
        assert fingerprint(**changed) != fingerprint()


@each_example
def test_a_notebook_has_the_code_and_the_output(name):
    *before, last = code_cells(name)
    for cell in before:
        code = cell.source.removeprefix(f"%%writefile {name}.py\n")
        assert code in notebooks.source(name)
        compile(code, name, "exec")
    runs = last.source in ("main()", f"!python {name}.py")
    assert runs or last.source in notebooks.source(name)
    assert last.outputs[0].text == notebooks.printed(name)[0] != ""


def test_the_notebook_of_the_cheapest_example_runs(capsys):
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for cell in code_cells("linear_regression"):
            exec(cell.source, names)
    assert "least squares: y = " in capsys.readouterr().out


@each_example
def test_a_page_has_the_code_the_output_and_the_files(name):
    page = notebooks.page(name)
    assert page.startswith("# ")
    assert f"({name}.py)" in page
    assert f"({name}.ipynb)" in page
    assert notebooks.printed(name)[0] in page
    assert (f"assets/examples/{name}.png" in page) == notebooks.draws(name)
    assert str(notebooks.ROOT) not in page
    assert "/tmp" not in page


def test_a_title_and_the_text_below_it_are_markdown():
    texts = [cell.source for cell in notebooks.cells("linear_regression")]
    assert "## Compare with the least squares solution" in texts
    assert any("\n\nThe model is a second argument" in text for text in texts)


def test_each_example_has_a_heading_from_which_its_page_is_linked():
    assert sorted(notebooks.headings()) == notebooks.names()
