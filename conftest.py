"""Run the examples in docstrings and on Markdown pages as tests.

They run under JAX's defaults, as a reader would run them. The stricter settings of
`tests/conftest.py` apply only to the tests.
"""

import contextlib
import ctypes
import gc
import io
import os
import re
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
from audited import audited
from sybil import Document, Example, Sybil
from sybil.document import PythonDocStringDocument
from sybil.evaluators.python import PythonEvaluator
from sybil.example import NotEvaluated
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from sybil.sybil import SybilCollection

# Pytest imports a file of `src` that is named on its command line. If the package were
# not there yet, the file would run twice, and there would be two classes of each name.
import eqx_state  # noqa: F401


# JAX reads this when it first looks for its devices. One thread compiles a program: the
# programs are small, and each core has a worker.
FLAGS = " --xla_force_host_platform_device_count=8"
FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    # Tests compile much and run little: without XLA's fusion emitters, it compiles in
    # two thirds of the time. Newer versions do not know the flag, and would abort.
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + FLAGS

# Without most of XLA's optimizations, the suite takes three quarters of the time. The
# processes that tests start read the environment.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", True)

# Without the user's frames in the compiled program, tracing is faster, too.
jax.config.update("jax_traceback_in_locations_limit", 0)

# For `JAX_COMPILATION_CACHE_DIR`: keep small programs, too. Programs that differ only
# in the names that a profiler shows are different programs.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_compilation_cache_include_metadata_in_key", True)

# A worker with many compiled programs takes several GB. On Linux, XLA also aborts the
# process when it has 65,530 memory maps, of which each program uses several.
GB, MANY_MAPS = 2**30, 40_000
MAPS, MEMORY = Path("/proc/self/maps"), Path("/proc/self/statm")


def pytest_xdist_auto_num_workers() -> int | None:
    """One worker for each core, but at most one for 2 GB of memory."""
    if not hasattr(os, "sysconf"):
        return None  # on Windows, as without this function
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // (2 * GB)))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop the compiled programs if there are too many."""
    if not MEMORY.exists():
        return
    resident = int(MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    is_last = nextitem is None or nextitem.path != item.path
    has_many = is_last and MAPS.read_bytes().count(b"\n") > MANY_MAPS
    if has_many or resident > 1.5 * GB:
        jax.clear_caches()
        gc.collect()
        # Otherwise the C library keeps the memory of this process.
        ctypes.CDLL(None).malloc_trim(0)


# A block with this line counts the traces of a step. An audit is one more.
COUNTS_TRACES = "traces += 1"

ALIASES = (
    "import equinox as eqx, eqx_state as es, jax, jax.numpy as jnp, jax.random as jr"
)


def new_namespace(path: str) -> dict[str, Any]:
    """The namespace of a new module, in which string annotations can be resolved."""
    module = types.ModuleType("example_" + re.sub(r"\W", "_", path))
    sys.modules[module.__name__] = module
    return module.__dict__


class Page(Document):
    """A Markdown page: its examples share a namespace, and import what they use."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__(text, path)
        self.namespace = new_namespace(path)
        self.printed = ""  # by the last block of Python
        self.audited: set[Any] = set()


class Docstrings(PythonDocStringDocument):
    """The docstrings of a file: each example has a new namespace with common aliases.

    Only the text is read from the file. The code that runs is the installed package.
    """

    def import_document(self, example: Example) -> None:
        example.namespace = new_namespace(self.path)
        exec(ALIASES, example.namespace)
        raise NotEvaluated


class PrintingParser(CodeBlockParser):
    """A block of Python on a page. `PrintedParser` reads what it prints."""

    language = "python"
    run = PythonEvaluator()

    def evaluate(self, example: Example) -> None:
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            mock.patch.dict(os.environ, COLUMNS="80"),
            _audited(example) as findings,
        ):
            self.run(example)
        example.document.printed = out.getvalue()
        assert findings == []


def _audited(example: Example) -> Any:
    """Audit the training steps in a block. No page may drop state, for example."""
    if COUNTS_TRACES in example.parsed:
        return contextlib.nullcontext([])
    return audited(example.document.audited)


class PrintedParser(CodeBlockParser):
    """A block of text below a block of Python that prints shows all that it prints."""

    language = "text"

    def evaluate(self, example: Example) -> None:
        printed, example.document.printed = example.document.printed, ""
        if printed:  # otherwise the block is not the output of a program
            lines = [line.rstrip() for line in printed.rstrip().split("\n")]
            assert lines == example.parsed.rstrip().split("\n")


parsers = [PythonCodeBlockParser(), SkipParser()]
printing = [PrintingParser(), PrintedParser(), SkipParser()]

pytest_collect_file = SybilCollection(
    [
        Sybil(parsers, path="src", pattern="*.py", document_types={".py": Docstrings}),
        Sybil(
            printing,
            pattern="*.md",
            exclude="CHANGELOG.md",
            document_types={".md": Page},
        ),
    ]
).pytest()
