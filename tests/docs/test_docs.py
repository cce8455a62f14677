"""The documentation site as a whole: names and pages. Examples run elsewhere.

`nox -s docs` builds the site strictly, which checks links, anchors, cross references
and the menu."""

import ast
import builtins
import dataclasses
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from load_scripts import EXAMPLES, load, tool

import eqx_state as es


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix()
)

PUBLIC = {
    *(f"eqx_state.{name}" for name in dir(es) if name[0] != "_" and name != "nn"),
    *(f"eqx_state.nn.{name}" for name in dir(es.nn) if name[0] != "_"),
}


def prose(page):
    """The text of a page without its code blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^( *)(```+).*?^\1\2$", "", text, flags=re.DOTALL | re.MULTILINE)


def documented():
    pages = sorted({*(DOCS / "api").glob("*.md")} - {DOCS / "api" / "index.md"})
    return Counter(
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    )


def test_every_public_name_is_on_exactly_one_api_page():
    assert documented() == Counter(PUBLIC)


@each_page
def test_a_figure_is_a_link_to_its_file(page):
    # The link enlarges it.
    text = prose(page)
    for file in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text):
        assert f"]({file})]({file})" in text, file


@each_page
def test_a_page_has_one_title_and_fences_that_close(page):
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1
    assert page.read_text(encoding="utf-8").count("```") % 2 == 0


def test_what_readers_search_for_is_a_heading():
    found = "\n".join(prose(page) for page in PAGES)
    for words in (
        "Batch normalization",
        "Complex parameters",
        "Per-example gradients",
        "Hessian-vector products",
        "Gradient accumulation",
        "Several steps in one call",
        "Trees in different modes",
        "Install for CPU, GPU or TPU",
    ):
        assert f"\n## {words}\n" in found, words


# --- Examples -------------------------------------------------------------------------


def test_the_training_guide_has_the_code_of_the_example():
    guide = (ROOT / "docs/guides/training.md").read_text(encoding="utf-8")
    script = (EXAMPLES / "training.py").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    *program, _ = blocks  # the last block runs the program
    whole = ast.unparse(ast.parse("".join(program)))
    parts = ast.unparse(ast.parse(script.partition("def main")[0]).body[1:])
    assert whole == parts


def test_the_page_has_the_first_line_of_the_docstring_of_each_example():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    found = re.findall(r"^### .*: `(\w+)\.py`\n\n(.*)$", page, re.MULTILINE)
    scripts = {path.stem: path.read_text() for path in EXAMPLES.glob("[!_]*.py")}
    docs = {name: ast.get_docstring(ast.parse(x)) for name, x in scripts.items()}
    assert dict(found) == {name: doc.splitlines()[0] for name, doc in docs.items()}
    assert len(found) == len(docs)


def test_each_page_has_a_description_of_its_own():
    hooks = tool("docs_hooks")
    texts = [re.sub(hooks.FRONT, "", page.read_text()) for page in PAGES]
    found = [hooks.about(text) for text in texts]
    assert all(20 < len(text) < 180 for text in found)
    assert len(set(found)) == len(found)


# --- Packages that a page needs -------------------------------------------------------

DEPENDENCIES = {"eqx_state", "equinox", "jax", "jaxtyping", "numpy", "optax", "rich"}
PACKAGES = {"haiku": "dm-haiku", "orbax": "orbax-checkpoint"}  # imports: packages
pages = tool("pages")


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.stem)
def test_a_page_says_which_packages_it_needs(page):
    # `nox -s pages` runs each page in an environment with these.
    code = pages.script(page)
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", code, re.MULTILINE))
    others = imported - DEPENDENCIES - sys.stdlib_module_names
    needed = {PACKAGES.get(name, name) for name in others}
    needed |= {"io"} if re.search(r"\bes\.(save|load)\b", code) else set()
    needed |= {"flatbuffers"} if "jax.export" in code else set()
    assert pages.needs(page)[0] == needed


def test_a_page_runs_alone_in_an_environment_that_it_describes(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    page, says = tmp_path / "page.md", "This page needs `A_FLAG=x=1`.\n\n"
    code = """
```python
import os
```

    ```python
    assert "XLA_FLAGS" not in os.environ and os.environ["A_FLAG"] == "x=1"
    ```
"""
    page.write_text(says + code)
    assert pages.run(page)
    page.write_text(code)
    assert not pages.run(page)


# --- Troubleshooting ------------------------------------------------------------------


def troubles():
    """The entries of the page that have a message and code."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return text.partition("\n## Other messages\n")[0]


def error_headings():
    """Class and text of headings such as `### ValueError: `State keeps its shape``."""
    return re.findall(r"^### (\w+): (`+)(.*)\2$", troubles(), re.MULTILINE)


def texts_in_the_source():
    """All string literals of the library, with a NUL character for each placeholder."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            values = [p.value if isinstance(p, ast.Constant) else None for p in parts]
            text = "".join(v if isinstance(v, str) else "\0" for v in values)
            yield re.sub(r"\{\w*\}", "\0", text)  # a placeholder of a template


def is_in(source, text):
    """Whether a message contains this text, which may start inside a placeholder."""
    # `an` inserts the article and the class.
    text = re.sub(r"\ban? `[A-Z]\w*`", "\0", text)
    text = re.sub(r"`[A-Z]\w*`", "`\0`", text)
    parts = ((text[:i], text[i:]) for i in range(1, len(text)))
    return text in source or any(
        a + "\0" in source and b in source for a, b in parts if len(b) > len(a)
    )


def test_every_error_in_troubleshooting_except_one_of_python_is_in_the_source():
    headings = error_headings()
    assert len(headings) > 10
    source = "\n".join(texts_in_the_source())
    others = [text for _, _, text in headings if not is_in(source, text)]
    assert others == ["float() argument must be a string or a real number, not 'tuple'"]
    assert not is_in(source, "State loses its shape and dtype")


def test_every_heading_in_troubleshooting_is_an_error_that_is_raised_below_it():
    # A block that runs raises it: `with raises(ValueError, "the text"):`.
    known = {**vars(es), **vars(dataclasses), **vars(builtins)}
    entries = re.split(r"^### ", troubles(), flags=re.MULTILINE)[1:]
    assert len(entries) == len(error_headings())
    for entry in entries:
        name = entry.partition(":")[0]
        assert issubclass(known[name], Exception)
        assert re.search(rf"with raises\(\s*(es\.)?{name},", entry), name


def test_a_source_file_that_is_passed_to_pytest_runs_only_once():
    code = """
import sys, pytest
pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "src/eqx_state/_ema.py"])
import eqx_state
assert sys.modules["eqx_state._ema"].Ema is eqx_state.Ema
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# --- The README -----------------------------------------------------------------------


def test_links_of_the_readme_are_files_and_absolute_in_a_release():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    release = load(ROOT / "hatch_build.py").absolute(text, "https://x.org/a", "1.2")
    links = re.findall(r"\]\(([^)]+)\)", text)
    files = [link.partition("#")[0] for link in links if ":" not in link]
    assert [name for name in files if not (ROOT / name).is_file()] == []
    assert re.findall(r"\]\(https://x.org/a/blob/v1.2/([^)#]+)", release) == files
    assert release.count("](http") == len(links) > len(files) > 5
