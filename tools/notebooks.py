"""The examples on the site: a page, a notebook and the script of each.

    python tools/notebooks.py NAME...     # run these examples, or all, in full

This writes `docs/assets/examples/NAME.txt`, what the example prints, and `NAME.png`, if
it draws. The last line of the text identifies the code that was run, so that a test can
tell when text and picture are out of date.

As a hook of MkDocs, this file makes the pages and notebooks from the scripts and these
results, and runs nothing. Jupytext reads the scripts: `# %% Title` begins a new cell,
and comments directly below it belong to the title. Only the outputs are ours: a script
runs as a whole, and all its output belongs to the last cell.
"""

import ast
import hashlib
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output


ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
RESULTS = ROOT / "docs" / "assets" / "examples"

LAST_LINE = "\n[the output of code {}]\n"
# Paths, progress bars, and what JAX prints when processes connect.
NOISE = r"(?m)^(picture: |.*━━|\[Gloo\]).*\n"
GUIDES = {"training": "guides/training.md"}  # instead of a page of the example
HEADING = r"(?m)^#+ (.*?):? `(\w+)\.py`$"  # of `docs/examples.md`


def names() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))


def source(name: str) -> str:
    return (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")


def draws(name: str) -> bool:
    return "import _pictures" in source(name)


# --- Running --------------------------------------------------------------------------


def main(*chosen: str) -> None:
    for name in chosen or names():
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder, f"{name}.png")
            command = [sys.executable, str(EXAMPLES / f"{name}.py")]
            command += [str(picture)] if draws(name) else []
            done = subprocess.run(
                command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
            )
            if draws(name):
                (RESULTS / picture.name).write_bytes(small(picture))
        text = re.sub(NOISE, "", done.stdout).strip("\n")
        text += LAST_LINE.format(fingerprint(name))
        (RESULTS / f"{name}.txt").write_text(text, encoding="utf-8")
        print(name)


def small(path: Path) -> bytes:
    """A picture in 64 colors, which takes a third of the bytes."""
    from PIL import Image  # a dependency of Matplotlib

    buffer = io.BytesIO()
    Image.open(path).convert("RGB").quantize(64).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def fingerprint(name: str) -> str:
    """A hash of the code of an example and of its picture, without comments."""
    code = source(name).split('"""', 2)[2]
    if draws(name):
        pictures = (EXAMPLES / "_pictures.py").read_text(encoding="utf-8")
        for node in ast.parse(pictures).body:
            if getattr(node, "name", "_").startswith("_") or node.name == name:
                code += ast.get_source_segment(pictures, node) or ""
    lines = [x for x in code.splitlines() if not re.match(r"\s*(#|$)", x)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def printed(name: str) -> tuple[str, str]:
    """What an example printed, and the fingerprint of the code that printed it."""
    text = (RESULTS / f"{name}.txt").read_text(encoding="utf-8")
    before, after = LAST_LINE.split("{}")
    output, _, found = text.rpartition(before)
    return output, found.removesuffix(after)


# --- Notebooks and pages --------------------------------------------------------------


def cells(name: str) -> list[NotebookNode]:
    """The cells of the notebook. The docstring and the titles become Markdown."""
    doc, code = source(name).split('"""', 2)[1:]
    title, _, about = doc.partition("\n")
    found = [new_markdown_cell(f"# {title.rstrip('.')}\n{about}".rstrip())]
    *parts, last = jupytext.reads(code.strip(), "py:percent").cells
    for cell in parts:
        text, code = re.fullmatch(r"((?:# .*\n)*)((?s:.*))", cell.source).groups()
        if title := cell.metadata.get("title"):
            text = re.sub("(?m)^# ", "", text)
            found += [new_markdown_cell(f"## {title}\n\n{text}".strip())]
        found += [new_code_cell(code if title else cell.source)]
    if parts:  # the last cell of a script with several runs it
        last = new_code_cell("main()")
        found += [new_markdown_cell("## Run it")]
    return [*found, last]


def notebook(name: str) -> str:
    made = cells(name)
    if "__file__" in source(name):  # it starts itself in new processes
        script = new_code_cell(f"%%writefile {name}.py\n{source(name)}")
        made = [made[0], script, made[-2], new_code_cell(f"!python {name}.py")]
    made[-1].outputs = [new_output("stream", name="stdout", text=printed(name)[0])]
    for i, cell in enumerate(made):
        cell.id, cell.metadata = f"cell-{i}", {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.writes(new_notebook(cells=made, metadata={"kernelspec": kernel}))


def page(name: str) -> str:
    """The Markdown of a page with the code of an example, and what it prints."""
    first, *others = cells(name)
    files = f"Download the [script]({name}.py) or the [notebook]({name}.ipynb)."
    found = [first.source, files]
    for cell in others:
        is_code = cell.cell_type == "code"
        found += [f"```py\n{cell.source}\n```" if is_code else cell.source]
    found.append(f"```text\n{printed(name)[0]}\n```")
    if draws(name):
        found.append(f"![What it draws](../assets/examples/{name}.png)")
    return "\n\n".join(found) + "\n"


def headings() -> dict[str, str]:
    """The title of each example, in the order of the page."""
    text = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    return {name: title for title, name in re.findall(HEADING, text)}


def on_config(config: Any) -> None:
    found = {name: title for name, title in headings().items() if name not in GUIDES}
    pages = [{title: f"examples/{name}.md"} for name, title in found.items()]
    (start,) = (section["Start"] for section in config.nav if "Start" in section)
    (entry,) = (entry for entry in start if "Examples" in entry)
    entry["Examples"] = ["examples.md", *pages]


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    for name in names():
        # Rank the guides before the examples, whose code contains many words.
        content = "---\nsearch:\n  boost: 0.3\n---\n" + page(name)
        made = {"md": content, "ipynb": notebook(name), "py": source(name)}
        if name in GUIDES:
            del made["md"]
        for suffix, text in made.items():
            uri = f"examples/{name}.{suffix}"
            files.append(File.generated(config, uri, content=text))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link the page and the files of each example below its heading."""
    if page.file.src_uri != "examples.md":
        return markdown

    def links(heading: re.Match[str]) -> str:
        name = heading[2]
        path, text = f"examples/{name}.md", "Code and output"
        if name in GUIDES:
            path, text = GUIDES[name], "Code, explained"
        files = f"[script](examples/{name}.py) · [notebook](examples/{name}.ipynb)"
        return f"{heading[0]}\n\n[{text}]({path}) · {files}"

    return re.sub(HEADING, links, markdown)


if __name__ == "__main__":
    main(*sys.argv[1:])
