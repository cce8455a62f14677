"""`es.functional`: a model as a pure function, for libraries without modules."""

import types
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import jax

from ._io.restore import by_name, put, shown
from ._io.state_dict import state_dict
from ._kinds.kinds import Parameter, State
from ._state.lazy import check_ready
from ._state.scope import Scope
from ._transforms.mutable import run_on_copy
from ._transforms.transform import is_bound_method
from ._tree.combinators import not_
from ._tree.dtypes import to_strong
from ._tree.walk import abstract, is_array
from ._typing import PyTree


Arrays: TypeAlias = dict[str, Any]


def functional(
    tree: PyTree,
) -> tuple[Callable[..., tuple[Any, Arrays]], Arrays, Arrays]:
    """A callable model as a pure function and two dicts of arrays, for plain JAX.

    The dicts pass through every JAX transform, and `jax.export` can serialize a program
    that takes and returns them.

    **Arguments:**

    - `tree`: a callable model, or a method of a model, `model.encode`. It may be
        abstract, as `equinox.filter_eval_shape` returns it.

    **Returns:**

    - `apply(params, state, *args, **kwargs) -> (out, state)`, a pure function, also for
        plain `jax.jit` and `jax.grad` if all outputs of the model are arrays. It raises
        a `ValueError` if a name is missing or unknown. It does not check shapes and
        dtypes.
    - `params`: the model's `es.Parameter`s by their names in `es.state_dict`.
    - `state`: all other arrays by name.

    `es.load_state_dict(model, {**params, **state})` returns a model again.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax
        import jax.random as jr

        model = eqx.nn.MLP(2, 1, 8, 1, key=jr.key(0))
        apply, params, state = es.functional(model)
        out, state = jax.jit(apply)(params, state, jr.normal(jr.key(1), (2,)))
        assert out.shape == (1,)
        assert params["layers[0].weight"] is model.layers[0].weight
        assert eqx.tree_equal(es.load_state_dict(model, {**params, **state}), model)
        ```
    """
    method = None
    if is_bound_method(tree):  # the model is the bound object, as for `es.mutable`
        tree, method = tree.__self__, tree.__func__
    check_ready(tree)
    # `apply` takes all arrays from the dicts, so store only their shapes.
    like = jax.tree.map(abstract, tree)
    named = by_name(like)
    # A weak type would become strong in the first call, and retrace the second.
    tree = jax.tree.map(lambda x: to_strong(x) if is_array(x) else x, tree)
    params, state = state_dict(tree, Parameter), state_dict(tree, not_(Parameter))
    names_of_params, names_of_state = frozenset(params), frozenset(state)

    def apply(
        params: Arrays, state: Arrays, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, Arrays]:
        _check_names("params", params, names_of_params)
        _check_names("state", state, names_of_state)
        model = put(like, named, {**params, **state})

        def call(model: Any) -> Any:
            f = model if method is None else types.MethodType(method, model)
            return f(*args, **kwargs)

        out, model = run_on_copy(model, Scope((State,)), call)
        return out, state_dict(model, not_(Parameter))

    return apply, params, state


def _check_names(which: str, arrays: Any, names: frozenset[str]) -> None:
    if not isinstance(arrays, Mapping):
        given = type(arrays).__name__
        raise TypeError(
            f"`apply` of `es.functional`: `{which}` must be a dict, but is a `{given}`."
        )
    missing, unknown = names - arrays.keys(), arrays.keys() - names
    lines = [f"  missing in `{which}`: {shown(name)}" for name in sorted(missing)]
    lines += [f"  unknown in `{which}`: {name}" for name in sorted(map(str, unknown))]
    if lines:
        raise ValueError(_NAMES.format("\n".join(lines)))


_NAMES: Final = """`apply` of `es.functional` got different names than the model has:
{}
`params` has the names of `es.state_dict(model, es.Parameter)`, `state` all others."""
