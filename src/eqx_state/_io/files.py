"""`es.save` and `es.load`: a tree's arrays in a safetensors file."""

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any, Final, IO, TypeVar

import jax.core
import jax.random as jr
import numpy as np

from .._tree.filters import Filter
from .._tree.keys import is_typed
from .._tree.parts import layer_of, LayerPart, Part
from .._typing import PyTree
from .state_dict import by_name, restore, select, shown
from .stored import Box, Stored, typed, whole_of


# --- A file that replaces another as a whole, or not at all.


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """The name of a new, empty file that replaces `path` when the block ends.

    Until then `path` is as it was. An exception removes the new file.
    """
    target = os.path.realpath(path)  # without a slash at its end
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".{os.urandom(8).hex()}.tmp")
    try:
        if not os.path.basename(path):
            raise OSError(errno.EISDIR, "it is a directory")
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode  # as for any new file
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(target).st_mode
            if not stat.S_ISREG(mode):
                if stat.S_ISDIR(mode):
                    raise OSError(errno.EISDIR, "it is a directory")
                raise OSError(errno.EINVAL, "it is not a regular file")
            open(target, "r+b").close()  # raises if it may not be written
        yield temporary
        # safetensors may have put another file there, with another mode.
        os.chmod(temporary, stat.S_IMODE(mode))
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    # So that the new name survives a crash, too. Not every system opens directories.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --- The safetensors format: its dtypes, its header, and a file as arrays.
#
# What the format cannot say is in its metadata, as JSON under one key: the version of
# this layout, and which arrays are the data of typed PRNG keys.


METADATA: Final = "eqx_state"


VERSION: Final = 1


# The dtypes that both safetensors and NumPy or JAX have.
DTYPES: Final = {
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
}


def json_string(x: Any) -> str:
    """`x`, if the header can hold it; `TypeError` if it is not a string."""
    if not isinstance(x, str):
        raise TypeError(f"{x!r} in the metadata is not a string")
    return x


def read_header(file: IO[bytes]) -> tuple[int, dict[str, Any]]:
    """The size in bytes of the header of a safetensors file, and what it holds."""
    size = int.from_bytes(file.read(8), "little")
    rest = os.fstat(file.fileno()).st_size - 8
    if size > rest:
        raise ValueError(f"a header of {size} bytes does not fit in the {rest} there")
    return size, json.loads(file.read(size))


def write_arrays(
    safetensors: Any, path: str, arrays: dict[str, Any], metadata: dict[str, str]
) -> None:
    """Write a file; `OSError` with the system's reason if that fails."""
    try:
        safetensors.numpy.save_file(arrays, path, metadata)
    except safetensors.SafetensorError as e:
        # The system's reason is in its text only: "(os error 28)".
        found = re.search(r"\(os error (\d+)\)", str(e))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number)) from e
    _sort_metadata(path)


def _sort_metadata(path: str) -> None:
    """Sort the metadata in a file, so that equal trees make equal files."""
    with open(path, "r+b") as file:
        size, header = read_header(file)
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        new = text.encode().ljust(size)
        assert len(new) == size  # longer, it would overwrite the arrays
        file.seek(8)
        file.write(new)


def unreadable(what: str, path: str, error: Exception) -> ValueError:
    """The error of `what`, such as `es.load`, for a file that cannot be read."""
    return ValueError(
        f"`{what}` cannot read `{path}`: {error!r}. It is not a safetensors file, is"
        " truncated, or was written by a newer version."
    )


def import_safetensors() -> Any:
    """The library, which is an extra; `ImportError` says how to install it."""
    try:
        import safetensors.numpy
    except ImportError as e:
        raise ImportError(
            "`es.save` needs safetensors, which is not installed. It is"
            " the extra `io` of eqx_state. From a clone of eqx_state:"
            ' `python -m pip install ".[io]"`.'
        ) from e
    return safetensors


@contextlib.contextmanager
def stored_arrays(path: str) -> Iterator[dict[str, Stored]]:
    """The arrays of a file by name, which are read from it while the block runs."""
    # One file all the time: meanwhile another may take its place.
    with open(path, "rb") as file:
        try:
            arrays = _arrays(file)
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise unreadable("es.load", path, e) from e
        yield arrays


