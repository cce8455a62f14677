"""The public names of `eqx_state`, and their documentation."""

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import eqx_state as es


KINDS = ["TreePart", "Parameter", "Buffer", "State", "Rng", "BatchStat", "OptState"]
FILTERS = ["all_of", "any_of", "inside", "not_", "path_matches", "trainable", "under"]
TREES = (
    "parts filter partition update mask spec map modules map_modules configure"
    " axis_names sharding functional train eval freeze unfreeze init reseed to_equinox"
    " tabulate nonfinite state_dict load_state_dict from_torch save load load_metadata"
).split()
TRANSFORMS = (
    "mutable audit capture find_nonfinite value_and_grad grad vmap SPLIT scan"
    " while_loop fori_loop cond switch checkpoint jit vjp jvp linearize jacfwd"
    " jacrev hessian custom_vjp shard_map per_layer"
).split()
CLASSES = (
    "Axes Module Part Finding Initializer RngStream Optimizer Ema field lazy nn"
).split()
ERRORS = ["TraceError", "NotInitializedError", "LostStateWarning"]
LAYERS = ["BatchNorm", "Dropout", "Stacked"]

PUBLIC = sorted(name for name in dir(es) if not name.startswith("_"))
DOCUMENTED = [
    *(f"es.{name}" for name in PUBLIC if name not in ("nn", "SPLIT", "trainable")),
    *(f"es.nn.{name}" for name in dir(es.nn) if not name.startswith("_")),
]


def look_up(name):
    thing = es
    for part in name.split(".")[1:]:
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize(
    "name", [*KINDS, *FILTERS, *TREES, *TRANSFORMS, *CLASSES, *ERRORS]
)
def test_the_name_is_public(name):
    assert hasattr(es, name)


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_public(name):
    assert issubclass(getattr(es.nn, name), es.Module)


def test_no_other_name_is_public():
    assert set(PUBLIC) == {*KINDS, *FILTERS, *TREES, *TRANSFORMS, *CLASSES, *ERRORS}
    assert set(PUBLIC) >= {n for n in vars(es) if not n.startswith("_")}


def test_the_version_is_that_of_the_installed_package():
    assert es.__version__ == importlib.metadata.version("eqx-state")


def test_layers_are_all_that_is_in_nn():
    public = {name for name in dir(es.nn) if not name.startswith("_")}
    assert set(LAYERS) <= public <= {*LAYERS, "Stateful"}


def test_nn_is_the_only_public_submodule():
    submodules = [n for n in PUBLIC if isinstance(getattr(es, n), types.ModuleType)]
    assert submodules == ["nn"]


def test_a_star_import_imports_the_public_names():
    # They include `eval`, `filter` and `map`, so avoid a star import.
    namespace = {}
    exec("from eqx_state import *", namespace)
    assert {name for name in namespace if not name.startswith("_")} == set(PUBLIC)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_it_is_documented(name):
    thing = look_up(name)
    doc = inspect.getdoc(thing)
    assert doc
    first_line = doc.splitlines()[0]
    # The docstring of a dataclass without one is its signature.
    assert not first_line.startswith(f"{name.split('.')[-1]}(")
    inherited = [inspect.getdoc(base) for base in getattr(thing, "__mro__", ())[1:]]
    assert doc not in inherited


# The example for the kinds is in `TreePart`, and those for the errors on other pages.
WITH_EXAMPLE = [
    name
    for name in DOCUMENTED
    if name.split(".")[-1] not in (*KINDS[1:], *ERRORS, "Part")
]


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_it_has_an_example(name):
    doc = inspect.getdoc(look_up(name))
    assert "!!! example" in doc, name
    example = doc.split("!!! example")[1]
    assert "```python" in example
    assert "assert" in example


@pytest.mark.parametrize("name", DOCUMENTED)
def test_its_public_methods_are_documented(name):
    thing = look_up(name)
    if not isinstance(thing, type):
        return
    for method, value in vars(thing).items():
        if not method.startswith("_") and (
            inspect.isfunction(value) or isinstance(value, property)
        ):
            assert inspect.getdoc(value), f"{name}.{method}"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_argument_of_a_function_has_a_type_and_a_line(name):
    thing = look_up(name)
    if not inspect.isfunction(thing):
        return
    for parameter in inspect.signature(thing).parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter


def test_public_names_are_defined_in_the_package():
    # Errors and pages show such names, so users must be able to import them.
    for name in PUBLIC:
        module = getattr(getattr(es, name), "__module__", "eqx_state")
        assert module.split(".")[0] == "eqx_state", name


