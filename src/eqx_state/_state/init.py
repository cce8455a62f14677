"""`es.init`: draws the values of a lazy model, and creates missing fields."""

import copy
import operator
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax.tree_util as jtu

from .._compat import boundary, has_escaped
from .._kinds.kinds import TreePart
from .._tree.base import (
    BaseModule,
    dynamic_names,
    INIT_DONE,
    is_eqx_module,
    ownership_of,
)
from .._tree.compare import check_not_repeated, same
from .._tree.context import children, Context, map_children
from .._tree.keys import as_key, clone, key_at
from .._tree.unbuilt import fields_of
from .._tree.walk import (
    copy_tree,
    is_array,
    modules_in,
    name_of,
    traverse,
    walk,
)
from .._typing import KeyPath, Tree
from .copy import PrivateCopy
from .lazy import draw, missing, needs_module_init
from .scope import Scope


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
    pending = [v for v in modules_in(tree) if needs_module_init(v.node)]
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
    are written directly to the modules outside. `replaced` has the old value of each of
    these fields.
    """

    is_initializing = True

    def __init__(self, key: Any):
        super().__init__((TreePart,))
        self.key = key

    def _begin(self) -> None:
        super()._begin()
        self.replaced: dict[tuple[int, str], tuple[BaseModule, str, Any]] = {}

    def allows(self, kind: type | None) -> bool:
        return True

    def accept(self, value: Any, path: KeyPath, context: Context) -> Any:
        return draw(value, self.key, path, context)

    def fit_leaf(self, old: Any, new: Any, path: KeyPath) -> Any:
        # The new value may have any shape and dtype.
        return super().fit_leaf(None, new, path)

    def note_write(self, module: BaseModule, name: str, old: Any, new: Any) -> None:
        is_static = name not in dynamic_names(type(module))
        if is_static or _adds(old, new):
            self.replaced.setdefault((id(module), name), (module, name, old))

    def take_created(self) -> Created:
        """Remove the created fields from the modules, and return them."""
        fields = self.replaced.values()
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
            self.note_write(module, name, fields_of(module)[name], new)
            ownership, key = ownership_of(module), jtu.GetAttrKey(name)
            context = ownership.context.enter(module, key)
            object.__setattr__(module, name, new)
            self.take(traverse(new, (*ownership.path, key), context))


def _adds(old: Any, new: Any) -> bool:
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


def _filled(before: Any, after: Any) -> Any:
    """`before`, filled with the parts of `after` where `before` has no leaves.

    Writes to modules in place, also to static fields, and adds keys to dicts, which
    `eqx.tree_at` cannot do.
    """
    if not walk(before):
        return after
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
