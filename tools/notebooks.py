"""Convert the examples to notebooks, with their output and pictures.

`python tools/notebooks.py NAME...` runs these examples, or all, in full, and writes
`examples/NAME.ipynb`. With `--code`, it does not run them: the notebooks get the code
of the scripts, and keep their old output.

Each `# %%` line of a script begins a new cell. The script runs as a whole, and all its
output belongs to the last cell. As a hook of MkDocs, this file also turns each notebook
into a page.
"""

import ast
import base64
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PICTURES = ROOT / "docs" / "assets" / "examples"

Cell = dict[str, Any]


def names() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))


def notebook(name: str, printed: str, picture: bytes | None) -> dict[str, Any]:
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    title, _, about = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    code = source.split('"""', 2)[2].strip()
    cells = [markdown(f"# {title.rstrip('.')}\n{about}".strip())]
    *parts, last = re.split(r"^# %%", code, flags=re.MULTILINE)
    for part in parts:
        comment, body = re.fullmatch(r"(.*(?:\n# .*)*)((?s:.*))", part).groups()
        title, _, more = comment.replace("\n#", "").strip().partition(". ")
        if title:
            cells.append(markdown(f"## {title.rstrip('.')}\n\n{more}".strip()))
        if body.strip():
            cells.append(code_cell(body))
    if not parts:
        cells.append(code_cell(last))
    else:
        # An example that starts itself in a new process needs the script.
        run = f"!python {name}.py" if "__file__" in source else "main()"
        cells += [markdown("## Run it"), code_cell(run, stream(printed))]
    if picture is not None:
        show = f'from IPython.display import Image\n\nImage("{name}.png")'
        cells.append(code_cell(show, image(picture)))
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def markdown(text: str) -> Cell:
    return {"cell_type": "markdown", "metadata": {}, "source": lines(text)}


def code_cell(text: str, *outputs: dict[str, Any]) -> Cell:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [x for x in outputs if x],
        "source": lines(text.strip()),
    }


def stream(text: str) -> dict[str, Any]:
    if not text:
        return {}
    return {"name": "stdout", "output_type": "stream", "text": lines(text)}


def image(picture: bytes) -> dict[str, Any]:
    data = {"image/png": base64.b64encode(picture).decode()}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def run(name: str) -> tuple[str, bytes | None]:
    """Run an example. Returns its printed output and its picture."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXAMPLES / f"{name}.py")]
        done = subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        )
        picture = Path(folder, f"{name}.png")
        printed = re.sub(r"(?m)^(picture: ).*/", r"\1", done.stdout)
        return printed, small(picture) if picture.exists() else None


def small(path: Path) -> bytes:
    """A picture in 64 colors, which takes a third of the bytes."""
    from PIL import Image  # a dependency of Matplotlib

    buffer = io.BytesIO()
    Image.open(path).convert("RGB").quantize(64).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def kept(name: str) -> tuple[str, bytes | None]:
    """The output that is stored in the notebook of an example."""
    found = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    printed, picture = "", None
    for output in [x for cell in found["cells"] for x in cell.get("outputs", [])]:
        if output["output_type"] == "stream":
            printed = "".join(output["text"])
        else:
            picture = base64.b64decode(output["data"]["image/png"])
    return printed, picture


def written(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main(*args: str) -> None:
    only_code = "--code" in args
    for name in [arg for arg in args if arg != "--code"] or names():
        printed, picture = kept(name) if only_code else run(name)
        text = written(notebook(name, printed, picture))
        (EXAMPLES / f"{name}.ipynb").write_text(text, encoding="utf-8")
        if picture is not None:
            (PICTURES / f"{name}.png").write_bytes(picture)
        print(name)


# --- Pages ----------------------------------------------------------------------------


def page(name: str, content: dict[str, Any]) -> str:
    """A notebook as the Markdown of a page."""
    found = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        found.append(f"```py\n{text}\n```" if is_code else text)
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                found.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                found[-1] = f"![What it draws](../assets/examples/{name}.png)"
    where = f"[This notebook]({name}.ipynb) runs in the repository's folder `examples`."
    return "\n\n".join([found[0], where, *found[1:]]) + "\n"


def on_config(config: Any) -> None:
    headings = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    pages = [
        {title: f"notebooks/{name}.md"}
        for title, name in re.findall(r"(?m)^### (.*): `(\w+)\.py`$", headings)
    ]
    (start,) = (section["Start"] for section in config.nav if "Start" in section)
    (entry,) = (entry for entry in start if "Examples" in entry)
    entry["Examples"] = ["examples.md", *pages]


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    for name in names():
        text = (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
        # Rank the guides before the examples, whose code contains many words.
        content = "---\nsearch:\n  boost: 0.3\n---\n" + page(name, json.loads(text))
        for suffix, made in (("md", content), ("ipynb", text)):
            made_file = File.generated(
                config, f"notebooks/{name}.{suffix}", content=made
            )
            files.append(made_file)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri != "examples.md":
        return markdown
    link = r"\n\n[As a notebook](notebooks/\1.md), with what it prints."
    return re.sub(
        r"(?m)(?<=^### ).*`(\w+)\.py`$", lambda m: m[0] + m.expand(link), markdown
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
