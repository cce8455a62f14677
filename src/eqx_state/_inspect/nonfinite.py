"""NaNs and infinities: which arrays contain one, and which modules produced it."""

from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import boundary, is_in_trace
from .._kinds.kinds import State
from .._state.scope import Scope
from .._state.sow import carried_out, Key
from .._transforms.callables import receiver
from .._transforms.mutable import run_on_copy
from .._transforms.target import target
from .._transforms.transform import Transform, wrap
from .._tree.observe import Observer, ProgramKey
from .._tree.parts import is_inexact, parts
from .._typing import PyTree
from .capture import callable_names, check_missed


class _Finite(Observer):
    """For each call, sows whether the module itself produced a NaN or an infinity."""

    def __init__(self):
        self.key = ProgramKey(("es.find_nonfinite",))

    def check(self, model: PyTree) -> None:
        callable_names(model, "es.find_nonfinite")

    def select(self, name: str, module: Any) -> str:
        return name

    def called(self, scope: Any, tag: Any, call: Any, /, *args: Any, **kw: Any) -> Any:
        before = {key: len(values) for key, values in scope.sown.items()}
        # Use a new key for each call, because the order of the keys is the order in
        # which calls are traced.
        key = Key(tag, True, sum(tag == other.name for other in before))
        was_finite = _is_finite((args, kw))
        out = call(*args, **kw)
        bad = was_finite & ~_is_finite(out)
        for made in carried_out(scope, key, [bad]):  # one, or none
            # Do not blame this call for what an inner call produced. The scope already
            # contains the results of inner calls; their first axes are the lanes of
            # this call.
            for other, values in scope.sown.items():
                for x in values[before.get(other, 0) :]:
                    made &= ~x.any(axis=tuple(range(made.ndim, x.ndim)))
            scope.sown.setdefault(key, []).append(made)
        return out


def _is_finite(tree: PyTree) -> jax.Array:
    """Whether no number in a tree is NaN or infinite."""
    numbers = [x for x in jtu.tree_leaves(tree) if _is_inexact(x)]
    return jnp.array([jnp.isfinite(x).all() for x in numbers], bool).all()


def _is_inexact(x: Any) -> bool:
    return eqx.is_array_like(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


class _FindNonfinite(Transform):
    threads = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> list[str]:
        if is_in_trace():
            raise TypeError(_IN_A_TRACE.format("es.find_nonfinite"))
        model, call = target(self.f, args, kwargs, None, "es.find_nonfinite")
        given = {**dict(enumerate(args)), **kwargs}
        if receiver(self.f) is None:  # the model is the first argument
            del given[0]
        bad = [f"argument {key}" for key, x in given.items() if not _is_finite(x)]
        scope = Scope((State,), observer=_Finite())
        run_on_copy(model, scope, call)
        check_missed(scope.observer.key, scope.sown)
        made = [k.name for k, xs in scope.sown.items() if any(x.any() for x in xs)]
        return [*bad, *dict.fromkeys(made)]


_IN_A_TRACE: Final = """`{}` needs concrete values, because its names depend on them. \
Call it outside of transforms: `es.nonfinite(grads)`, or \
`es.find_nonfinite(es.jit(step))(model, x)`, which names modules."""


def find_nonfinite(f: Callable[..., Any]) -> Callable[..., list[str]]:
    """The names of the modules that produce a NaN or an infinity in a call of `f`.

    A module is named if the output of one of its calls is not finite although all
    inputs of that call are finite. Of nested modules, only the innermost is named.
    Start with the first name. Only arguments count as inputs: if a parameter contains a
    NaN, the module that uses it is named. ([`es.nonfinite`][eqx_state.nonfinite] names
    the parameter.)

    **Arguments:**

    - `f`: a function whose model is its first argument, a module, a bound method, or a
        transform of one, as for [`es.mutable`][eqx_state.mutable]; also a whole
        training step.

    **Returns:**

    A function of the same arguments that returns a list of names, in the order in which
    the calls are traced. The root is `""`. Arguments besides the model that are not
    finite come first, by position: `"argument 1"`. New state is discarded, and the
    caller's model does not change. The function checks the calls that
    `es.capture(outputs=...)` can capture, also under plain `jax.vmap`, `es.scan` and
    `es.jit`, and in the forward pass of `es.value_and_grad`. (For a NaN in the backward
    pass, use `es.nonfinite(grads)`.)

    **Raises:**

    - `ValueError`: a module was called in a step of `es.while_loop` or `es.fori_loop`,
        or in one branch only, as for `es.capture(outputs=...)`.
    - `es.TraceError`: all calls were inside a JAX transform other than `jax.vmap`. If
        only some of the calls were, a `UserWarning` names the modules; run in `with
        jax.disable_jit():` to check those, too.
    - `ValueError`: the model contains no module that can be called.
    - `TypeError`: the returned function was called inside a transform. Otherwise as
        `es.mutable`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.numpy as jnp

        model = eqx.nn.Sequential([eqx.nn.Lambda(jnp.log), eqx.nn.Lambda(jnp.sin)])
        xs = jnp.array([[1.0], [0.0]])
        assert es.find_nonfinite(es.vmap(model))(xs) == ["layers[0]"]  # log(0)
        assert es.find_nonfinite(es.vmap(model))(xs + 1) == []
        ```
    """
    return wrap(_FindNonfinite, f)


@boundary
def nonfinite(tree: PyTree) -> list[str]:
    """The names of the arrays in a tree that contain a NaN or an infinity.

    **Arguments:**

    - `tree`: any pytree: a model, gradients, an optimizer. Arrays of integers, bools
        and keys are always finite.

    **Returns:**

    A list of names such as `"layers[0].weight"`, in the order of the tree.

    **Raises:**

    - `TypeError`: an array has no values, because it is a `jax.ShapeDtypeStruct` or is
        traced.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp

        grads = {"a": jnp.array([1.0, jnp.nan]), "b": [jnp.zeros(2), jnp.array(1)]}
        assert es.nonfinite(grads) == ["['a']"]
        ```
    """
    arrays = [part for part in parts(tree) if is_inexact(part)]
    found = [(p.name, jnp.isfinite(p.value).all()) for p in arrays]
    if any(isinstance(x, jax.core.Tracer) for _, x in found):
        raise TypeError(_IN_A_TRACE.format("es.nonfinite"))
    # Dispatch all computations before waiting for the first.
    return [name for name, is_finite in found if not is_finite]
