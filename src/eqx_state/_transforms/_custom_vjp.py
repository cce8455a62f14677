"""`es.custom_vjp`: `jax.custom_vjp` for functions of modules that write state."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, ParamSpec, TypeVar

import equinox as eqx

from .._tree._base import fields_of
from ._custom_call import Call, Rules
from ._transform import Transform, Unbound, wrap


_P = ParamSpec("_P")
_R = TypeVar("_R")


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
        # The object is argument 0 here, for which `bwd` returns a cotangent, too.
        rule = self.of(_unbound(self.f))
        rule.__dict__.update(fwd=_unbound(self.fwd))
        return eqx.Partial(rule, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        name = getattr(self.f, "__name__", type(self.f).__name__)
        if self.fwd is None:
            raise AttributeError(_NO_RULES.format(name))
        rules = Rules(name, self.f, self.fwd, self.bwd, self.nondiff_argnums)
        call = Call(rules, _by_position(rules, args, kwargs))
        if call.lifted.is_initializing:
            return self.f(*call.args)
        return call.run()


def _unbound(f: Any) -> Any:
    return Unbound.around(f) if isinstance(f, Transform) else f


def _by_position(rules: Rules, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All arguments of a call by position, with defaults, as the rules take them."""
    try:
        bound = inspect.signature(rules.f).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise TypeError(_BINDING.format(rules.name, error)) from None
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(_BY_NAME.format(rules.name, min(bound.kwargs)))
    return bound.args


_NO_RULES: Final = """`es.custom_vjp`: `{0}` was called, and has no rules yet. Define \
them first: `{0}.defvjp(fwd, bwd)`."""

_NO_SUCH_NAME: Final = """`es.custom_vjp`: `nondiff_argnames` has `{}`, and the \
arguments are {}."""

_BINDING: Final = """`es.custom_vjp`: the arguments do not fit the signature of `{}`: \
{}."""

_BY_NAME: Final = """`es.custom_vjp`: the rules of `{}` take all arguments by \
position, and `{}` is only given by name. Let it be given by position, too."""


class _Rule(Generic[_P, _R]):
    """The type of `custom_vjp(f)`, for type checkers."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R: ...
    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., _R]: ...
    def defvjp(
        self, fwd: Callable[..., tuple[_R, Any]], bwd: Callable[..., tuple[Any, ...]]
    ) -> "_Rule[_P, _R]": ...


def custom_vjp(
    fun: Callable[_P, _R],
    nondiff_argnums: int | Sequence[int] = (),
    nondiff_argnames: str | Sequence[str] = (),
) -> _Rule[_P, _R]:
    """`jax.custom_vjp` for functions of modules, which may write state.

    `rule = es.custom_vjp(f)`, and then `rule.defvjp(fwd, bwd)`, which returns `rule`:
    `fwd` takes the arguments of `f` and returns `(out, residuals)`; `bwd` takes the
    residuals and the cotangents of `out`, and returns a tuple with a cotangent for each
    argument. If the call is differentiated, `fwd` runs, and otherwise `f`. Both may
    write state of modules among their arguments, and what the one that ran has written
    counts.

    **Arguments:**

    - `fun`: a function. For a decorated method, `self` is argument 0, also of `fwd` and
        in what `bwd` returns.
    - `nondiff_argnums`, `nondiff_argnames`: arguments that are static, and come first
        in the arguments of `bwd`. Leaves that are not arrays need not be named.

    **Returns:**

    A function of the same arguments, with the method `defvjp`. The cotangent for a
    module is a tree like it, with `None` for leaves without one; `None` in place of a
    whole argument, or of any part of it, is zero. The function is a pytree, and can
    decorate methods.

    **Raises:**

    - `ValueError`: `fun`, `fwd` or `bwd` closes over a module that is not an argument;
        they sow different values.
    - `es.TraceError`: `bwd` writes state; a gradient flows through state that `fwd` has
        written, and not behind an explicit `jax.lax.stop_gradient`.
    - `TypeError`: `fwd` did not return a pair, or `bwd` a tuple of trees like the
        arguments. `AttributeError`: there are no rules yet.

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
    positions = {nondiff_argnums} if is_one else {*nondiff_argnums}
    is_name = isinstance(nondiff_argnames, str)
    for name in [nondiff_argnames] if is_name else nondiff_argnames:
        parameters = [*inspect.signature(fun).parameters]
        if name not in parameters:
            raise ValueError(_NO_SUCH_NAME.format(name, ", ".join(parameters)))
        positions.add(parameters.index(name))
    argnums = tuple(sorted(positions))
    return wrap(_CustomVjp, fun, nondiff_argnums=argnums, fwd=None, bwd=None)
