"""`es.functional`: a model as a pure pair, for libraries without modules."""

from collections.abc import Callable
from typing import Any

from ._kinds._kinds import Parameter, State
from ._state._init import check_ready
from ._state._scope import Scope
from ._transforms._mutable import thread
from ._tree._parts import Part
from ._tree._select import partition, update
from ._typing import PyTree


def _any_array(part: Part) -> bool:
    return True


def functional(tree: PyTree) -> tuple[Callable[..., tuple[Any, Any]], Any, Any]:
    """A callable model as `(apply, params, state)`, all arrays, for plain JAX.

    **Arguments:**

    - `tree`: a model that can be called.

    **Returns:**

    - `apply(params, state, *args, **kwargs) -> (out, state)`, a pure function. Plain
        `jax.jit` and `jax.grad` take it if the model's output is made of arrays.
    - `params`: the model with its `es.Parameter`s, and `None` elsewhere.
    - `state`: the model with all other arrays, and `None` elsewhere.

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
        ```
    """
    check_ready(tree)
    params, state, static = partition(tree, Parameter, _any_array)

    def apply(params: Any, state: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # Not `eqx.combine`: the pair may come from the same model in another mode.
        model = update(static, params, state)
        out, model = thread(model, Scope((State,)), lambda m: m(*args, **kwargs))
        _, new_state, _ = partition(model, Parameter, _any_array)
        return out, new_state

    return apply, params, state
