"""Lazy models: placeholders for values, and `init`, which draws them.

A placeholder is an ordinary leaf of the pytree, so a lazy model already has its final
structure, as far as that is known. The key of each value is folded from its path, so
values do not depend on the order of initialization or on the rest of the model.
"""

import copy
import functools as ft
import operator
from collections.abc import Callable
from typing import Any, Final, overload, TYPE_CHECKING, TypeVar

import equinox as eqx
import jax.tree_util as jtu

from .._compat import boundary, has_escaped
from .._errors import an, NotInitializedError
from .._kinds.kinds import Parameter, State
from .._tree.base import (
    BaseModule,
    dynamic_names,
    fields_of,
    INIT_DONE,
    is_eqx_module,
    is_module,
    ownership_of,
    Placeholder,
)
from .._tree.compare import check_not_repeated, same
from .._tree.context import children, Context, map_children, ROOT
from .._tree.dtypes import strengthen
from .._tree.keys import as_key, clone, key_at
from .._tree.walk import (
    copy_tree,
    is_array,
    modules_in,
    name_of,
    Traversal,
    traverse,
    Visit,
    walk,
)
from .._typing import KeyPath, Tree
from .copy import PrivateCopy
from .scope import own, Scope


_T = TypeVar("_T")


if TYPE_CHECKING:
    from jaxtyping import PRNGKeyArray

    class Initializer:
        """A placeholder for the value `f(key)`, which `init` draws."""

        # To a type checker, an Initializer is the value that it becomes.
        def __new__(cls, f: Callable[[PRNGKeyArray], _T], /) -> _T: ...  # type: ignore[misc]

else:

    class Initializer(Placeholder):
        """A placeholder for the value `f(key)`, which `init` draws.

        **Arguments:**

        - `f`: takes a PRNG key; returns an array, a pytree, or a whole module. `init`
            calls it once, with a key folded from the placeholder's path in the tree.

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
                    f"`es.Initializer` was given {an(type(f).__name__)}: it takes a"
                    " function, `es.Initializer(lambda key: jr.normal(key, (3,)))`."
                )
            self.f = f

        def __repr__(self):
            return "Initializer"

        def _raise(self, *args, **kwargs):
            raise NotInitializedError(
                "This is an `es.Initializer`, a placeholder for a value. Draw the"
                " values first: `model = model.init(42)`."
            )

        # Using a placeholder as an array or a layer raises our error. JAX looks up
        # `dtype` on its operands.
        dtype = shape = ndim = property(_raise, doc="Not available before `init`.")
        __call__ = __getitem__ = __iter__ = __len__ = __neg__ = _raise
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _raise
        __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = _raise


@overload
def lazy(cls: type[_T], /, *args: Any, **kwargs: Any) -> _T: ...
@overload
def lazy(cls: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T: ...
def lazy(cls: Callable[..., _T], /, *args: Any, **kwargs: Any) -> _T:
    """A placeholder for `cls(*args, key=key, **kwargs)`, a layer that `init` creates.

    **Raises:**

    - `TypeError`: `cls` is a layer rather than its class, or you passed a `key`.

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
        raise TypeError(
            "`es.lazy` takes a class and its arguments without the key; `init` creates"
            " the layer, and passes the key:\n\n"
            "    es.lazy(eqx.nn.Linear(2, 3, key=key))        # wrong\n"
            "    es.lazy(eqx.nn.Linear, 2, 3)                 # right"
        )
    return Initializer(ft.partial(_construct, cls, args, kwargs))


def _construct(cls: Any, args: Any, kwargs: Any, key: Any) -> Any:
    return cls(*args, key=key, **kwargs)


def _needs_module_init(module: BaseModule) -> bool:
    overridden = type(module).module_init is not BaseModule.module_init
    return overridden and not getattr(module, INIT_DONE)


def missing(tree: Any) -> str | None:
    """Describe the first part that is not initialized; `None` if there is none."""
    return _missing(walk(tree))


