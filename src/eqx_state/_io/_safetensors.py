"""The safetensors format: its dtypes, its header, and a file as arrays.

What the format cannot say is in its metadata, as JSON under one key: the version of
this layout, and which arrays are the data of typed PRNG keys.
"""

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterator
from typing import Any, Final, IO

import numpy as np

from ._stored import Box, Stored, typed


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
