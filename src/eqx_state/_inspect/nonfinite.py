"""NaNs and infinities: which arrays hold one, and which module made the first."""

from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import boundary, is_in_trace, out_of_vmaps
from .._errors import TraceError
from .._kinds.kinds import State
from .._state.module import Module
from .._state.scope import own, Scope
from .._transforms.mutable import target, thread
from .._transforms.transform import of_one, Transform, wrap
from .._tree.observe import Recorder
from .._tree.parts import parts
from .._tree.select import modules
from .._typing import PyTree
from .capture import callable_names


_NEVER: Final = 2**31 - 1


class _Record(Module):
    """Three integers: how many calls have ended, which was bad first, and whose.

    They are one array, so that under `jax.vmap` they are of one lane.
    """

    calls: State


class _Finite(Recorder):
    """Records the first call whose output is not finite although its inputs are.

    What is known so far is the state of a module, which every transform of `es` carries
    through loops, branches and lanes.
    """

    def __init__(self) -> None:
        self.key = "es.find_nonfinite"
        self.trace_message = _CALLED_IN_A_TRACE.format("a module")
        self.record = _Record(jnp.array([0, _NEVER, 0], jnp.int32))
        self.names: list[str] = []

    def begin(self, scope: Any, model: PyTree) -> None:
        self.names = [name for name, _ in modules(model)]
        own(self.record, scope, (jtu.GetAttrKey(self.key),))

    def check(self, model: PyTree) -> None:
        callable_names(model, "es.find_nonfinite")

    def select(self, name: str, module: Any) -> tuple[str, int] | None:
        # A call keeps the structure of the model. A module that is there only meanwhile
        # has no number, and counts as a part of the one around it.
        return (name, self.names.index(name)) if name in self.names else None

    def called(self, scope: Any, mark: Any, call: Any, args: Any, kwargs: Any) -> Any:
        __tracebackhide__ = True
        name, number = mark
        was_finite = _is_finite((args, kwargs))
        out = call(*args, **kwargs)
        is_bad = out_of_vmaps(was_finite & ~_is_finite(out), scope.trace)
        if is_bad is None:
            raise TraceError(_CALLED_IN_A_TRACE.format(f"`{name or 'the model'}`"))
        calls, first, whose = self.record.calls
        is_first = is_bad.any() & (first == _NEVER)
        first = jnp.where(is_first, calls, first)
        whose = jnp.where(is_first, number, whose)
        new = jnp.stack([calls + 1, first, whose])
        # Not an assignment: under `jax.vmap` that would be a write in another trace.
        # But the value is one for all lanes, and belongs to the scope's trace.
        object.__setattr__(self.record, "calls", new)
        return out

    def merge(self, lanes: jax.Array) -> jax.Array:
        """The earliest of the lanes, which count their calls from one number."""
        lanes = lanes.reshape(-1, 3)
        earliest = lanes[jnp.argmin(lanes[:, 1])]
        return earliest.at[0].set(lanes[:, 0].max())

    def found(self) -> list[str]:
        _, first, whose = self.record.calls.tolist()
        return [] if first == _NEVER else [self.names[whose]]


def _is_finite(tree: PyTree) -> jax.Array:
    """Whether no number in a tree is NaN or infinite."""
    numbers = [x for x in jtu.tree_leaves(tree) if _is_inexact(x)]
    return jnp.array([jnp.isfinite(x).all() for x in numbers], bool).all()


def _is_inexact(x: Any) -> bool:
    return eqx.is_array_like(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


class _FindNonfinite(Transform):
    threads = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> list[str]:
        __tracebackhide__ = True
        if is_in_trace():
            raise TypeError(_IN_A_TRACE)
        finite = _Finite()
        call = target(self.f, args, kwargs, None, "es.find_nonfinite")
        scope = Scope((State,), observer=finite)
        thread(call.model, scope, call.run, call)
        return finite.found()


_CALLED_IN_A_TRACE: Final = """Cannot see whether the output of {} is finite: it was \
called inside a JAX transform, out of which the answer cannot come. `jax.vmap` is \
fine. Elsewhere use the transform of `es`, which is called like its namesake in JAX:

    jax.lax.scan(lambda c, x: (c, self.layer(x)), 0, xs)    # wrong
    es.scan(lambda c, x: (c, self.layer(x)), 0, xs)         # right

Likewise `es.jit`, also for `eqx.filter_jit`, `es.checkpoint`, `es.cond`, `es.switch`, \
`es.while_loop`; for `jax.grad` it is `es.value_and_grad`."""

_IN_A_TRACE: Final = """`es.find_nonfinite` was called inside a transform. It returns \
names, which depend on numbers that are only there when the program runs. Call it \
outside, on a function that is transformed:

    es.jit(es.find_nonfinite(step))(model, x)    # wrong
    es.find_nonfinite(es.jit(step))(model, x)    # right"""


@of_one
def find_nonfinite(f: Callable[..., Any]) -> Callable[..., list[str]]:
    """The name of the module that made the first NaN or infinity in a call of `f`.

    That is the module whose call was the first to end with a NaN or an infinity in its
    output, although all its inputs were finite. Of calls in each other the inner one
    ends first. Only the arguments count as inputs: if a parameter holds the NaN, it is
    the module that uses it. ([`es.nonfinite`][eqx_state.nonfinite] names the
    parameter.)

    **Arguments:**

    - `f`: a function whose model is its first argument, a module, a bound method, or a
        transform of one, as for [`es.mutable`][eqx_state.mutable]; also a whole
        training step.

    **Returns:**

    A function of the same arguments that returns a list with that name, `[]` if there
    is no such call. The root is `""`. New state is dropped, and the caller's model does
    not change. It looks into plain `jax.vmap` and all transforms of `es`: loops,
    branches, `es.jit`, `es.value_and_grad`. (There, calls of the forward pass count.
    For a NaN that the backward pass makes use `es.nonfinite(grads)`.)

    **Raises:**

    - `es.TraceError`: a module was called inside another transform of JAX, such as
        `jax.lax.scan`.
    - `ValueError`: a module was called in the `cond_fun` of `es.while_loop`; what is
        given as the model has no module that can be called.
    - `TypeError`: it was itself called inside a transform. Otherwise as `es.mutable`.

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
    """The names of the arrays in a tree that hold a NaN or an infinity.

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
    found = []
    for part in parts(tree):
        if not jnp.issubdtype(part.value.dtype, jnp.inexact):
            continue
        if isinstance(part.value, (jax.ShapeDtypeStruct, jax.core.Tracer)):
            raise TypeError(_NO_VALUES.format(part.name or "the tree"))
        found.append((part.name, jnp.isfinite(part.value).all()))
    return [name for name, is_finite in found if not is_finite]


_NO_VALUES: Final = """`es.nonfinite`: `{}` has no values, because it is a \
`jax.ShapeDtypeStruct`, or it is traced. Look at the arrays outside of `jax.jit` and \
other transforms; inside of them `jnp.isfinite` returns an array:

    is_finite = jax.tree.map(lambda x: jnp.isfinite(x).all(), grads)"""