def _missing(visits: list[Visit]) -> str | None:
    for visit in visits:
        if isinstance(visit.node, Initializer):
            return f"`{visit.name or 'the value itself'}` is an `es.Initializer`"
        if (
            not visit.is_leaf
            and is_module(visit.node)
            and _needs_module_init(visit.node)
        ):
            name = visit.name or type(visit.node).__qualname__
            return f"`module_init` of `{name}` has not run"
    return None


def check_initialized(tree: Any) -> None:
    """Raise `NotInitializedError` unless everything in `tree` is initialized."""
    check_none_missing(walk(tree))


def check_none_missing(visits: list[Visit]) -> None:
    """`check_initialized` for the visits of a walk."""
    if (what := _missing(visits)) is not None:
        raise NotInitializedError(
            f"The model is used before it is initialized: {what}. Draw the values"
            " first; `init` returns a new model:\n\n    model = model.init(42)"
        )


def check_ready(tree: Any) -> Traversal:
    """Raise if a model is not initialized, or contains one stateful module twice."""
    traversal = traverse(tree)
    check_none_missing(traversal.visits)
    if traversal.has_repeated:
        check_not_repeated(tree)
    return traversal


@boundary
def init(
    tree: Tree, key: Any, *inputs: Any, call: Callable[..., Any] | None = None
) -> Tree:
    """Initialize a model: draw every placeholder, and run every `module_init`.

    `init` draws all `es.Initializer`s first. Then it calls `module_init(self, key)` of
    every `es.Module` that overrides this hook, children before parents, and once in the
    life of a module. Values that are already initialized do not change.

    **Arguments:**

    - `tree`: a model, or any pytree of them.
    - `key`: a PRNG key, or an integer seed. The key of each value is folded from its
        path, so adding a layer does not change how the others are initialized.
    - `*inputs`: if given, the forward pass runs once, with `self.initializing` true,
        and may assign fields that are still missing, with shapes that depend on the
        inputs. Such a field stores the last value that is assigned, even if it is
        state. All other writes are discarded. Loops run one extra step, and `cond` runs
        both branches, so that all fields are assigned.
    - `call`: a function of the model and the inputs to run instead of the model itself.

    **Returns:**

    A new tree, in which everything is initialized.

    **Raises:**

    - `TypeError`: `key` is neither a key nor an integer, or the tree is not callable
        and there is no `call`.
    - `ValueError`: one stateful module occurs twice in the tree; layers of a stack or
        of an ensemble would take shapes from the inputs (initialize the layers, and
        stack them afterwards).

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
    check_not_repeated(tree)
    tree = _run_hooks(tree, key)
    if not inputs and call is None:
        return tree
    run = operator.call if call is None else call
    # The forward pass draws from clones of the keys: the model will draw from the same
    # keys later, which `jax_debug_key_reuse` would report.
    cloned = jtu.tree_map(clone, tree)
    after = _in_scope(cloned, key, lambda private: run(private, *inputs))
    return _run_hooks(_filled(copy_tree(tree), after), key)


def as_initialized(tree: Any) -> Any:
    """`tree`; or the shapes that it has after `init`, if it is not initialized."""
    return tree if missing(tree) is None else eqx.filter_eval_shape(init, tree, 0)


def _run_hooks(tree: Any, key: Any) -> Any:
    """Draw Initializers and run hooks until none is left: both may add new ones."""
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


# Modules, with the names and values of fields that `init` has created in them.
Created = list[tuple[BaseModule, str, Any]]


class InitScope(Scope):
    """The scope of `init`: any field may be written, and the structure may change.

    An Initializer is drawn when it is written. A field that is new inside a transform
    cannot be an output of the trace. But the key of `init` is from outside the trace,
    so arrays drawn with it are ordinary arrays, not tracers. Therefore, missing fields
    are written directly to the modules outside. `created` contains these fields, with
    their old values.
    """

    is_initializing = True

    def __init__(self, key: Any):
        super().__init__((State, Parameter))
        self.key = key
        self.created: dict[tuple[int, str], tuple[BaseModule, str, Any]] = {}

    def inner(self) -> "InitScope":
        return InitScope(self.key)

    def allows(self, kind: type | None) -> bool:
        return True

    def accept(self, old: Any, value: Any, path: KeyPath, context: Context) -> Any:
        value = draw(value, self.key, path, context)
        return super().accept(None, value, path, context)

    def settle(self, old: Any, new: Any, path: KeyPath) -> Any:
        # Any shape and dtype.
        return super().settle(None, new, path)

    def check_structure(self, before: Traversal, after: Any) -> None:
        pass

    def note_write(self, module: BaseModule, name: str, old: Any, new: Any) -> None:
        is_static = name not in dynamic_names(type(module))
        if is_static or _is_missing(old, new):
            self.note_created(module, name, old)

    def note_created(self, module: BaseModule, name: str, old: Any) -> None:
        """Record a field that was missing, and its old value."""
        self.created.setdefault((id(module), name), (module, name, old))

    def take_created(self) -> Created:
        """Remove the created fields from the modules, and return them."""
        fields = self.created.values()
        taken = [(module, name, fields_of(module)[name]) for module, name, _ in fields]
        # Forget the writes: `_check_written` would not find modules in the fields that
        # are removed below, and would report the writes to them as lost.
        self.written.clear()
        for module, name, old in fields:
            object.__setattr__(module, name, old)
        return taken

    def put_created(self, created: Created) -> None:
        """Write the fields that an inner scope has created in its trace."""
        for module, name, new in created:
            self.note_created(module, name, fields_of(module)[name])
            ownership, key = ownership_of(module), jtu.GetAttrKey(name)
            context = ownership.context.enter(module, key)
            object.__setattr__(module, name, new)
            own(traverse(new, (*ownership.path, key), context), self)


def _is_missing(old: Any, new: Any) -> bool:
    """Whether `new` adds an array to `old`, or changes its structure."""
    if jtu.tree_structure(old) != jtu.tree_structure(new):
        return True
    pairs = zip(jtu.tree_leaves(old), jtu.tree_leaves(new), strict=True)
    return any(not is_array(x) and not same(x, y) for x, y in pairs)


def check_created(fields: Created) -> None:
    """Raise `ValueError` if a created field contains a tracer that has escaped."""
    for module, name, value in fields:
        if any(map(has_escaped, jtu.tree_leaves(value))):
            raise created_error(module, name, "from values of a transform")


def created_error(module: BaseModule, name: str, how: str) -> ValueError:
    """The error for a field that `init` cannot create inside a transform."""
    return ValueError(_CREATED.format(f"{type(module).__qualname__}.{name}", how))


_CREATED: Final = """`{}` is created by `init` {}. Inside a transform an array \
is created once, outside the trace: it may depend on keys and shapes, and cannot be \
part of a stack. To create a stack, map the whole `init`:

    keys = jax.random.split(key, n)
    layers = eqx.filter_vmap(lambda key: Layer().init(key, x))(keys)"""


def _in_scope(tree: Any, key: Any, run: Callable[[Any], Any]) -> Any:
    """`tree` after `run`, which may assign any field of any `es.Module` in it."""
    with InitScope(key) as scope:
        private = PrivateCopy(tree, scope)
        run(private.tree)
        _, new = private.leave(None)
    return new


def draw(tree: Any, key: Any, path: KeyPath = (), context: Context = ROOT) -> Any:
    """`tree` with each Initializer replaced by a value, also inside drawn values."""
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


def _filled(before: Any, after: Any) -> Any:
    """`before`, filled with the parts of `after` where `before` has no leaves.

    Writes to modules in place, also to static fields, and adds keys to dicts, which
    `eqx.tree_at` cannot do.
    """
    if not walk(before):
        is_same = jtu.tree_structure(before) == jtu.tree_structure(after)
        return before if is_same else after
    if type(before) is not type(after):
        return before
    if is_eqx_module(before):
        new = fields_of(after)
        for name, value in fields_of(before).items():
            object.__setattr__(before, name, _filled(value, new.get(name)))
        return before
    if isinstance(before, dict):
        filled = copy.copy(before)  # keeps the factory of a `defaultdict`
        for key, value in after.items():
            filled[key] = _filled(before.get(key), value)
        return filled
    new = dict(children(after) or ())
    return map_children(lambda key, x: _filled(x, new.get(key)), before)
