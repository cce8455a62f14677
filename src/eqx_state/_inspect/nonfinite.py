"""NaNs and infinities: which arrays contain one, and which modules produced it."""

import functools as ft
import itertools
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._compat import boundary, is_in_trace, manual_axes, vary, varying_axes
from .._kinds.kinds import State
from .._state.observe import Observer, ProgramKey
from .._state.scope import Scope
from .._state.sow import carried_out, Key
from .._transforms.lift import Lifted
from .._transforms.mutable import run_on_copy
from .._transforms.target import target
from .._transforms.transform import receiver, Transform, wrap
from .._tree.parts import is_inexact, parts
from .._typing import PyTree
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
        was_finite = _is_finite((args[1:], kw))  # without the module
        try:
            out = _watched(self.chain, call, args, kw)
        finally:
            self.chain = around
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


class _FindNonfinite(Transform):
    returns_model = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> list[str]:
        if is_in_trace():
            raise TypeError(_IN_A_TRACE.format("es.find_nonfinite"))
        model, call = target(self.f, args, kwargs, None, "es.find_nonfinite")
        given = {**dict(enumerate(args)), **kwargs}
        if receiver(self.f) is None:  # the model is the first argument
            del given[0]
        bad = [f"argument {key}" for key, x in given.items() if not _is_finite(x)]
        observer = _Finite()
        scope = Scope((State,), observer=observer)
        backward = _blamed(lambda: run_on_copy(model, scope, call))
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


# --- The backward pass ----------------------------------------------------------------

# Cotangents enter a call at its outputs, and leave it at its inputs. Both ends pass
# through an identity whose transpose sees the cotangents. A token connects the two
# ends: at the outputs its cotangent becomes 1 if everything is finite there, and also
# was in the forward pass; at the inputs the call is then to blame for a cotangent that
# is not. All this is a part of the user's computation, so each lane, step and branch is
# judged by itself, and a callback reports the result.


# A call that made a NaN: its number in the backward pass, as JAX traces it; and the
# names of the calls around it, and its own.
_Event: TypeAlias = tuple[int, tuple[str, ...]]

# Not in the observer, because compiled programs keep their callbacks. A lock, because a
# callback runs in a thread of JAX, and cannot tell two searches apart.
_EVENTS: Final[list[_Event]] = []
_ORDER: Final = itertools.count()
_SEARCH: Final = threading.RLock()


def _blamed(run: Callable[[], Any]) -> list[str]:
    """The names of the innermost watched calls whose backward pass makes a NaN.

    They are in the order of the backward pass.
    """
    with _SEARCH:
        start = len(_EVENTS)  # if not 0, this search is inside another
        try:
            run()
        finally:
            jax.effects_barrier()  # wait for the callbacks
            chains = [chain for _, chain in sorted({*_EVENTS[start:]})]
            del _EVENTS[start:]
    outer = {chain[:n] for chain in chains for n in range(len(chain))}
    return [*dict.fromkeys(chain[-1] for chain in chains if chain not in outer)]


def _watched(chain: tuple[str, ...], call: Any, args: Any, kwargs: Any) -> Any:
    """`call(*args, **kwargs)`. Reports if its backward pass makes a NaN.

    The parameters of a module count as inputs, so the module is among the arguments.
    """
    leaves = jtu.tree_leaves((args, kwargs))
    given = [x for x in leaves if _has_cotangent(x)]
    if not given:
        return call(*args, **kwargs)
    # The objects themselves, not copies: a closure among the arguments refers to them.
    lifted = Lifted((args, kwargs))
    token = vary(jnp.zeros(()), manual_axes())
    *new, token = _watch.bind(*given, token, True, back=ft.partial(_at_inputs, chain))
    (args, kwargs), values = lifted.fill((args, kwargs), _replaced(leaves, new))
    values = {**lifted.values, **values}
    ran = lifted.run(values, call, args, kwargs)
    # A cotangent also comes in through written state.
    leaves, structure = jtu.tree_flatten((ran.out, ran.written))
    outputs = [x for x in leaves if _has_cotangent(x)]
    was_finite = _is_finite((given, outputs))
    *new, _ = _watch.bind(*outputs, token, was_finite, back=_at_outputs)
    out, written = structure.unflatten(_replaced(leaves, new))
    lifted.commit(ran._replace(written=written))
    return out


