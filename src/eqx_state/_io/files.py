"""`es.save` and `es.load`: a tree's arrays in a safetensors file."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import jax.core
import jax.random as jr
import numpy as np

from .._errors import an
from .._state.lazy import check_usable
from .._tree.filters import Filter
from .._tree.followers import recorded_models
from .._tree.keys import data_of, is_typed
from .._tree.parts import LayerPart, slice_at
from .._tree.rules import check_filters
from .._typing import PyTree, Tree
from .reading import (
    ABOUT,
    DTYPES,
    import_safetensors,
    opened,
    stored_arrays,
    VERSION,
    whole_of,
)
from .restore import by_name, restore, select, shown


def save(
    path: str | os.PathLike[str],
    tree: PyTree,
    *filters: Filter,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the arrays of `tree` to a safetensors file.

    The new file replaces an old one only when it is complete and on disk: whatever
    happens, `path` is either the old file or the new one. A killed process may leave a
    partial file `.*.tmp` or `.tmp*` in the same directory. If `path` is a symbolic
    link, its target is replaced.

    Any program that reads [safetensors](https://github.com/huggingface/safetensors)
    finds the arrays under the names of `es.state_dict`, and those of an `es.nn.Stacked`
    layer by layer. A typed key is stored as its key data, `uint32`. Python numbers,
    strings and functions belong to the tree's structure and are not saved, so save a
    step counter as an array.

    **Arguments:**

    - `path`: the file. Its directory must exist.
    - `tree`: any pytree: a model, an optimizer, `(model, np.int32(step))`.
    - `*filters`: save the arrays that satisfy all filters, as in `es.filter`. Default:
        every array, including those without a kind.
    - `metadata`: a dictionary of strings, for `es.load_metadata` and other programs.
        Convert other values to strings: `json.dumps(config)`. Default: none.

    **Raises:**

    - `TypeError`: `metadata` is not a dictionary of strings, or `tree` is a class.
    - `ValueError`: `metadata` has the key `"eqx_state"`, or an array the name
        `__metadata__`, which are reserved; a filter selects no array; a field that
        declares a kind contains a Python number.
    - `TypeError`: some arrays cannot be saved, because they have a dtype that the
        format lacks, such as `complex128` or `int4`, are abstract or traced, or are
        split over several processes. The message lists them; nothing is written.
    - `OSError`: the file cannot be written.
    - `es.NotInitializedError`: the tree still contains an `es.Initializer`.
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
    path = _as_path(path, "es.save(path, tree)")
    safetensors = import_safetensors()
    if metadata is not None and ABOUT in metadata:
        raise ValueError(f"`es.save`: the key `{ABOUT!r}` of `metadata` is reserved.")
    arrays: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    data: dict[int, Any] = {}  # by leaf, because the layers of a stack share one array
    problems: list[str] = []
    check_filters(filters, tree, "`es.save`")
    named = select(by_name(tree, check_usable), filters, tree)
    if _RESERVED in named:
        raise ValueError(_RESERVED_NAME)
    for name, (i, part) in named.items():
        whole = whole_of(part)
        if problem := _why_not(whole.value):
            problems.append(f"  {shown(whole.name)}: {problem}")
            continue
        if is_typed(whole.value):
            keys[name] = jr.key_impl(whole.value)
        if i not in data:
            data[i] = _as_numpy(whole.value)
        is_layer = isinstance(part, LayerPart)
        arrays[name] = slice_at(data[i], part.index) if is_layer else data[i]
    if problems:
        lines = ["`es.save` cannot write these arrays:", *sorted(set(problems))]
        raise TypeError("\n".join(lines))
    about = {ABOUT: json.dumps({"version": VERSION, "keys": keys})}
    try:
        with _replacing(path) as temporary:
            all_metadata = {**(metadata or {}), **about}
            safetensors.numpy.save_file(arrays, temporary, all_metadata)
    except (OSError, safetensors.SafetensorError) as e:
        # safetensors' errors have only a text.
        number, reason = getattr(e, "errno", errno.EIO), getattr(e, "strerror", e)
        text = f"`es.save` cannot write `{path}`: {reason}."
        raise OSError(number, f"{text} Nothing on disk was changed.") from e


def load(
    path: str | os.PathLike[str],
    like: Tree,
    *filters: Filter,
    strict: bool = True,
    cast: bool = False,
) -> Tree:
    """`like` with the arrays of a safetensors file; the inverse of `es.save`.

    Modes and frozen paths are those of `like`. `load` reads the selected arrays one at
    a time, and only the shards that belong to the devices of this process.

    **Arguments:**

    - `path`: the file. Another program may have written it, with the names of
        `es.state_dict(like)`.
    - `like`: a pytree with the same names, shapes and dtypes. It may be abstract:
        `equinox.filter_eval_shape(make_model, key)` allocates no arrays.
    - `*filters`: load the arrays that satisfy all filters, as in `es.filter`. The file
        must contain them, and may contain more; all other arrays are those of `like`.
        Default: every array, and file and `like` must have the same names. For
        everything but the random keys: `es.not_(es.Rng)`.
    - `strict`: if `False`, arrays that the file lacks are those of `like`, even if a
        filter selects them, and arrays that `like` lacks are skipped. Shapes and dtypes
        must still agree, as in `es.load_state_dict`, and at least one name must be in
        both.
    - `cast`: whether to convert floats to the dtypes of `like`: a bfloat16 file into a
        float32 model, or a float32 file into a bfloat16 model. Integers are never
        converted. Default: `False`.

    **Returns:**

    A new tree, with a NumPy array where `like` has one, and a `jax.Array` elsewhere. A
    `jax.Array` has the devices and the sharding of the array in `like`, if that
    specifies any.

    **Raises:**

    - `ValueError`: the file is not a safetensors file or is truncated, lacks a name
        that the filters select, has (without filters) a name that `like` lacks, or an
        array in it has a different shape or dtype, or numbers that are too large for
        the dtype to which JAX (without `jax_enable_x64`) or `cast` converts it; or,
        with `strict=False`, no name is in both. The message lists all names.
    - `ValueError`: a filter selects no array of `like`.
    - `ValueError` from JAX, with a note that names the array: the array does not fit
        the sharding in `like`; or that sharding has an abstract mesh, and no mesh is
        set.
    - `TypeError`: `like` is a class, or `cast` is not a bool.
    - `OSError`: the file cannot be read. If it does not exist, `FileNotFoundError`.
    - `es.NotInitializedError`: `like` still contains an `es.Initializer`.
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
    path = _as_path(path, "es.load(path, like)")
    if type(cast) is not bool:
        raise TypeError(f"`es.load(..., cast={cast!r})`: {_CAST}")
    named = by_name(like)
    is_before_init = any(model is None for model in recorded_models(like))
    advice = _BEFORE_INIT if is_before_init else _ADVICE
    source = "es.load", f"the file `{path}`"
    with stored_arrays(path) as arrays:
        return restore(
            like, named, filters, arrays, source, advice, strict=strict, cast=cast
        )


