"""`es.save` and `es.load`: a tree's arrays in a safetensors file."""

import json
import os
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import jax.core
import jax.random as jr
import numpy as np

from .._tree._bind import Filter
from .._tree._keys import is_typed
from .._tree._parts import Part
from .._tree._stacks import layer_of, LayerPart
from .._typing import PyTree
from ._atomic import replacing
from ._layers import whole_of
from ._safetensors import (
    DTYPES,
    import_safetensors,
    json_string,
    METADATA,
    read_header,
    stored_arrays,
    unreadable,
    VERSION,
    write_arrays,
)
from ._state_dict import by_name, restore, select, shown


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
