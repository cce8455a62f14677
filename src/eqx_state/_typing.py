"""Names for what annotations mean. They cost nothing at run time."""

from typing import Any, TypeAlias


# Any pytree. Not jaxtyping's `PyTree`, which type checkers deliberately cannot resolve:
# `pyright --verifytypes` would count every function that takes one as untyped.
PyTree: TypeAlias = Any

# The way from the root of a tree to a node: a tuple of JAX's keys.
KeyPath: TypeAlias = tuple[Any, ...]
