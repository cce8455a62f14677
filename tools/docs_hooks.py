"""A hook of MkDocs: links to other libraries, made pages, and `llms.txt`.

`docs_inventory.txt` says where JAX, Equinox and optax document their names. The hook
turns each of these names in code on a page, such as `jax.vmap`, into a link. On the
pages of the API, it also links our own names.

The hook adds the folder `benchmarks` to the site, the list of the guides to their
overview, and a description to each page: its question, or its first sentence.
"""

import posixpath
import re
import tomllib
from itertools import cycle
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
INVENTORY = Path(__file__).with_name("docs_inventory.txt")
ALIASES = {
    "es": "eqx_state",
    "eqx": "equinox",
    "jnp": "jax.numpy",
    "jr": "jax.random",
    "jtu": "jax.tree_util",
    "lax": "jax.lax",
}
# Do not add links inside of these: a link, a heading, a block of code.
SKIPPED = r"<(a|autoref|h1|h2|h3|pre)\b.*?</\1>"
MARKED = r"<!-- marked: ([\d -]+) -->\n\n( *```python)"  # lines of the next block
FRONT = r"(?s)\A---\n.*?\n---\n+"  # settings of a page
PLOT = r'(<p>(?:<a [^>]*>)?<img alt="([^"]*)" src="[^"]*\.png"[^>]*>(?:</a>)?)</p>'
OTHER = r"\s*(```|[#|<:!]|$)"  # paragraphs without a sentence
CODE = r"<code>(?P<name>[a-z]\w*(?:\.\w+)+)(?:\([^<]*\))?</code>"


def inventory() -> dict[str, str]:
    """The address of each name."""
    found, url = {}, ""
    for line in INVENTORY.read_text().splitlines():
        if "{}" in line and not line.startswith("#"):
            url = line
        elif line and not line.startswith("#"):
            name, _, page = line.partition(" ")
            found[name] = url.format(page or name)
    return found


def full_name(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"{ALIASES.get(first, first)}.{rest}"


def link(html: str, ours: bool) -> str:
    """`html`, with a reference around each name in code that is not a link yet."""

    def reference(match: re.Match[str]) -> str:
        text, name = match.group(), match["name"]
        if name is None or (name.startswith("es.") and not ours):
            return text
        # `optional`: if nothing has this name, the code is not linked.
        return f'<autoref identifier="{full_name(name)}" optional>{text}</autoref>'

    return re.sub(f"{SKIPPED}|{CODE}", reference, html, flags=re.DOTALL)


def label(table: re.Match[str]) -> str:
    """Add the column name to each cell: on a phone, rows are shown as cards."""
    cells = re.findall("<th.*?>(.*?)</th>", table[0])
    names = cycle(re.sub("<.*?>", "", cell).replace('"', "&quot;") for cell in cells)
    return re.sub("<td", lambda _: f'<td data-column="{next(names)}"', table[0])


def across(markdown: str, path: str) -> str:
    """Links between `docs` and `benchmarks`, which are one folder on the site."""
    if path.startswith("benchmarks/"):
        return markdown.replace("](../docs/", "](../")
    return re.sub(r"\]\(\.\./((?:\.\./)*benchmarks/)", r"](\1", markdown)


def overview(guides: Any) -> str:
    """A list of the guides in this section of the menu, with the question of each."""
    found = []
    for section in [item for item in guides.children if item.is_section]:
        found.append(f"\n## {section.title}\n")
        for page in section.children:
            path = posixpath.relpath(page.file.src_uri, "guides")
            text = about(re.sub(FRONT, "", page.file.content_string))
            found.append(f"- [{page.title}]({path}): {text}")
    return "\n".join(found) + "\n"


# --- Events ---------------------------------------------------------------------------

PAGES: dict[str, tuple[str, str]] = {}  # Markdown and address, in the order of the menu
MENU: list[Any] = []


def on_config(config: Any) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        config.site_description = tomllib.load(file)["project"]["description"]


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    for path in sorted((ROOT / "benchmarks").iterdir()):
        if path.name == "README.md" or path.suffix in (".png", ".svg"):
            name = f"benchmarks/{path.name}"
            files.append(File(name, str(ROOT), config.site_dir, True))


def on_nav(nav: Any, config: Any, files: Any) -> None:
    MENU[:] = nav.items
    PAGES.update({page.file.src_uri: ("", "") for page in nav.pages})
    for name, url in inventory().items():
        config.plugins["autorefs"].register_url(name, url)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    path = page.file.src_uri
    if path.startswith("guides/"):  # Rank the guides first: they explain a word best.
        page.meta.setdefault("search", {"boost": 3})
    markdown = re.sub(MARKED, r'\2 hl_lines="\1"', across(markdown, path))
    if path == "guides/index.md":
        (guides,) = (item for item in MENU if item.title == "Guides")
        markdown += overview(guides)
    if path != "index.md":
        text = about(markdown)
        if path.startswith("examples/"):
            text = f"{title(markdown)}. {text}"
        page.meta.setdefault("description", text.replace("`", ""))
    PAGES[path] = markdown, page.canonical_url
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    html = re.sub("<table>.*?</table>", label, html, flags=re.DOTALL)
    html = re.sub(PLOT, r'\1</p>\n<p class="caption">\2</p>', html)
    return link(html, ours=page.file.src_uri.startswith("api/"))


def on_post_build(config: Any) -> None:
    """Write `llms.txt`, a list of the pages, and `llms-full.txt`, their contents."""
    import griffe  # a dependency of mkdocstrings

    package = griffe.load("eqx_state", search_paths=["src"])

    def docstring(match: re.Match[str]) -> str:
        _, _, name = match[1].partition(".")
        found = (package[name] if name else package).docstring
        return f"## `{match[1]}`\n\n{found.value if found else ''}"

    lines = [f"# {config.site_name}", "", f"> {config.site_description.strip()}", ""]
    full = []
    for markdown, url in PAGES.values():
        lines.append(f"- [{title(markdown)}]({url}): {about(markdown)}")
        full.append(re.sub(r"^::: (\S+)$", docstring, markdown, flags=re.MULTILINE))
    for name, text in (
        ("llms.txt", "\n".join(lines)),
        ("llms-full.txt", "\n\n".join(full)),
    ):
        (Path(config.site_dir) / name).write_text(text + "\n", encoding="utf-8")


def title(markdown: str) -> str:
    return re.search("^# (.*)", markdown, re.MULTILINE)[1]


def about(markdown: str) -> str:
    """The first sentence of a page, or the question that it answers."""
    paragraphs = [p for p in markdown.split("\n\n") if not re.match(OTHER, p)]
    text = re.sub(r"\[([^\]]+)\][\[(][^\])]*[\])]", r"\1", " ".join(paragraphs[:1]))
    text = " ".join(text.split())
    if text.startswith("*") and text.endswith("*"):
        return text[1:-1]
    return re.split(r"(?<=[.?])\s", text)[0]
