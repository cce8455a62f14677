"""`es.save` and `es.load`: a tree's arrays in a safetensors file.

Two things that the format lacks are in its metadata, as JSON under one key, so that
equal trees make equal files: the version of this layout, and which arrays are key data.
"""

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any, Final, IO, TypeVar

import jax
import jax.core
import jax.random as jr
import numpy as np

from ._filters import Filter
from ._keys import is_typed
from ._state_dict import by_name, restore, select, shown


_Tree = TypeVar("_Tree")

_METADATA: Final = "eqx_state"
_VERSION: Final = 1

# The dtypes of safetensors that NumPy or JAX have.
_DTYPES: Final = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *filters: Filter,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the arrays of `tree` to a safetensors file.

    The file is written beside the old one and takes its place when it is whole and on
    the disk: whatever happens, there is the old file or the new one. Only a process
    that is killed may leave parts of one, `.*.tmp` and `.tmp*`, beside it. If `path` is
    a symbolic link, the file that it leads to is replaced.

    Any program that reads [safetensors](https://github.com/huggingface/safetensors)
    finds the arrays under the names of `es.state_dict`; a typed key is its key data, of
    `uint32`. Python numbers, strings and functions are the structure of the tree, and
    are not saved: a step counter is saved as an array. Equal arrays and metadata make
    equal files.

    **Arguments:**

    - `path`: the file. Its directory must exist.
    - `tree`: any pytree: a model, an optimizer, `(model, np.int32(step))`.
    - `*filters`: all must hold, as in `es.filter`. Without any: every array, those of
        no kind too.
    - `metadata`: a dictionary of strings, which `es.load_metadata` returns, as other
        programs do. Convert other values to strings: `json.dumps(config)`. Default:
        none.

    **Raises:**

    - `TypeError`: `metadata` is not a dictionary of strings.
    - `ValueError`: `metadata` has the key `"eqx_state"`, which is our own.
    - `TypeError`: an array cannot be saved: it has a dtype that the format lacks, such
        as `complex128` or `int4`, is abstract, is traced, or lies in several processes.
        It lists them; nothing is written.
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
    safetensors = _import_safetensors()
    metadata = _checked(metadata)
    arrays: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    problems: list[str] = []
    for name, (_, part) in select(by_name(tree), filters, tree).items():
        value = part.value
        if (problem := _why_not(name, value)) is not None:
            problems.append(f"  {shown(name)}: {problem}")
            continue
        if is_typed(value):
            keys[name] = jr.key_impl(value)
            value = jr.key_data(value)
        arrays[name] = value
    if problems:
        raise TypeError(
            "\n".join(["`es.save` cannot write these arrays:", *sorted(problems)])
        )
    # In C order, which safetensors takes for granted.
    arrays = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    about = json.dumps({"version": _VERSION, "keys": keys}, sort_keys=True)
    path = os.fsdecode(path)
    try:
        with _replacing(path) as temporary:
            try:
                about = {_METADATA: about, **metadata}
                safetensors.numpy.save_file(arrays, temporary, about)
            except safetensors.SafetensorError as e:
                # It has the system's reason in words only: "(os error 28)".
                found = re.search(r"\(os error (\d+)\)", str(e))
                number = int(found[1]) if found else errno.EIO
                raise OSError(number, os.strerror(number)) from e
            _sort_metadata(temporary)
    except OSError as e:
        missing = isinstance(e, FileNotFoundError)
        reason = "its directory does not exist" if missing else e.strerror
        raise OSError(
            e.errno,
            f"`es.save` cannot write `{path}`: {reason}. On disk all is as it was.",
        ) from e


def load(
    path: str | os.PathLike[str], like: _Tree, *filters: Filter, strict: bool = True
) -> _Tree:
    """`like` with the arrays of a safetensors file in it; the inverse of `es.save`.

    Train and eval mode and what is frozen stay as in `like`. The whole file is read,
    whatever the filters are.

    **Arguments:**

    - `path`: the file. Another program may have written it: the names must be those of
        `es.state_dict(like)`.
    - `like`: a pytree of the same names, shapes and dtypes. It may be abstract:
        `equinox.filter_eval_shape(make_model, key)` costs no memory.
    - `*filters`: what is to be loaded; all must hold, as in `es.filter`. It must be in
        the file, which may hold more. The rest stays as in `like`. Without any: every
        array of the file and of `like`. For all but the random keys: `es.not_(es.Rng)`.
    - `strict`: if `False`, what is not in the file stays as in `like`, also where a
        filter selects it, and what `like` has not is passed over. Shapes and dtypes
        must agree all the same, as in `es.load_state_dict`.

    **Returns:**

    A new tree. Where `like` has a NumPy array, there is a NumPy array; elsewhere a
    `jax.Array`, on the devices and with the sharding of the one in `like`, if that says
    so.

    **Raises:**

    - `ValueError`: the file is not a safetensors file or not a whole one, lacks a name
        that the filters select, has (if there are no filters) one that `like` has not,
        or an array in it has another shape or dtype. It lists all names.
    - `OSError`: the file cannot be read. `FileNotFoundError`: there is none.
    - `es.NotInitializedError`: `like` still holds an `es.Initializer`.
    - `ImportError`: safetensors is not installed; it is the extra `io`.

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
    safetensors = _import_safetensors()
    path = os.fsdecode(path)
    named = by_name(like)
    wanted = select(named, filters, like)
    values = _read(safetensors, path)
    if not strict:
        wanted = {name: entry for name, entry in wanted.items() if name in values}
    advice = (
        "Filters say what must be in the file, and what else is in it is passed over:"
        " `es.load(path, like, es.Parameter)`; `es.TreePart` is all that has a kind."
        " `strict=False` passes over names that only one of the two has."
    )
    known = values if filters or not strict else named
    return restore(like, wanted, known, values, f"`es.load`: the file `{path}`", advice)


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a safetensors file, as `es.save` was given it.

    No array is read, and safetensors need not be installed.

    **Arguments:**

    - `path`: the file. Another program may have written it.

    **Returns:**

    A dictionary of strings; empty if the file has no metadata.

    **Raises:**

    - `ValueError`: the file is not a safetensors file, or not a whole one.
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
    path = os.fsdecode(path)
    with open(path, "rb") as file:
        try:
            _, header = _read_header(file)
            metadata = header.get("__metadata__", {})
            return {k: _string(x) for k, x in metadata.items() if k != _METADATA}
        except (AttributeError, TypeError, ValueError) as e:
            raise _unreadable("es.load_metadata", path, e) from e


def _string(x: Any) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{x!r} in the metadata is not a string")
    return x


def _read_header(file: IO[bytes]) -> tuple[int, dict[str, Any]]:
    """The size in bytes of the header of a safetensors file, and what it holds."""
    size = int.from_bytes(file.read(8), "little")
    rest = os.fstat(file.fileno()).st_size - 8
    if not 0 < size <= rest:
        raise ValueError(f"its header would have {size} bytes, and {rest} are there")
    return size, json.loads(file.read(size))


def _sort_metadata(path: str) -> None:
    """Put the metadata of a file in order: safetensors writes them in any."""
    with open(path, "r+b") as file:
        size, header = _read_header(file)
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        new = text.encode().ljust(size)
        assert len(new) == size  # or it would reach into the arrays
        file.seek(8)
        file.write(new)


def _checked(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is None:
        return {}
    wrong = None
    if not isinstance(metadata, Mapping):
        wrong = f"a `{type(metadata).__qualname__}` was given"
    else:
        for key, value in metadata.items():
            if not (isinstance(key, str) and isinstance(value, str)):
                wrong = f"`{key!r}` has a `{type(value).__qualname__}`"
    if wrong is not None:
        raise TypeError(
            f"`es.save(..., metadata=...)` takes a dictionary of strings, and {wrong}."
            " Convert other values: `metadata={'config': json.dumps(config)}`."
            " Arrays are saved as part of the tree: `es.save(path, (model, step))`."
        )
    if _METADATA in metadata:
        raise ValueError(
            f"`es.save(..., metadata=...)`: the key `{_METADATA!r}` is that of the"
            " library itself in each file. Choose another."
        )
    return dict(metadata)


def _unreadable(what: str, path: str, error: Exception) -> ValueError:
    return ValueError(
        f"`{what}` cannot read `{path}`: {error!r}. It is not a safetensors file, is"
        " truncated, or was written by a newer version."
    )


def _import_safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as e:
        raise ImportError(
            "`es.save` and `es.load` need safetensors, which is not installed. It is"
            " the extra `io` of eqx_state. From a clone of it:"
            ' `python -m pip install ".[io]"`.'
        ) from e
    return safetensors


def _why_not(name: str, x: Any) -> str | None:
    """Why an array cannot be saved; `None` if it can."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return "abstract, it has no values"
    if isinstance(x, jax.core.Tracer):
        return "traced; save outside of `jit` and other transforms"
    if isinstance(x, jax.Array) and x.is_deleted():
        return "deleted: it was donated; save what the step has returned"
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            return (
                "not all of it is in this process; gather it by"
                " `jax.experimental.multihost_utils.process_allgather(x, tiled=True)`,"
                " or save by orbax-checkpoint"
            )
    if is_typed(x):
        if isinstance(jr.key_impl(x), str):
            return None
        return "a key of an implementation that has no name; save `jax.random.key_data`"
    if x.dtype.name not in _DTYPES.values():
        return f"safetensors has no `{x.dtype}`; cast it, or save it in parts"
    return "safetensors uses this name itself" if name == "__metadata__" else None


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[str]:
    """The name of a new, empty file, which takes the place of `path` in the end.

    In between nothing is seen of it at `path`; an exception removes it.
    """
    target = os.path.realpath(path)  # which has no slash at its end
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
                raise OSError(errno.EINVAL, "what is there is no regular file")
            open(target, "r+b").close()  # may it be written?
        yield temporary
        # safetensors may have put another file there, with a mode of its own.
        os.chmod(temporary, stat.S_IMODE(mode))
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise
    with contextlib.suppress(OSError):  # not every system opens directories
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(safetensors: Any, path: str) -> dict[str, Any]:
    """What is in a file, as NumPy arrays and typed keys."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        # Not `safetensors.numpy`, which does not know all dtypes.
        entries = safetensors.deserialize(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header.get("__metadata__", {}).get(_METADATA, "{}"))
        del data
        if about.get("version", _VERSION) > _VERSION:
            raise ValueError("a later version of eqx_state has written it")
        values = {name: _array(**entry) for name, entry in entries}
        for name, impl in about.get("keys", {}).items():
            values[name] = jr.wrap_key_data(values[name], impl=impl)
    except (
        safetensors.SafetensorError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as e:
        raise _unreadable("es.load", path, e) from e
    return values


def _array(dtype: str, shape: list[int], data: bytearray) -> np.ndarray[Any, Any]:
    if dtype not in _DTYPES:  # of another program; it is equal to no dtype of an array
        return np.ndarray(len(data), [(dtype, "V1")], data)
    return np.ndarray(shape, _DTYPES[dtype], data)
