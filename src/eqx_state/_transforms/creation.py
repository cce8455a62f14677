"""What is special about transforms while `init` runs, and creates fields.

JAX fixes the structure of a loop or a branch in advance. These transforms therefore
first call their function without a trace, which creates all missing fields
(`lift_with_fields`). In other transforms, `init` creates concrete arrays, which need
not leave the trace as outputs: `Lifted.commit` puts them into the modules. Such an
array cannot be a part of a stack, so `es.vmap` and `es.scan` look at `created_arrays`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.tree_util as jtu

from .._tree.base import BaseModule
from .._tree.walk import is_array
from .lift import Lifted
from .roots import Values


def lift_with_fields(
    functions: Any,
    arguments: Any,
    treatments: Sequence[Any] = (),
    *,
    create: Callable[[], None],
) -> Lifted:
    """`Lifted(...)`, for a transform whose structure JAX fixes in advance.

    While `init` runs, `create` runs the function without a trace before, to create all
    missing fields.
    """
    lifted = Lifted(functions, arguments, treatments)
    if lifted.is_initializing:
        create()
        lifted = Lifted(functions, arguments, treatments)
    return lifted


def create_fields(f: Callable[..., Any], *args: Any) -> None:
    """Call `f` outside a trace, for `lift_with_fields`."""
    # By reference: the call initializes the originals.
    run_once(Lifted((f, args)), {}, f, args)


def run_once(
    lifted: Lifted, values: Values, f: Callable[..., Any], args: Sequence[Any]
) -> None:
    """Call `f` outside a trace, with these values instead of the modules' own.

    Its writes are dropped, because the transform runs the function again.
    """
    ran = lifted.run({**lifted.values, **values}, f, args)
    lifted.commit(ran._replace(written={}))


def created_arrays(lifted: Lifted) -> Iterator[tuple[BaseModule, str, list[Any]]]:
    """The fields with arrays that `init` has created in the last run, by module."""
    for _, fields in lifted.created:
        for module, name, value in fields:
            if arrays := [*filter(is_array, jtu.tree_leaves(value))]:
                yield module, name, arrays
