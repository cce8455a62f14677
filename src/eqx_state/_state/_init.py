"""Lazy models: placeholders for values, and `init`, which draws them."""

import copy
import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, overload, TYPE_CHECKING, TypeVar

import equinox as eqx
import jax.random as jr
import jax.tree_util as jtu

from .._compat import boundary
from .._errors import NotInitializedError
from .._tree._aliasing import check_apart, check_not_shared
from .._tree._base import BaseModule, INIT_DONE, is_eqx_module, is_module
from .._tree._context import Context, ROOT
from .._tree._keys import as_key, is_typed, key_at
from .._tree._walk import (
    children,
    copy_tree,
    is_leaf,
    map_children,
    modules_in,
    name_of,
    Visit,
    walk,
)
from .._tree._weak_types import strengthen
from .._typing import KeyPath
from ._collect import check_written, collect, Snapshot
from ._outside_scope import explain
from ._scope import own, Scope


_T = TypeVar("_T")
_Tree = TypeVar("_Tree")


if TYPE_CHECKING:
    from jaxtyping import PRNGKeyArray

    class Initializer:
        """A placeholder for the value `f(key)`, which `init` draws."""

        # To a type checker it is what it will be.
        def __new__(cls, f: Callable[[PRNGKeyArray], _T], /) -> _T: ...  # type: ignore[misc]

else:

    class Initializer:
        """A placeholder for the value `f(key)`, which `init` draws.

        **Arguments:**

        - `f`: takes a PRNG key; returns an array, a pytree, or a whole module. It is
            called once, with a key that depends on the place in the tree.

        !!! example

            ```python
            import eqx_state as es
            import jax.random as jr


            class Scale(es.Module):
                factor: es.Parameter

                def __init__(self, size):
                    self.factor = es.Initializer(lambda key: jr.normal(key, (size,)))


            scale = Scale(3)
            assert not scale.initialized
            assert scale.init(42).factor.shape == (3,)
            ```
        """

        __slots__ = ("f",)

        def __init__(self, f):
            if not callable(f):
                raise TypeError(
                    f"`es.Initializer` was given a `{type(f).__name__}`: it takes a"
                    " function of a PRNG key, which `init` calls. A value that is there"
                    " already needs no placeholder:\n\n"
                    "    self.w = es.Initializer(jnp.ones(3))    # wrong\n"
                    "    self.w = es.Initializer(lambda key: jr.normal(key, (3,)))\n"
                    "    self.w = jnp.ones(3)"
                )
            self.f = f

        def __repr__(self):
            return "Initializer"

        def _raise(self, *args, **kwargs):
            raise NotInitializedError(
                "This is an `es.Initializer`, a placeholder for a value. Draw the"
                " values first: `model = model.init(42)`."
            )

        # Whoever takes it for an array or for a layer is told; JAX asks for the dtype.
        dtype = shape = ndim = property(_raise, doc="There is none before `init`.")
        __call__ = __getitem__ = __iter__ = __len__ = __neg__ = _raise
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _raise
        __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = _raise


