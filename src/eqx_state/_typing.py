"""Names for types in annotations."""

from typing import Any, ParamSpec, TypeAlias, TypeVar


# Any pytree. Not jaxtyping's `PyTree`, which type checkers deliberately cannot resolve:
# `pyright --verifytypes` would count every function that takes one as untyped.
PyTree: TypeAlias = Any

# The path from the root of a tree to a node: a tuple of JAX's keys.
KeyPath: TypeAlias = tuple[Any, ...]

# A pytree, of a function that returns one of the same type.
Tree = TypeVar("Tree")

# The parameters and the result of a function.
P = ParamSpec("P")
R = TypeVar("R")
