"""The safetensors format: its dtypes, its header, and a file as arrays.

What the format cannot say is in its metadata, as JSON under one key: the version of
this layout, and which arrays are the data of typed PRNG keys.
"""

import errno
import json
import os
import re
from typing import Any, Final, IO

import jax.random as jr
import numpy as np


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
    if not 0 < size <= rest:
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
            "`es.save` and `es.load` need safetensors, which is not installed. It is"
            " the extra `io` of eqx_state. From a clone of eqx_state:"
            ' `python -m pip install ".[io]"`.'
        ) from e
    return safetensors


def read_arrays(safetensors: Any, path: str) -> dict[str, Any]:
    """The arrays of a file by name, as NumPy arrays and typed keys."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        # Not with `safetensors.numpy`, which lacks some dtypes.
        entries = safetensors.deserialize(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header.get("__metadata__", {}).get(METADATA, "{}"))
        del data
        if about.get("version", VERSION) > VERSION:
            raise ValueError("a later version of eqx_state wrote it")
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
        raise unreadable("es.load", path, e) from e
    return values


def _array(dtype: str, shape: list[int], data: bytearray) -> np.ndarray[Any, Any]:
    if dtype not in DTYPES:  # another program's; no array here has a dtype equal to it
        return np.ndarray(len(data), [(dtype, "V1")], data)
    return np.ndarray(shape, DTYPES[dtype], data)