@overload
def lazy(cls: type[_T], /, *args: Any, **kwargs: Any) -> _T: ...
@overload
def lazy(cls: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T: ...
def lazy(cls: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
    """A placeholder for `cls(*args, key=key, **kwargs)`, any layer, made by `init`.

    **Raises:**

    - `TypeError`: `cls` is a layer and not its class, or there is a `key`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es


        class Net(es.Module):
            linear: eqx.nn.Linear

            def __init__(self, size):
                self.linear = es.lazy(eqx.nn.Linear, size, 2)


        assert Net(3).init(0).linear.weight.shape == (2, 3)
        ```
    """
    if is_eqx_module(cls) or "key" in kwargs:
        what = "a layer that is made already" if is_eqx_module(cls) else "a `key`"
        raise TypeError(
            f"`es.lazy` was given {what}. It takes a class and the arguments without"
            " the key, and `init` makes the layer with a key of its own:\n\n"
            "    es.lazy(eqx.nn.Linear(2, 3, key=key))        # wrong\n"
            "    es.lazy(eqx.nn.Linear, 2, 3, key=key)        # wrong\n"
            "    es.lazy(eqx.nn.Linear, 2, 3)                 # right"
        )
    return Initializer(ft.partial(_construct, cls, args, kwargs))


def _construct(cls: Any, args: Any, kwargs: Any, key: Any) -> Any:
    return cls(*args, key=key, **kwargs)


def _needs_module_init(module: BaseModule) -> bool:
    overridden = type(module).module_init is not BaseModule.module_init
    return overridden and not getattr(module, INIT_DONE)


def missing(tree: Any) -> str | None:
    """What is not initialised yet, in words; `None` if everything is."""
    return _missing(walk(tree))


def _missing(visits: list[Visit]) -> str | None:
    for visit in visits:
        if isinstance(visit.node, Initializer):
            return f"`{visit.name or 'the value itself'}` is an `es.Initializer`"
        if is_module(visit.node) and _needs_module_init(visit.node):
            name = visit.name or type(visit.node).__qualname__
            return f"`module_init` of `{name}` has not run"
    return None


def check_initialized(tree: Any) -> None:
    """Raise `NotInitializedError` if anything is still to be drawn."""
    check_none_missing(walk(tree))


def check_ready(tree: Any) -> None:
    """Raise if a model cannot enter a call: not initialised, or one module shared."""
    visits = walk(tree)
    check_none_missing(visits)
    check_apart(visits)


def check_none_missing(visits: list[Visit]) -> None:
    """`check_initialized`, of what a walk has found."""
    if (what := _missing(visits)) is not None:
        raise NotInitializedError(
            f"The model is used before it is initialised: {what}. Draw the values"
            " first; `init` returns a new model:\n\n    model = model.init(42)"
        )


@boundary
def init(
    tree: _Tree,
    key: Any,
    *inputs: Any,
    call: Callable[..., Any] | None = None,
) -> _Tree:
    """`tree` with every placeholder drawn and every `module_init` run.

    All `es.Initializer`s come first; then, once in a module's life, `module_init(self,
    key)` of every `es.Module` that overrides it, children before parents. What is
    initialised already keeps its value.

    **Arguments:**

    - `tree`: a model, or any pytree of them.
    - `key`: a PRNG key, or an integer seed. Each value's key is folded from its path,
        so that a new layer changes no other layer's values.
    - `*inputs`: if given, the forward pass runs once, with `self.initializing` true,
        and may assign what is still missing: shapes can come from the inputs. Nothing
        else that it writes is kept. A loop in it runs one step more than it has, and a
        `cond` runs both branches, so that everything is made.
    - `call`: what to run instead of the model itself: a function of the model and the
        inputs.

    **Raises:**

    - `TypeError`: `key` is neither a key nor an integer, or the tree is not callable
        and there is no `call`.
    - `ValueError`: one stateful module is in two places of the tree.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp
        import jax.random as jr


        class Dense(es.Module):
            size: int
            weight: es.Parameter | None = None

            def __call__(self, x):
                if self.initializing and self.weight is None:
                    shape = (self.size, x.shape[-1])
                    self.weight = es.Initializer(lambda key: jr.normal(key, shape))
                return self.weight @ x


        dense = Dense(5).init(42, jnp.ones(3))
        assert dense.weight.shape == (5, 3)
        ```
    """
    key = as_key(key)
    check_not_shared(tree)
    tree = _run_hooks(tree, key)
    if not inputs and call is None:
        return tree
    run = _default_call if call is None else call
    if call is None and not callable(tree):
        raise TypeError(
            f"`init(key, *inputs)` runs the forward pass, and a `{type(tree).__name__}`"
            " cannot be called. Say what to run: `init(key, x, call=lambda model, x:"
            " model.encode(x))`."
        )
    # Of clones of its keys, since the model keeps the keys and will draw from them.
    cloned = jtu.tree_map(lambda x: jr.clone(x) if is_typed(x) else x, tree)
    after = _in_scope(cloned, key, lambda private: run(private, *inputs))
    return _run_hooks(_fill(tree, after), key)


def as_initialized(tree: Any) -> Any:
    """`tree`, or if anything in it is still to be drawn, its shapes after `init`."""
    return tree if missing(tree) is None else eqx.filter_eval_shape(init, tree, 0)


def _default_call(model: Any, *inputs: Any) -> Any:
    return model(*inputs)


def _run_hooks(tree: Any, key: Any) -> Any:
    """Initializers, then hooks, until nothing is left: either may bring new ones."""
    while missing(tree) is not None:
        tree = draw(tree, key)
        tree = _in_scope(tree, key, lambda private: _call_hooks(private, key))
    return tree


def _call_hooks(tree: Any, key: Any) -> None:
    pending = [v for v in modules_in(tree) if _needs_module_init(v.node)]
    for visit in sorted(pending, key=lambda v: -len(v.path)):
        object.__setattr__(visit.node, INIT_DONE, True)
        name = name_of((*visit.path, jtu.GetAttrKey("module_init()")))
        visit.node.module_init(key_at(key, name))


def _in_scope(tree: Any, key: Any, run: Callable[[Any], Any]) -> Any:
    """`tree` after `run`, which may assign any field of any `es.Module` in it."""
    before = Snapshot.of(tree)
    private = before.tree()
    with Scope((), lambda x, path, context: draw(x, key, path, context)) as scope:
        own(private, scope)
        try:
            run(private)
        except dataclasses.FrozenInstanceError as error:
            explain(error)
            raise
        visits = walk(private)
        check_written(visits, scope)
        return collect(private, before, scope, visits=visits).tree()


def draw(tree: Any, key: Any, path: KeyPath = (), context: Context = ROOT) -> Any:
    """`tree` with values in place of all Initializers, those in new values too."""
    visits = [v for v in walk(tree, path, context) if v.is_leaf]
    if not any(isinstance(v.node, Initializer) for v in visits):
        return tree
    new = []
    for visit in visits:
        value = visit.node
        if isinstance(value, Initializer):
            value = value.f(key_at(key, visit.name))
            if visit.context.owner is not None:
                if issubclass(visit.context.owner, BaseModule):
                    value = strengthen(value, visit.context.spec)
            value = draw(value, key, visit.path, visit.context)
        new.append(value)
    return jtu.tree_unflatten(jtu.tree_structure(tree), new)


def _fill(before: Any, after: Any) -> Any:
    """`before`, with what it lacked (`None`, containers of nothing) from `after`."""
    if not walk(before):
        return after
    if is_leaf(before) or type(before) is not type(after):
        return before
    if is_eqx_module(before):
        filled = copy_tree(before)
        for name in before.__dict__:
            value = _fill(before.__dict__[name], after.__dict__.get(name))
            object.__setattr__(filled, name, value)
        return filled
    if isinstance(before, dict):
        filled = copy.copy(before)  # a `defaultdict` keeps its factory
        given = {**before, **after}
        filled.update({k: _fill(before.get(k), x) for k, x in given.items()})
        return filled
    new = dict(children(after) or [])
    return map_children(lambda key, child: _fill(child, new.get(key)), before)
