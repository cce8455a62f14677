"""What is special about transforms while `init` runs, and creates fields.

JAX fixes the structure of a loop or a branch in advance. These transforms therefore
first call their function without a trace, which creates all missing fields
(`lift_with_fields`). In other transforms, `init` creates concrete arrays, which need
not leave the trace as outputs: `Lifted.commit` puts them into the modules. Such an
array cannot be a part of a stack (`check_not_created`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu

from .._state.init import created_error
from .._tree.base import is_module
from .._tree.walk import is_array, leaves, Visit
from .lift import Lifted
from .roots import Root, Values


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


def check_not_created(
    lifted: Lifted, is_stack: Callable[[Root, Visit], bool], caller: str
) -> None:
    """Raise `ValueError` if `init` has created an array in one layer of a stack.

    `is_stack`: whether an array at this visit, in this root, is stacked.
    """
    fields = [field for _, created in lifted.created for field in created]
    if not fields:
        return
    at: dict[int, tuple[Root, Visit]] = {
        id(visit.node): (root, visit)
        for root in lifted.roots
        for visit in root.traversal.visits
        if is_module(visit.node)
    }
    for module, name, value in fields:
        if id(module) in at:
            root, visit = at[id(module)]
            key = jtu.GetAttrKey(name)
            path, context = (*visit.path, key), visit.context.enter(module, key)
            made = leaves(value, path, context)
            if any(is_array(v.node) and is_stack(root, v) for v in made):
                raise created_error(module, name, f"in one {caller}")
