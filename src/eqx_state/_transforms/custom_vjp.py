"""`es.custom_vjp`: `jax.custom_vjp` for functions that may write state of modules.

JAX does not differentiate the body of a custom derivative, only its inputs and outputs.
The arrays of all modules are therefore inputs, and all writable state is an output,
whether JAX runs the function or its forward rule.
"""

import contextlib
import functools as ft
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import is_in_trace
from .._tree.keys import clone
from .._tree.unbuilt import fields_of
from .._tree.walk import is_array, leaves, walk
from .._typing import P, R
from .cut import cut, which_traced
from .lift import Ran
from .primal import PureCall
from .reach import models_in
from .roots import Values
from .target import positions
from .transform import Bound, Transform, unbound, wrap


class _CustomVjp(Transform):
    nondiff_argnums: tuple[int, ...] = eqx.field(static=True)
    fwd: Any
    bwd: Any

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> "_CustomVjp":
        fields_of(self).update(fwd=fwd, bwd=bwd)
        return self

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        # Here the object is argument 0, and `bwd` returns a cotangent for it.
        rule = self.of(unbound(self.f))
        rule.__dict__.update(fwd=unbound(self.fwd))
        return Bound(rule, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        args = self._by_position(args, kwargs)
        what = f"es.custom_vjp({self._name}, nondiff_argnums={self.nondiff_argnums})"
        static = sorted(positions(args, self.nondiff_argnums, what))
        functions = self.f, self.fwd, self.bwd
        passed = [x for i, x in enumerate(args) if i not in static]
        _check_passed(self._name, (functions, args), passed)

        def which_inputs(args: Any) -> Any:
            return tuple(
                i not in static and which_traced(x) for i, x in enumerate(args)
            )

        call = PureCall(functions, args, {}, which_inputs)
        if call.lifted.is_initializing:
            # Under `eqx.filter_eval_shape(model.init, key)` JAX would trace `f`
            # separately, and new fields could not leave that trace.
            return self.f(*args)
        # JAX would pass a number to `f` as a literal of a private class.
        arrays = jtu.tree_map(jnp.asarray, call.arrays)
        inputs = [args[i] if i in static else x for i, x in enumerate(arrays)]
        ran = self._run(call, inputs, static)
        call.lifted.commit(ran._replace(written=jax.lax.stop_gradient(ran.written)))
        out, rest = ran.out
        return rest.join(out)

    def _run(self, call: PureCall, inputs: list[Any], static: list[int]) -> Ran:
        """Run the call through `jax.custom_vjp`."""
        written: dict[str, frozenset[int]] = {}  # by `f`, and by `fwd`

        def result(ran: Ran, before: Values, out: Any) -> Ran:
            # Return all state of the arguments: `fwd` may write more than `f`, but JAX
            # requires both to return the same structure.
            state = {i: x for i, x in before.items() if i in call.lifted.writable}
            return ran._replace(out=cut(out), written={**state, **ran.written})

        @ft.wraps(self.f, updated=())  # JAX uses the names in its messages
        def f(*arrays: Any) -> Ran:
            ran, before = call(self.f, arrays)
            written["f"] = frozenset(ran.written)
            return result(ran, before, ran.out)

        @ft.wraps(self.fwd, updated=())
        def fwd(*arrays: Any) -> Any:
            ran, before = call(self.fwd, arrays)
            written["fwd"] = frozenset(ran.written)
            if not isinstance(ran.out, (tuple, list)) or len(ran.out) != 2:
                return ran.out  # JAX raises the error
            out, residuals = ran.out
            return result(ran, before, out), cut(residuals)

        def bwd(*given: Any) -> Any:
            *static, (residuals, rest), cotangents = given
            # No gradient flows through written state: drop its cotangents.
            out, _ = cotangents.out
            return self.bwd(*static, rest.join(residuals), out)

        rule = jax.custom_vjp(f, nondiff_argnums=static)
        if self.fwd is not None:  # else JAX raises the error
            rule.defvjp(fwd, bwd)
        # JAX gives a returned key a tangent, and `jax.random.clone` has no rule for it.
        ran = jtu.tree_map(clone, rule(*inputs))
        for name, g in (("f", f), ("fwd", fwd)) if is_in_trace() else ():
            # `jax.grad(jax.jit(call))` traces `fwd` after this call has returned, and
            # `jax.grad(call)` never traces `f`. Find out now what both write.
            if name not in written:
                with contextlib.suppress(Exception):  # JAX may never trace it
                    jax.eval_shape(g, *call.arrays)
        by_either = frozenset().union(*written.values())
        # Leave out unwritten state: `__call__` passes what we return here through
        # `stop_gradient`, and the caller's own state would lose its gradient.
        new = {slot: x for slot, x in ran.written.items() if slot in by_either}
        return ran._replace(written=new)

    def _by_position(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """All arguments by position, with defaults, as `fwd` takes them."""
        bound = inspect.signature(self.f).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(_BY_NAME.format(self._name, min(bound.kwargs)))
        return bound.args

    @property
    def _name(self) -> str:
        return getattr(self.f, "__name__", type(self.f).__name__)


def _check_passed(name: str, functions: Any, passed: Any) -> None:
    """Raise `ValueError` if a function closes over arrays of a module not passed."""
    known = {id(visit.node) for visit in walk(passed)}
    for module in models_in(functions):
        if id(module) not in known and any(is_array(v.node) for v in leaves(module)):
            raise ValueError(_CLOSED_OVER.format(name, type(module).__name__))


_BY_NAME: Final = """`es.custom_vjp`: the rules of `{}` take all arguments by \
position, but `{}` is keyword-only. Make it a positional parameter."""

_NO_PARAMETER: Final = """`es.custom_vjp(nondiff_argnames={!r})`: the function has no \
such parameter, only {}."""

_CLOSED_OVER: Final = """`es.custom_vjp`: `{0}` or one of its rules closes over the \
`{1}`, or takes it through `nondiff_argnums`. JAX does not differentiate the body of a \
custom derivative, so the arrays of this module would get no gradient. Pass it:

    es.custom_vjp(lambda x: layer(x))           # wrong
    es.custom_vjp(lambda layer, x: layer(x))    # right, with its cotangent from `bwd`
"""


class _Rule(Generic[P, R]):
    """The type of `custom_vjp(f)`, for type checkers."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., R]: ...
    def defvjp(
        self, fwd: Callable[..., tuple[R, Any]], bwd: Callable[..., tuple[Any, ...]]
    ) -> "_Rule[P, R]": ...


def custom_vjp(
    fun: Callable[P, R],
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> _Rule[P, R]:
    """`jax.custom_vjp` for functions that may write the state of modules.

    Write `rule = es.custom_vjp(f)`, and then `rule.defvjp(fwd, bwd)`, which returns
    `rule`. `fwd` takes the arguments of `f` and returns `(out, residuals)`; `bwd` takes
    the residuals and the cotangents of `out`, and returns a tuple with a cotangent for
    each argument. JAX runs `fwd` if it differentiates the call, and `f` otherwise.
    `f` and `fwd` may write state to modules among their arguments. Written values pass
    through `jax.lax.stop_gradient`, so no gradient flows through them: return a value
    as a part of the output if it needs a gradient.

    **Arguments:**

    - `fun`: a function. For a decorated method, `self` is argument 0, also for `fwd`
        and in the tuple that `bwd` returns.
    - `nondiff_argnums`, `nondiff_argnames`: static arguments. `bwd` receives them
        first. Leaves that are not arrays need not be named.

    **Returns:**

    A function of the same arguments, with the method `defvjp`. The cotangent of a
    module is a module of the same structure; `None` for an argument or a part of it
    means zero. The function is a pytree, and can decorate methods.

    **Raises:**

    - `ValueError`: `fun`, `fwd` or `bwd` closes over a module that is not an argument.
    - `dataclasses.FrozenInstanceError`: `bwd` writes to a module that it receives.
    - `AttributeError`: `defvjp` was not called.
    - `TypeError`: `fwd` does not return a pair whose first element is like the output
        of `fun`; `bwd` does not return a tuple of trees like the arguments; or `fun`
        has a keyword-only parameter.

    !!! example

        ```python
        import eqx_state as es
        import jax
        import jax.numpy as jnp


        class Clip(es.Module):
            # The identity, with a gradient that is clipped.

            limit: es.Buffer
            calls: es.State = 0

            @es.custom_vjp
            def __call__(self, x):
                self.calls = self.calls + 1
                return x

            def _fwd(self, x):
                self.calls = self.calls + 1
                return x, self.limit

            def _bwd(limit, g):
                return None, jnp.clip(g, -limit, limit)

            __call__.defvjp(_fwd, _bwd)


        def loss(clip, x):
            return jnp.sum(5 * clip(x))


        x = jnp.array([1.0, 2.0])
        (grads, by_x), (clip, _) = es.grad(loss, argnums=(0, 1))(Clip(1.0), x)
        assert by_x.tolist() == [1.0, 1.0] and clip.calls == 1
        ```
    """
    is_one = isinstance(nondiff_argnums, int)
    argnums = {nondiff_argnums} if is_one else {*nondiff_argnums}
    is_name = isinstance(nondiff_argnames, str)
    names = [*inspect.signature(fun).parameters] if nondiff_argnames else []
    for name in [nondiff_argnames] if is_name else nondiff_argnames:
        if name not in names:
            raise ValueError(_NO_PARAMETER.format(name, ", ".join(names)))
        argnums.add(names.index(name))
    static = tuple(sorted(argnums))
    return wrap(_CustomVjp, fun, nondiff_argnums=static, fwd=None, bwd=None)