def test_module_has_the_methods_of_the_design():
    methods = (
        "train eval freeze unfreeze filter partition update replace init initialized"
        " initializing sow"
    ).split()
    assert [m for m in methods if not hasattr(es.Module, m)] == []


def test_only_two_field_names_are_reserved():
    class Named(es.Module):
        key: es.Rng
        state: es.State
        init_scale: es.Parameter
        params: es.Parameter
        mode: es.State
        name: str

    assert Named.__dataclass_fields__.keys() >= {"training", "frozen", "mode"}
    for name in ("training", "frozen"):
        with pytest.raises(TypeError, match=rf"{name}"):
            type("Taken", (es.Module,), {"__annotations__": {name: bool}})


# --- The docstring of the package, which is the first page of the API -----------------

ROOT = Path(__file__).parents[2]
LISTED = {
    name: " ".join(sentence.split())
    for name, sentence in re.findall(
        r"^- `(es\..+)`: (.*(?:\n    .*)*)$", es.__doc__, re.MULTILINE
    )
}


def test_the_package_lists_all_public_names():
    assert LISTED.keys() == {*DOCUMENTED, "es.SPLIT", "es.trainable"}


@pytest.mark.parametrize("name", LISTED)
def test_the_package_lists_a_name_with_the_first_sentence_of_its_docstring(name):
    if name in DOCUMENTED:
        doc = inspect.getdoc(look_up(name))
    else:  # a value, whose docstring is below it in the source
        files = Path(es.__file__).parent.rglob("*.py")
        source = "\n".join(file.read_text(encoding="utf-8") for file in files)
        doc = re.search(rf'^{name[3:]}\b.*\n"""(.*)"""', source, re.MULTILINE)[1]
    sentence = re.split(r"(?<=\.)\s", doc, maxsplit=1)[0]
    assert LISTED[name] == " ".join(sentence.split())


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "src/eqx_state"])
def test_one_sentence_says_what_the_library_is(page):
    # The site's description and `llms.txt` read it from `pyproject.toml`, too.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    is_package = page.startswith("src")
    text = es.__doc__ if is_package else (ROOT / page).read_text(encoding="utf-8")
    paragraph = text.rpartition("# eqx_state\n\n")[2].partition("\n\n")[0]
    assert " ".join(paragraph.split()) == settings["project"]["description"]


# --- Importing the package ------------------------------------------------------------


def test_lazily_imported_names_equal_those_for_type_checkers():
    tree = ast.parse(Path(es.__file__).read_text(encoding="utf-8"))
    (choice,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in choice.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: f".{x.module}" for x in imports for alias in x.names}
    assert len(imports) == len(choice.body)
    assert all(alias.asname == alias.name for x in imports for alias in x.names)
    assert seen == es._LATER


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        (es, "optimizer", "es.Optimizer"),
        (es, "Param", "es.Parameter"),
        (es, "Rngs", "es.RngStream"),
        (es, "remat", "es.checkpoint"),
        (es, "tree_at", "eqx.tree_at"),
        (es, "Linear", "eqx.nn.Linear"),
        (es.nn, "Linear", "eqx.nn.Linear"),
        (es.nn, "Parameter", "es.Parameter"),
        (es.nn, "Batchnorm", "es.nn.BatchNorm"),
        (es, "no_such_name", None),
    ],
)
def test_an_unknown_name_suggests_the_intended_one(module, name, instead):
    hint = f": did you mean `{instead}`?" if instead else ""
    match = f"module '{module.__name__}' has no attribute '{name}'{hint}"
    with pytest.raises(AttributeError, match=f"^{re.escape(match)}$"):
        getattr(module, name)


def test_hold_is_gone_and_the_error_says_what_to_write_instead():
    match = r"'hold': it is gone.*with `es\.jit`.*`es\.scan` inside one `es\.jit`"
    with pytest.raises(AttributeError, match=match):
        _ = es.hold
    with pytest.raises(AttributeError, match="has no attribute 'hold'$"):
        _ = es.nn.hold


def test_import_prints_nothing_starts_no_backend_and_is_lazy():
    # After a backend has started, `jax.config.update("jax_platforms", ...)` has no
    # effect.
    code = """
import sys
import eqx_state as es
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
first = dir(es)
assert "Optimizer" in first and "optax" not in sys.modules and "rich" not in sys.modules
assert es.Optimizer is es.Optimizer and "optax" in sys.modules
assert [name for name in dir(es) if name[0] != "_"] == es.__all__
assert not hasattr(es, "optimizer")
assert "__version__" in first and "__version__" not in vars(es)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
