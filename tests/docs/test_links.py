"""The documentation site: what its hook makes of names, tables, links and the menu."""

import re
from types import SimpleNamespace

import pytest
from load_scripts import ROOT, tool


hooks = tool("docs_hooks")


def test_each_name_has_one_address():
    lines = hooks.INVENTORY.read_text().splitlines()
    names = [x.split()[0] for x in lines if x and x[0] != "#" and "{}" not in x]
    assert len(names) == len(set(names)) == len(hooks.inventory())


def test_the_site_mentions_each_name_of_the_inventory(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    unused = hooks.inventory().keys() - tool("docs_inventory").mentioned()
    assert not unused, "no text mentions these: `python tools/docs_inventory.py`"


def test_pruning_drops_the_names_that_nothing_mentions(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    pruning = tool("docs_inventory")
    monkeypatch.setattr(pruning, "mentioned", lambda: {"jax.vmap"})
    kept = pruning.pruned().splitlines()
    assert [x for x in kept if x and x[0] != "#" and "{}" not in x] == ["jax.vmap"]
    assert len([x for x in kept if "{}" in x]) > 10


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("jax.vmap", "https://docs.jax.dev/en/latest/_autosummary/jax.vmap.html"),
        (
            "jax.sharding.Mesh",
            "https://docs.jax.dev/en/latest/jax.sharding.html#jax.sharding.Mesh",
        ),
        (
            "equinox.filter_grad",
            "https://docs.kidger.site/equinox/api/transformations/#equinox.filter_grad",
        ),
        (
            "optax.adamw",
            "https://optax.readthedocs.io/en/latest/api/generated/optax.adamw.html",
        ),
        (
            "optax.inject_hyperparams",
            "https://optax.readthedocs.io/en/latest/api/generated/"
            "optax.schedules.inject_hyperparams.html",
        ),
    ],
)
def test_names_of_each_library_are_in_the_inventory(name, url):
    assert hooks.inventory()[name] == url


@pytest.mark.parametrize(
    ("code", "identifier"),
    [
        ("jax.lax.scan", "jax.lax.scan"),
        ("eqx.nn.Linear(2, 3)", "equinox.nn.Linear"),
        ("jnp.where", "jax.numpy.where"),
    ],
)
def test_a_name_in_code_becomes_a_reference(code, identifier):
    text = f"<p>Use <code>{code}</code>.</p>"
    (found,) = re.findall(
        r'<autoref identifier="(.*?)" optional>', hooks.link(text, False)
    )
    assert found == identifier
    assert re.sub(r"</?autoref.*?>", "", hooks.link(text, False)) == text


def test_our_names_are_linked_on_pages_of_the_api_only():
    text = "<p><code>es.vmap</code></p>"
    assert hooks.link(text, False) == text
    assert 'identifier="eqx_state.vmap"' in hooks.link(text, True)


@pytest.mark.parametrize(
    "text",
    [
        '<a href="#x"><code>jax.jit</code></a>',
        "<h2>With <code>jax.jit</code></h2>",
        "<pre><code>jax.jit(f)</code></pre>",
        '<autoref identifier="x"><code>jax.jit</code></autoref>',
        "<code>model(x)</code>",
        "<code>y = jax.jit(f)</code>",
    ],
)
def test_links_headings_blocks_and_other_code_do_not_change(text):
    assert hooks.link(text, True) == text


def test_the_title_and_the_first_sentence_of_a_page():
    page = "# State\n\n*My layer [must][x] remember\nsomething: how?*\n\nMore. Text.\n"
    assert hooks.title(page) == "State"
    assert hooks.about(page) == "My layer must remember something: how?"
    assert (
        hooks.about("# Kinds\n\n`es.State` is a kind. More.\n")
        == "`es.State` is a kind."
    )
    assert hooks.about("# API\n\n::: eqx_state.jit\n") == ""


def test_a_page_gets_its_description_and_marked_lines():
    page = SimpleNamespace(
        file=SimpleNamespace(src_uri="a.md"), meta={}, canonical_url=""
    )
    text = "# A\n\nUse `es.jit`. Always.\n\n"
    text += "<!-- marked: 2 4-5 -->\n\n```python\nx = 1\n```\n"
    html = hooks.on_page_markdown(text, page, {}, {})
    assert page.meta == {"description": "Use es.jit."}
    assert '\n\n```python hl_lines="2 4-5"\nx = 1\n```' in html


def test_a_cell_of_a_table_has_the_name_of_its_column():
    table = (
        "<table><tr><th></th><th>a <code>b</code></th></tr>"
        "<tr><td>1</td><td>2</td></tr><tr><td>3</td><td>4</td></tr></table>"
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri="state.md"))
    html = hooks.on_page_content(table, page, {}, {})
    assert re.findall('column="(.*?)">(.)', html) == [
        ("", "1"),
        ("a b", "2"),
        ("", "3"),
        ("a b", "4"),
    ]


def test_a_plot_has_its_description_as_a_caption():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="examples.md"))
    plot = '<p><a href="a.png"><img alt="Loss, and samples" src="a.png" /></a></p>'
    html = hooks.on_page_content(plot, page, {}, {})
    assert html == f'{plot}\n<p class="caption">Loss, and samples</p>'


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("index.md", "../benchmarks/README.md", "benchmarks/README.md"),
        ("guides/state.md", "../../benchmarks/cost.png", "../benchmarks/cost.png"),
        ("benchmarks/README.md", "../docs/guides/x.md#y", "../guides/x.md#y"),
        ("guides/state.md", "../tour.md", "../tour.md"),
    ],
)
def test_the_benchmarks_are_a_folder_of_the_pages(page, link, on_the_site):
    assert hooks.across(f"[a]({link})", page) == f"[a]({on_the_site})"


def test_the_overview_lists_the_guides_of_the_menu_by_section():
    def page(title, path, text):
        file = SimpleNamespace(src_uri=path, content_string=text)
        return SimpleNamespace(title=title, file=file, is_section=False)

    pages = [
        page("State", "guides/state.md", "# State\n\n*Where\nis it?*\n\nHere.\n"),
        page("Recipes", "tips.md", "# Recipes\n\nShort programs. Many.\n"),
    ]
    section = SimpleNamespace(title="Basics", children=pages, is_section=True)
    start = page("Overview", "guides/index.md", "# Guides\n")
    assert hooks.overview(SimpleNamespace(children=[start, section])) == (
        "\n## Basics\n\n- [State](state.md): Where is it?\n"
        "- [Recipes](../tips.md): Short programs.\n"
    )