def _arrays(file: IO[bytes]) -> dict[str, Stored]:
    size, header = read_header(file)
    about = json.loads(header.pop("__metadata__", {}).get(METADATA, "{}"))
    if about.get("version", VERSION) > VERSION:
        raise ValueError("a later version of eqx_state wrote it")
    start, last = 8 + size, 0
    for begin, end in sorted(entry["data_offsets"] for entry in header.values()):
        if begin != last:
            raise ValueError(f"nothing is at {last}, or more than one array")
        last = end
    if start + last != os.fstat(file.fileno()).st_size:
        raise ValueError(f"the arrays end at {start + last}, and the file does not")
    arrays = {name: _array(file, start, **entry) for name, entry in header.items()}
    for name, impl in about.get("keys", {}).items():
        arrays[name] = typed(arrays[name], impl)
    return arrays


def _array(
    file: IO[bytes], start: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> Stored:
    begin, end = data_offsets
    # Another program's dtype: no array here has one that is equal to it.
    known = np.dtype(DTYPES.get(dtype) or [(dtype, "V1")])
    shape = shape if dtype in DTYPES else [end - begin]
    if math.prod(shape) * known.itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes are not {shape} of {dtype}")

    def read(box: Box) -> np.ndarray[Any, Any]:
        if 0 in shape:
            return np.empty([s.stop - s.start for s in box], known)
        mapped = np.memmap(file, known, "r", start + begin, tuple(shape))
        return np.array(mapped[box])  # no page of the file stays

    return Stored(shape, known, read)


_Tree = TypeVar("_Tree")


def save(
    path: str | os.PathLike[str],
    tree: PyTree,
    *filters: Filter,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the arrays of `tree` to a safetensors file.

    The new file replaces an old one only when it is complete and on the disk: whatever
    happens, `path` is the old file or the new one. A process that is killed may leave
    a part of the new one beside it, as `.*.tmp` or `.tmp*`. If `path` is a symbolic
    link, the file that it points to is replaced.

    Any program that reads [safetensors](https://github.com/huggingface/safetensors)
    finds the arrays under the names of `es.state_dict`, those of an `es.nn.Stacked`
    layer by layer; a typed key is stored as its key data, of `uint32`. Python numbers,
    strings and functions are part of the tree's structure, and are not saved: save a
    step counter as an array. Equal arrays and metadata make equal files.

    **Arguments:**

    - `path`: the file. Its directory must exist.
    - `tree`: any pytree: a model, an optimizer, `(model, np.int32(step))`.
    - `*filters`: what an array must satisfy, all of them, as in `es.filter`. Default:
        every array, including those without a kind.
    - `metadata`: a dictionary of strings, for `es.load_metadata` and other programs.
        Convert other values to strings: `json.dumps(config)`. Default: none.

    **Raises:**

    - `TypeError`: `metadata` is not a dictionary of strings.
    - `ValueError`: `metadata` has the key `"eqx_state"`, which the library uses itself.
    - `TypeError`: some arrays cannot be saved: they have a dtype that the format lacks,
        such as `complex128` or `int4`, are abstract, are traced, or lie in several
        processes. The message lists them; nothing is written.
    - `OSError`: the file cannot be written.
    - `es.NotInitializedError`: the tree still holds an `es.Initializer`.
    - `ImportError`: safetensors is not installed; it is the extra `io`.

    !!! example

        ```python
        import os
        import tempfile

        import equinox as eqx
        import eqx_state as es
        import jax.random as jr
        import optax

        model = eqx.nn.MLP(2, 1, 8, 1, key=jr.key(0))
        optimizer = es.Optimizer(optax.adam(1e-3)).init(model)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "checkpoint.safetensors")
            es.save(path, (model, optimizer), metadata={"epoch": "3"})
            loaded = es.load(path, (model, optimizer))
            assert es.load_metadata(path) == {"epoch": "3"}
        assert eqx.tree_equal(loaded, (model, optimizer))
        ```
    """
    path = _decoded(path, "save", "model")
    safetensors = import_safetensors()
    metadata = _checked(metadata)
    arrays: dict[str, Any] = {}
    keys: dict[str, str] = {}
    data: dict[int, Any] = {}  # by leaf: the layers of a stack are parts of one array
    problems: dict[str, str] = {}
    for name, (i, part) in select(by_name(tree), filters, tree).items():
        whole = whole_of(part)
        if (problem := _why_not(name, whole.value)) is not None:
            problems[shown(whole.name)] = problem
            continue
        if is_typed(whole.value):
            keys[name] = jr.key_impl(whole.value)
        if i not in data:
            data[i] = _as_numpy(whole.value)
        arrays[name] = _of(part, data[i])
    if problems:
        lines = [f"  {name}: {problem}" for name, problem in sorted(problems.items())]
        raise TypeError("\n".join(["`es.save` cannot write these arrays:", *lines]))
    about = json.dumps({"version": VERSION, "keys": keys}, sort_keys=True)
    try:
        with replacing(path) as temporary:
            write_arrays(safetensors, temporary, arrays, {METADATA: about, **metadata})
    except OSError as e:
        missing = isinstance(e, FileNotFoundError)
        reason = "its directory does not exist" if missing else e.strerror
        raise OSError(
            e.errno,
            f"`es.save` cannot write `{path}`: {reason}. Nothing on disk was changed.",
        ) from e


def load(
    path: str | os.PathLike[str], like: _Tree, *filters: Filter, strict: bool = True
) -> _Tree:
    """`like` with the arrays of a safetensors file in it; the inverse of `es.save`.

    Modes, and what is frozen, stay as in `like`. Only what is needed is read: the
    arrays that the filters select, one after the other, and of each the parts that the
    devices of this process hold.

    **Arguments:**

    - `path`: the file. Another program may have written it, with the names of
        `es.state_dict(like)`.
    - `like`: a pytree of the same names, shapes and dtypes. It may be abstract:
        `equinox.filter_eval_shape(make_model, key)` costs no memory.
    - `*filters`: what to load: the arrays that satisfy all of them, as in `es.filter`.
        These must be in the file, which may hold more. The rest stays as in `like`.
        Default: every array, which file and `like` must both have. For everything but
        the random keys: `es.not_(es.Rng)`.
    - `strict`: if `False`, what the file lacks stays as in `like`, even if a filter
        selects it, and what `like` lacks is skipped. Shapes and dtypes must agree all
        the same, as in `es.load_state_dict`, and at least one name must be in both.

    **Returns:**

    A new tree, with a NumPy array where `like` has one. Elsewhere it has a `jax.Array`,
    on the devices and with the sharding that the array in `like` says, if it says any.

    **Raises:**

    - `ValueError`: the file is not a safetensors file or is truncated, lacks a name
        that the filters select, has (without filters) a name that `like` lacks, or an
        array in it has another shape or dtype, or is to be split into shards that are
        not equal, or over an abstract mesh while no mesh is set; or, with
        `strict=False`, no name is in both. The message lists all names.
    - `OSError`: the file cannot be read. `FileNotFoundError`: there is none.
    - `es.NotInitializedError`: `like` still holds an `es.Initializer`.

    !!! example

        ```python
        import os
        import tempfile

        import equinox as eqx
        import eqx_state as es
        import jax.random as jr


        def make(key):
            return [eqx.nn.Linear(2, 3, key=key), es.nn.Dropout(0.5, key=key)]


        abstract = eqx.filter_eval_shape(make, jr.key(0))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            es.save(path, make(jr.key(0)))
            model = es.load(path, abstract)
            tuned = es.load(path, make(jr.key(1)), es.not_(es.Rng))
        assert eqx.tree_equal(model, make(jr.key(0)))
        assert eqx.tree_equal(tuned[0], model[0]) and tuned[1].rng == jr.key(1)
        ```
    """
    path = _decoded(path, "load", "like")
    named = by_name(like)
    wanted = select(named, filters, like)
    advice = (
        "Filters say what must be in the file; anything else in it is skipped:"
        " `es.load(path, like, es.Parameter)`; `es.TreePart` selects all that has a"
        " kind. `strict=False` skips names that only one of the two has."
    )
    with stored_arrays(path) as values:
        nothing = bool(wanted and values) and values.keys().isdisjoint(wanted)
        if nothing and not (filters and strict):
            advice = (
                "No name is in both: the file is of another tree. Load it into a tree"
                " like the one that was saved, and take what you need:"
                ' `es.load(path, {"model": model, "optimizer": optimizer})["model"]`.'
                " Of an `es.Ema` that is `es.load(path, ema).model`."
            )
        if values and not named:
            advice = _NO_ARRAYS
        lenient = bool(filters) or not (strict or nothing)
        if not (strict or nothing):
            wanted = {name: entry for name, entry in wanted.items() if name in values}
        unexpected = [] if lenient else [name for name in values if name not in named]
        what = f"`es.load`: the file `{path}`"
        return restore(like, wanted, values, what, advice, unexpected)


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a safetensors file, as it was given to `es.save`.

    It reads no array, and does not need safetensors.

    **Arguments:**

    - `path`: the file. Another program may have written it.

    **Returns:**

    A dictionary of strings; empty if the file has no metadata.

    **Raises:**

    - `ValueError`: the file is not a safetensors file, or is truncated.
    - `OSError`: the file cannot be read. `FileNotFoundError`: there is none.

    !!! example

        ```python
        import json
        import os
        import tempfile

        import eqx_state as es
        import jax.numpy as jnp

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.safetensors")
            config = json.dumps({"width": 8})
            es.save(path, {"w": jnp.ones(8)}, metadata={"config": config})
            assert json.loads(es.load_metadata(path)["config"]) == {"width": 8}
        ```
    """
    path = _decoded(path, "load_metadata")
    with open(path, "rb") as file:
        try:
            _, header = read_header(file)
            metadata = header.get("__metadata__", {})
            return {k: json_string(x) for k, x in metadata.items() if k != METADATA}
        except (AttributeError, TypeError, ValueError) as e:
            raise unreadable("es.load_metadata", path, e) from e


def _decoded(path: Any, function: str, *others: str) -> str:
    try:
        return os.fsdecode(path)
    except TypeError:
        call = f"es.{function}({', '.join(['path', *others])})"
        given = type(path).__qualname__
        raise TypeError(_NOT_A_PATH.format(call, given)) from None


_NOT_A_PATH: Final = """`{}`: the path comes first, a string or an `os.PathLike`, and \
a `{}` was given."""

_NO_ARRAYS: Final = """`like` has no arrays. It is a tree like the one that was saved, \
which may be abstract: `eqx.filter_eval_shape(make_model, key)`."""


def _checked(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is None:
        return {}
    wrong = [f"a `{type(metadata).__qualname__}` was given"]
    if isinstance(metadata, Mapping):
        wrong = [
            f"`{key!r}` has a `{type(value).__qualname__}`"
            for key, value in metadata.items()
            if not (isinstance(key, str) and isinstance(value, str))
        ]
    if wrong:
        raise TypeError(
            f"`es.save(..., metadata=...)` takes a dictionary of strings, and"
            f" {wrong[0]}. Convert other values: `metadata={{'config':"
            " json.dumps(config)}`. Arrays are saved as part of the tree:"
            " `es.save(path, (model, step))`."
        )
    if METADATA in metadata:
        raise ValueError(
            f"`es.save(..., metadata=...)`: the library itself uses the key"
            f" `{METADATA!r}` in each file. Choose another."
        )
    return dict(metadata)


def _as_numpy(x: Any) -> np.ndarray[Any, Any]:
    # In C order, which safetensors assumes.
    return np.asarray(jr.key_data(x) if is_typed(x) else x, order="C")


def _of(part: Part, data: Any) -> Any:
    """What the array of a tree, or of a layer of a stack, has of the data of a leaf."""
    return layer_of(data, part.index) if isinstance(part, LayerPart) else data


def _why_not(name: str, x: Any) -> str | None:
    """Why an array cannot be saved; `None` if it can."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return "abstract: it has no values"
    if isinstance(x, jax.core.Tracer):
        return "traced; save outside of `jit` and other transforms"
    if isinstance(x, jax.Array) and x.is_deleted():
        return "deleted, since it was donated; save what the step returned"
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            return (
                "not all of it is in this process; save by Orbax (orbax-checkpoint),"
                " which writes from all processes, as the guide *Checkpoints* shows, or"
                " gather it by"
                " `jax.experimental.multihost_utils.process_allgather(x, tiled=True)`"
            )
    if is_typed(x):
        if isinstance(jr.key_impl(x), str):
            return None
        return "a key whose implementation has no name; save `jax.random.key_data`"
    if x.dtype.name not in DTYPES.values():
        return f"safetensors has no `{x.dtype}`; cast it, or save it in parts"
    return "safetensors uses this name itself" if name == "__metadata__" else None