def _replaced(leaves: list[Any], new: list[Any]) -> list[Any]:
    rest = iter(new)
    return [next(rest) if _has_cotangent(x) else x for x in leaves]


def _has_cotangent(x: Any) -> bool:
    """Whether `x` may have a cotangent. An array that is not traced has none."""
    is_traced = isinstance(x, jax.core.Tracer)
    return is_traced and jnp.issubdtype(x.dtype, jnp.inexact)


def _is_finite(tree: Any) -> jax.Array:
    """Whether no number in a tree is NaN or infinite."""
    numbers = [x for x in jtu.tree_leaves(tree) if _is_inexact(x)]
    return jnp.array([jnp.isfinite(x).all() for x in numbers], bool).all()


def _is_inexact(x: Any) -> bool:
    return eqx.is_array_like(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _at_outputs(cotangents: list[Any], was_finite: Any) -> list[Any]:
    *cotangents, token = cotangents
    token = (was_finite & _is_finite(cotangents)).astype(token.dtype)
    return [*cotangents, vary(token, manual_axes())]


def _at_inputs(chain: tuple[str, ...], cotangents: list[Any], _: Any) -> list[Any]:
    *others, token = cotangents
    # Inside `jax.shard_map`, JAX has summed the cotangent of a replicated parameter
    # over the devices, and one of the others may have contributed a NaN.
    axes = varying_axes(token)
    replicated = [a for a in axes if any(a not in varying_axes(x) for x in others)]
    ok = jax.lax.pmin(token, tuple(replicated)) if replicated else token
    made = _in_any_lane((ok > 0) & ~_is_finite(others))
    jax.debug.callback(ft.partial(_record, (next(_ORDER), chain)), made)
    return cotangents


# Under `jax.vmap`, a callback would become one for each lane.
@jax.custom_batching.custom_vmap
def _in_any_lane(made: Any) -> Any:
    return made


@_in_any_lane.def_vmap
def _(size: int, is_batched: Any, made: Any) -> tuple[Any, bool]:
    return _in_any_lane(made.any(axis=0)), False


def _record(event: _Event, made: Any) -> None:
    if made:
        _EVENTS.append(event)


# --- The identity, with a transpose of our own ----------------------------------------

# The operands but for the last, which the backward pass gets as a value:
# `back(cotangents, last)`. A `jax.custom_vjp` has no forward mode, and a
# `jax.custom_derivatives.linear_call` cannot be mapped.
_watch: Final = Primitive("watch")
_watch.multiple_results = True


def _identity(*operands: Any, back: Any) -> list[Any]:
    return [*operands[:-1]]


def _jvp(primals: Any, tangents: Any, back: Any) -> Any:
    tangents = map(ad.instantiate_zeros, tangents[:-1])
    bind = ft.partial(_watch.bind, back=back)
    return bind(*primals), bind(*tangents, primals[-1])


def _transpose(cotangents: Any, *operands: Any, back: Any) -> list[Any]:
    return [*back([*map(ad.instantiate_zeros, cotangents)], operands[-1]), None]


def _batch(operands: Any, axes: Any, back: Any) -> Any:
    pairs = [*zip(operands, axes, strict=True)]
    n = next(x.shape[axis] for x, axis in pairs if axis is not None)
    lanes = [
        jnp.broadcast_to(x, (n, *jnp.shape(x)))
        if axis is None
        else jnp.moveaxis(x, axis, 0)
        for x, axis in pairs
    ]
    out = _watch.bind(*lanes, back=jax.vmap(back))
    return out, [0] * len(out)


_watch.def_impl(_identity)
_watch.def_abstract_eval(_identity)
mlir.register_lowering(_watch, mlir.lower_fun(_identity, multiple_results=True))
ad.primitive_jvps[_watch] = _jvp
ad.primitive_transposes[_watch] = _transpose
batching.primitive_batchers[_watch] = _batch
