"""What is special about transforms while `init` runs, and creates fields.

JAX fixes the structure of a loop or a branch in advance. These transforms therefore
first call their function without a trace, which creates all missing fields
(`create_fields`). In other transforms, `init` creates concrete arrays, which need not
leave the trace as outputs: `Lifted.commit` puts them into the modules. Such an array
cannot be a part of a stack, so `es.vmap` and `es.scan` look at `created_arrays`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.tree_util as jtu

from .._state.scope import scopes_open_here
from .._tree.base import BaseModule
from .._tree.walk import is_array
from .lift import Lifted
from .roots import Values


def is_init_running() -> bool:
    """Whether `init` runs in this thread, perhaps on other modules."""
    return any(scope.is_initializing for scope in scopes_open_here())


def create_fields(f: Callable[..., Any], *args: Any) -> None:
    """While `init` runs, call `f` outside a trace, which creates its missing fields."""
    if is_init_running():
        # By reference: the call initializes the originals.
        run_once(Lifted((f, args)), {}, f, args)


def run_once(
    lifted: Lifted, values: Values, f: Callable[..., Any], args: Sequence[Any]
) -> None:
    """Call `f` outside a trace, with these values instead of the modules' own.

    Its writes are dropped, because the transform runs the function again.
    """
    if lifted.is_initializing:
        ran = lifted.run({**lifted.values, **values}, f, args)
        lifted.commit(ran._replace(written={}))


def created_arrays(lifted: Lifted) -> Iterator[tuple[BaseModule, str, list[Any]]]:
    """The fields that `init` has created in the last run, and the arrays in each."""
    for _, fields in lifted.created:
        for module, name, value in fields:
            yield module, name, [*filter(is_array, jtu.tree_leaves(value))]
