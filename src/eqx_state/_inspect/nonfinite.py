"""NaNs and infinities: which arrays contain one, and which modules produced it."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp

from .._compat import boundary, is_in_trace
from .._kinds.kinds import State
from .._state.observe import Observer, ProgramKey
from .._state.scope import Scope
from .._state.sow import carried_out, Key
from .._transforms.mutable import run_on_copy
from .._transforms.target import target
from .._transforms.transform import receiver, Transform, wrap
from .._tree.parts import is_inexact, parts
from .._typing import PyTree
from .backward import blamed, is_finite, watched
from .capture import callable_names, check_missed


class _Finite(Observer):
    """For each call, sows whether the module itself produced a NaN or an infinity."""

    def __init__(self):
        self.key = ProgramKey(("es.find_nonfinite",))
        self.chain: tuple[str, ...] = ()  # the names of the calls around this one

    def check(self, model: PyTree) -> None:
        callable_names(model, "es.find_nonfinite")

    def select(self, name: str, module: Any) -> str:
        return name

    def called(self, scope: Any, tag: Any, call: Any, /, *args: Any, **kw: Any) -> Any:
        before = {key: len(values) for key, values in scope.sown.items()}
        # Use a new key for each call, because the order of the keys is the order in
        # which calls are traced.
        key = Key(tag, True, sum(tag == other.name for other in before))
        around = self.chain
        self.chain = (*around, tag)
        was_finite = is_finite((args[1:], kw))  # without the module
        try:
            out = watched(self.chain, call, args, kw)
        finally:
            self.chain = around
        bad = was_finite & ~is_finite(out)
        for made in carried_out(scope, key, [bad]):  # one, or none
            # Do not blame this call for what an inner call produced. The scope already
            # contains the results of inner calls; their first axes are the lanes of
            # this call.
            for other, values in scope.sown.items():
                for x in values[before.get(other, 0) :]:
                    made &= ~x.any(axis=tuple(range(made.ndim, x.ndim)))
            scope.sown.setdefault(key, []).append(made)
        return out


class _FindNonfinite(Transform):
    returns_model = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> list[str]:
        if is_in_trace():
            raise TypeError(_IN_A_TRACE.format("es.find_nonfinite"))
        model, call = target(self.f, args, kwargs, None, "es.find_nonfinite")
        given = {**dict(enumerate(args)), **kwargs}
        if receiver(self.f) is None:  # the model is the first argument
            del given[0]
        bad = [f"argument {key}" for key, x in given.items() if not is_finite(x)]
        observer = _Finite()
        scope = Scope((State,), observer=observer)
        backward = blamed(lambda: run_on_copy(model, scope, call))
        check_missed(observer.key, scope.sown)
        made = [k.name for k, xs in scope.sown.items() if any(x.any() for x in xs)]
        gradients = [f"{name} (gradient)".lstrip() for name in backward]
        return [*bad, *dict.fromkeys(made), *gradients]


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

    If `f` computes a gradient, the backward pass counts, too. A module is named with
    `" (gradient)"`, as in `"dist (gradient)"`, if the gradient with respect to the
    outputs of one of its calls is finite, but with respect to inputs or parameters is
    not. The usual cause is a function without a derivative at one point, such as
    `jnp.sqrt` at 0.

    **Arguments:**

    - `f`: a function whose model is its first argument, a module, a bound method, or a
        transform of one, as for [`es.mutable`][eqx_state.mutable]; also a whole
        training step.

    **Returns:**

    A function of the same arguments that returns a list of names, in the order in which
    the calls are traced. The root is `""`. Arguments besides the model that are not
    finite come first, by position: `"argument 1"`. Names of the backward pass come
    last, in its own order. New state is discarded, and the caller's model does not
    change. The function checks the calls that `es.capture(outputs=...)` can capture,
    also under plain `jax.vmap`, `es.scan` and `es.jit`.

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
        import jax.random as jr

        model = eqx.nn.Sequential([eqx.nn.Lambda(jnp.log), eqx.nn.Lambda(jnp.sin)])
        xs = jnp.array([[1.0], [0.0]])
        assert es.find_nonfinite(es.vmap(model))(xs) == ["layers[0]"]  # log(0)
        assert es.find_nonfinite(es.vmap(model))(xs + 1) == []

        linear = eqx.nn.Linear(1, 2, use_bias=False, key=jr.key(0))
        model = eqx.nn.Sequential([linear, eqx.nn.Lambda(jnp.linalg.norm)])
        step = es.value_and_grad(lambda model, x: model(x))
        found = es.find_nonfinite(step)(model, jnp.zeros(1))
        assert found == ["layers[1] (gradient)"]
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
