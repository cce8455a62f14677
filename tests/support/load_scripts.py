"""Load an example or a tool as a module, without running it."""

import importlib.util
from pathlib import Path


ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def example(name, folder=EXAMPLES):
    return load(folder / f"{name}.py")


def tool(name):
    return load(ROOT / "tools" / f"{name}.py")


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
