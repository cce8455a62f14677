"""Type aliases and type variables for annotations."""

from typing import Any, ParamSpec, TypeAlias, TypeVar


# Any pytree. Do not use jaxtyping's `PyTree` instead: type checkers cannot resolve it,
# so `pyright --verifytypes` would count every function that takes one as untyped.
PyTree: TypeAlias = Any

# The path from the root of a tree to a node: a tuple of JAX's keys.
KeyPath: TypeAlias = tuple[Any, ...]

# For a function that takes a pytree and returns one of the same type.
Tree = TypeVar("Tree")

# The parameters and the result of a function.
P = ParamSpec("P")
R = TypeVar("R")