def _as_path(path: Any, call: str) -> str:
    """The path as a string; `TypeError` if it is a model, for example."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        given = an(type(path).__name__)
        raise TypeError(f"`{call}` takes the path first, but was given {given} there.")
    return os.fsdecode(path)


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a safetensors file, as passed to `es.save`.

    The arrays are not read.

    **Arguments:**

    - `path`: the file. Another program may have written it.

    **Returns:**

    A dictionary of strings; empty if the file has no metadata.

    **Raises:**

    - `ValueError`: the file is not a safetensors file, or is truncated.
    - `OSError`: the file cannot be read. If it does not exist, `FileNotFoundError`.
    - `ImportError`: safetensors is not installed; it is the extra `io`.

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
    path = _as_path(path, "es.load_metadata(path)")
    with opened(path, "es.load_metadata") as (file, _):
        metadata = file.metadata() or {}
    return {key: text for key, text in metadata.items() if key != ABOUT}


# --- Writing --------------------------------------------------------------------------


def _why_not(x: Any) -> str | None:
    """Why an array cannot be saved; `None` if it can."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return "abstract: it has no values"
    if isinstance(x, jax.core.Tracer):
        return "traced; save outside of `jit` and other transforms"
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            return _ELSEWHERE
    if not is_typed(x) and x.dtype.name not in DTYPES.values():
        return f"safetensors has no `{x.dtype}`; cast it, or save it in parts"
    return None


def _as_numpy(x: Any) -> np.ndarray[Any, Any]:
    # safetensors assumes C order.
    return np.asarray(data_of(x), order="C")


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[str]:
    """The name of a new, empty file, which replaces `path` when the block ends.

    Until then, `path` does not change. On an exception, the new file is removed.
    """
    target = os.path.realpath(path)
    temporary = os.path.join(os.path.dirname(target), f".{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode  # as for any new file
        if os.path.exists(target):
            mode = os.stat(target).st_mode
            if not stat.S_ISREG(mode):  # root could replace `/dev/null`
                raise OSError(errno.EINVAL, "it is not a regular file")
            open(target, "r+b").close()  # raises if it may not be written
        yield temporary
        # safetensors has replaced the file by its own, which only its owner may read.
        os.chmod(temporary, stat.S_IMODE(mode))
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


_RESERVED: Final = "__metadata__"  # a key of the header beside the arrays

_RESERVED_NAME: Final = """`es.save`: an array of the tree is called `__metadata__`, a \
name that safetensors uses for its metadata. Rename the field, or save the tree in a \
dictionary: `es.save(path, {"model": tree})`."""

_ELSEWHERE: Final = """it is split over several processes; save it with Orbax \
(orbax-checkpoint), or gather it with `multihost_utils.process_allgather`"""

_CAST: Final = """`cast` is `True` or `False`. With `True`, floats get the dtypes of \
the arrays of `like`. For different dtypes, pass a different `like`."""

_BEFORE_INIT: Final = """`like` contains an `es.Optimizer` or an `es.Ema` before \
`init`, which has no arrays yet: `es.load(path, (model, \
es.Optimizer(tx).init(model)))`."""

_ADVICE: Final = """`like` must be a tree like the one that was saved. To load \
only a part of a saved dict: `es.load(path, {"model": model}, strict=False)["model"]`, \
where `strict=False` skips names that only one of the two has. To require all arrays \
that a filter selects: `es.load(path, like, es.Parameter)`."""
