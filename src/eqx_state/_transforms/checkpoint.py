"""`es.checkpoint`: `jax.checkpoint` that carries state.

This is the shortest transform: start from it to write a new one.
"""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._state.scope import is_owned
from .._tree.dtypes import is_traceable
from .._tree.walk import is_array
from .._typing import P, R
from .cut import cut, Rest, which_traced
from .lift import Lifted, Ran
from .reach import check_given
from .target import positions
from .transform import Transform, wrap


class _Checkpoint(Transform):
    prevent_cse: Any = eqx.field(static=True)
    policy: Any = eqx.field(static=True)
    static_argnums: tuple[int, ...] = eqx.field(static=True)
    static_argnames: tuple[str, ...] = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        check_given(self.f, *args, *kwargs.values())
        lifted = Lifted(self.f, (args, kwargs))
        if lifted.is_initializing:
            return self.f(*args, **kwargs)
        arrays, rest = self._cut(*lifted.arguments)
        outside = {id(x) for x in lifted.values.values() if is_array(x)}

        def run(arrays: Any) -> tuple[Ran, Rest]:
            args, kwargs = rest.join(arrays)
            # Close over the values of the modules: `jax.checkpoint` differentiates with
            # respect to tracers in the closure, too.
            ran = lifted.run(lifted.values, self.f, args, kwargs)
            # Arrays from outside bypass the trace, which would return new arrays for
            # them. A scope detects writes by identity, so assigning a returned module,
            # `self.layer = layer`, would count as a write to its parameters.
            is_new = jtu.tree_map(
                lambda x, traced: traced and id(x) not in outside,
                ran.out,
                which_traced(ran.out),
            )
            out, rest_of_out = cut(ran.out, is_new)
            return ran._replace(out=out), rest_of_out

        remat = jax.checkpoint(run, prevent_cse=self.prevent_cse, policy=self.policy)
        # Outside a trace, JAX returns constants as literals of a private class.
        ran, rest_of_out = jtu.tree_map(jnp.asarray, remat(arrays))
        lifted.commit(ran)
        return rest_of_out.join(ran.out)

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Rest]:
        """The arrays among the arguments, and the static leaves."""
        argnums = self.static_argnums
        static = positions(args, argnums, f"es.checkpoint(static_argnums={argnums})")
        names = self.static_argnames
        traced = (
            tuple(i not in static and _which(x) for i, x in enumerate(args)),
            {name: name not in names and _which(x) for name, x in kwargs.items()},
        )
        return cut((args, kwargs), traced)


def _which(tree: Any) -> Any:
    return jtu.tree_map(is_traceable, tree, is_leaf=is_owned)


def checkpoint(
    fun: Callable[P, R],
    *,
    prevent_cse: Any = True,
    policy: Callable[..., bool] | None = None,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable[P, R]:
    """`jax.checkpoint` (remat) for functions that may write the state of modules.

    JAX does not store the intermediate values of `fun` for the backward pass, but
    recomputes them. It traces `fun` once, so state is written once, and each key
    advances once.

    **Arguments:**

    - `fun`: a function, a module, a bound method, or a partial.
    - `prevent_cse`, `policy`: as for `jax.checkpoint`.
    - `static_argnums`, `static_argnames`: arguments whose arrays are not traced. Leaves
        that are not arrays are always static.

    **Returns:**

    A function of the same arguments. It is a pytree, and can decorate methods.

    !!! example

        ```python
        import eqx_state as es
        import jax
        import jax.numpy as jnp


        class Block(es.Module):
            weight: es.Parameter
            calls: es.State

            def __call__(self, x):
                self.calls = self.calls + 1
                return jnp.sin(self.weight * x)


        def loss_fn(block, x):
            return es.checkpoint(block)(x)


        (loss, block), grads = es.value_and_grad(loss_fn)(Block(2.0, 0), 0.5)
        assert block.calls == 1
        assert jnp.allclose(grads.weight, 0.5 * jnp.cos(1.0))
        ```
    """
    is_one = isinstance(static_argnums, int)
    is_name = isinstance(static_argnames, str)
    return wrap(
        _Checkpoint,
        fun,
        prevent_cse=prevent_cse,
        policy=policy,
        static_argnums=(static_argnums,) if is_one else tuple(static_argnums),
        static_argnames=(static_argnames,) if is_name else tuple(static_argnames),
    )
