"""Writing in a scope, `self.field = value`, and the errors for rejected writes.

Each write is checked when it happens, so that the traceback of an error points to the
line that wrote. Changes that bypass `__setattr__` are checked when the scope ends
(`copy.py`).
"""

import difflib
from dataclasses import fields, FrozenInstanceError
from typing import Any, Final

import jax.tree_util as jtu

from .._compat import is_in_trace, is_of_trace
from .._errors import an, public_name, TraceError
from .._kinds.kinds import kind_name
from .._tree.base import BaseModule, FLAGS, is_module
from .._tree.compare import is_hole, same
from .._tree.context import Context
from .._tree.dtypes import strengthen_field, to_strong
from .._tree.keys import is_key
from .._tree.unbuilt import fields_of
from .._tree.walk import (
    all_modules,
    is_array,
    leaves,
    map_leaves,
    modules_in,
    name_of,
    traverse,
    Visit,
)
from .._typing import KeyPath
from .scope import Ownership, Scope, scopes_open_here, structure_error


def write(module: BaseModule, ownership: Ownership, name: str, value: Any) -> None:
    """Run `module.name = value` inside a scope."""
    scope, cls = ownership.scope, type(module)
    where = f"{cls.__qualname__}.{name}"
    key = jtu.GetAttrKey(name)
    path = (*ownership.path, key)
    full_name = name_of(path)
    if not scope.is_open:
        raise FrozenInstanceError(CLOSED.format(where))
    scope.check_thread()
    if not scope.is_here:
        raise TraceError(trace_message(full_name, where))
    context = ownership.context.enter(module, key)
    field = next((f for f in fields(module) if f.name == name), None)
    if field is None:
        raise FrozenInstanceError(no_field_message(module, name, value))
    is_static = field.metadata.get("static", False)
    if is_static and not scope.allows(None):
        raise FrozenInstanceError(STATIC.format(where))
    old = fields_of(module).get(name)
    value = scope.accept(value, path, context)
    if is_array(old) and is_array(value):
        # An array for an array: no modules to adopt, no structure to compare.
        new = to_strong(scope.fit_leaf(old, value, path))
        _check_kind(old, Visit(path, new, context, True), scope, where)
    else:
        new = strengthen_field(cls, name, _fitted(old, value, path, scope))
        _check_kinds(old, new, path, context, scope, where)
        scope.take(traverse(new, path, context))
        # These modules are replaced on purpose. Forget writes to them, or the end of
        # the scope would report those writes as lost.
        for visit in modules_in(old):
            scope.written.pop(id(visit.node), None)
    scope.note_write(module, name, old, new)
    object.__setattr__(module, name, new)
    scope.written[id(module)] = module, full_name


def _fitted(old: Any, value: Any, path: KeyPath, scope: Scope) -> Any:
    """A copy of `value` whose leaves fit in the places of those of `old`.

    Modules that the scope owns already are not copied.
    """
    before = {visit.path: visit.node for visit in leaves(old)}

    def fit(visit: Visit) -> Any:
        old, new, where = before.get(visit.path), visit.node, (*path, *visit.path)
        return new if scope.owns(new) else scope.fit_leaf(old, new, where)

    return map_leaves(fit, value, scope.owns)


def _check_kinds(
    old: Any, new: Any, path: KeyPath, context: Context, scope: Scope, where: str
) -> None:
    """Raise if a leaf of a kind that the scope does not allow is new or has changed.

    A module that the scope already owns may move. If it then occurs twice in the model,
    the end of the scope raises.
    """
    before = {v.path: v.node for v in leaves(old, path, context, is_hole)}
    for visit in leaves(new, path, context, scope.owns):
        if not is_module(visit.node):
            # In the place of `None`, a new leaf is one that `init` should have made.
            above = (visit.path[:n] for n in range(len(path), len(visit.path)))
            was_none = any(before.get(x, ...) is None for x in above)
            is_known = visit.path in before or was_none
            if not is_known and not scope.allows(kind_at(visit)):
                raise structure_error(old, new, path)
            _check_kind(before.get(visit.path), visit, scope, where)


def _check_kind(old: Any, visit: Visit, scope: Scope, where: str) -> None:
    if not same(old, visit.node) and not scope.allows(kind_at(visit)):
        raise FrozenInstanceError(kind_message(visit, where, scope, old))


def kind_at(visit: Visit) -> type | None:
    """The kind of the array at a leaf; if it is not an array, the declared kind."""
    return visit.kind if is_array(visit.node) else visit.context.declared


# --- Errors ---------------------------------------------------------------------------


def trace_message(name: str, where: str = "", verb: str = "write") -> str:
    """The error for a write in a trace that state cannot leave."""
    return _TRACE.format(verb, f"`{where}` (`{name}`)" if where else f"`{name}`")


def kind_message(visit: Visit, where: str, scope: Scope, old: Any) -> str:
    """The error for a write to a kind that the scope does not allow."""
    kind, name, field = kind_at(visit), visit.name, visit.context.field
    allowed = " and ".join(f"`{k.__name__}`" for k in scope.kinds)
    if kind is None:
        what = "an array without a kind" if is_array(visit.node) else "not an array"
        declared = f"{field}: es.{'Rng' if is_key(visit.node) else 'State'}"
        return _NO_KIND.format(where, name, what, allowed, declared)
    if old is None:
        return _NOT_THERE.format(where, name, an(kind.__name__))
    kinds = ", ".join(map(kind_name, (*scope.kinds, kind)))
    if visit.context.declared is None:
        cure = _BY_DEFAULT.format(field)
    elif kind.covering and not (visit.context.is_own and kind is visit.context.kind):
        # In a field such as `target: es.Buffer[Encoder]`, whose layers declare `State`.
        cure = _IN_BUFFER
    else:
        cure = _DECLARE.format(an(kind.__name__), field)
    return _OTHER_KIND.format(where, name, an(kind.__name__), allowed, kinds, cure)


def no_field_message(module: BaseModule, name: str, value: Any) -> str:
    """The error for assigning a field that the class does not declare."""
    cls = type(module)
    if isinstance(getattr(cls, name, None), property):
        return _PROPERTY.format(cls.__qualname__, name)
    has_layer = bool(all_modules(value))
    declared = public_name(type(value)) + "`" if has_layer else _OF_A_KIND.format(name)
    declared = "es.Rng`" if is_key(value) else declared
    own = [f.name for f in fields(module) if f.name not in FLAGS]
    near = difflib.get_close_matches(name, own, 1)
    declare = f": did you mean `{near[0]}`? Or declare" if near else ". Declare"
    return _NO_FIELD.format(cls.__qualname__, name, declare, declared)


def frozen_error(module: BaseModule, name: str) -> FrozenInstanceError:
    """The error for a write to a module that no scope owns."""
    cls = type(module).__qualname__
    if name in FLAGS:
        return FrozenInstanceError(STATIC.format(f"{cls}.{name}"))
    is_stream = is_key(fields_of(module).get(name))
    if scopes := scopes_open_here():
        text = _NOT_OWNED + "\n".join(_causes(module, scopes)) + _IN_EVAL_MODE
    elif not fields_of(module)["training"]:
        text = _OUTSIDE + _IN_EVAL + (_STREAM if is_stream else "")
    else:
        where = _NO_SCOPE
        if is_in_trace():
            is_argument = any(map(is_of_trace, jtu.tree_leaves(module)))
            where = _TRACED if is_argument else _CONSTANT
        text = _OUTSIDE + where + (_STREAM + _IN_INIT if is_stream else _IN_LAYER)
    return FrozenInstanceError(text.format(cls, name))


def _causes(module: BaseModule, scopes: list[Scope]) -> list[str]:
    """The probable reasons why none of these open scopes owns a module."""
    known = [x for scope in scopes for x in scope.traversals.values()]
    owned = [module for traversal in known for module in traversal.modules]
    arrays = {id(x) for x in jtu.tree_leaves(owned) if is_array(x)}
    if any(id(x) in arrays for x in jtu.tree_leaves(module)):
        return [_COPY, _ASSIGNED, _TIED]  # it has arrays of the model
    has_stack = any(is_module(x) and x._eqx_state_is_stack for x in owned)
    is_slice = has_stack and scopes[-1].is_here
    return [_OF_STACK if is_slice else _COPY, _CREATED, _OTHER_ARGUMENT]


CLOSED: Final = """Cannot write `{}`: the call that this module belongs to has ended, \
so the module is only a read-only snapshot. Write while the call runs, or call again: \
`y, model = es.mutable(model)(x)`."""

STATIC: Final = """Cannot write `{}`: a static field is part of the structure of the \
tree, which a call cannot change. Declare it `es.State` if it is an array. Switch \
modes outside the call: `model = model.eval()`."""

_TRACE: Final = """Cannot {0} {1} here: this code runs inside a JAX transform, and the \
mutable scope was opened outside of it. The values computed here are tracers, which \
would leak. Use the `es` transform, which also returns the new state and is called \
like JAX's own:

    jax.vmap(lambda x: self.layer(x))(xs)    # wrong
    es.vmap(lambda x: self.layer(x))(xs)     # right

Likewise `es.scan`, `es.while_loop`, `es.fori_loop`, `es.cond`, `es.switch`, \
`es.checkpoint`, `es.jit`, `es.vjp`, `es.jvp` and the others; for `jax.grad` it is \
`es.value_and_grad`, with the model as its argument. Alternatively, call `es.mutable` \
inside the transform, and return the new model from it. Under `jax.vmap` each lane \
then has its own model, but all lanes draw the same random numbers, such as one \
dropout mask.

An `es` transform finds modules in closures, partials and pytrees, but not in other \
objects, iterators and globals: pass such a module as an argument."""

_NO_FIELD: Final = """Cannot write `{0}.{1}`: `{0}` has no field `{1}`{2} it in the \
class body: `{1}: {3}."""

_PROPERTY: Final = """Cannot write `{0}.{1}`: `{1}` is a property, and modules are \
frozen dataclasses, which do not call setters. Write the field behind it, or define a \
method that does: `self.set_{1}(value)`."""

_OF_A_KIND: Final = """es.State` if a forward pass changes it, `{}: es.Parameter` \
if it is trained"""

_NO_KIND: Final = """Cannot write `{0}`: `{1}` is {2}, but this call can write only \
{3}. Declare what a forward pass changes: `{4}`."""

_NOT_THERE: Final = """Cannot write `{0}`: `{1}` is {2} that is still `None`, and a \
call cannot change the structure of the model. Initialize the model first: `model = \
model.init(42, x)`."""

_OTHER_KIND: Final = """Cannot write `{0}`: `{1}` is {2}, but this call can write only \
{3}. To write it on purpose, name all kinds that the call writes, `kinds=({4})`, in \
`es.mutable`, `es.value_and_grad` or `es.grad`; `kinds=es.TreePart` allows all. {5}"""

_DECLARE: Final = """If it is not {}, declare what it is: `{}: es.State`."""

_BY_DEFAULT: Final = """It is that only by default: its field declares no kind, and \
arrays of floats are then parameters. If a forward pass changes it, declare what it \
is: `{0}: es.BatchStat` for a running statistic, else `{0}: es.State`."""

_IN_BUFFER: Final = """A field further up declares this kind for all that is below, \
and layers write in train mode. If this part should not change, such as a teacher with \
fixed statistics, call it in eval mode: `self.teacher.eval()(x)`."""

_OUTSIDE: Final = """Cannot write `{0}.{1}`: modules are frozen, and this `{0}` is \
outside `es.mutable`. """

_NO_SCOPE: Final = """For predictions call it in eval mode, in which layers write \
nothing. In training, call it through `es.mutable`, which returns the new model (for a \
batch, `es.mutable(es.vmap(model))(xs)`):

    y = model(x)                        # wrong
    y = model.eval()(x)                 # right, for predictions
    y, model = es.mutable(model)(x)     # right, in training
"""

_IN_LAYER: Final = """
In a layer, write only in train mode: `if self.training:`. To change any other field, \
make a copy: `model = model.replace({1}=value)`."""

_STREAM: Final = """
A stream of keys writes in eval mode, too: `self.drop(x, key=self.keys() if \
self.training else None)`."""

_IN_INIT: Final = """ In `__init__`, do not draw from a stream. Split a key, `a, b = \
jax.random.split(key)`, use `a`, and store `es.RngStream(b)`."""

_TRACED: Final = """It is an argument of a transform, such as `jax.jit`, `jax.grad`, \
`jax.vmap`, `eqx.filter_jit` or `eqx.filter_grad`, and the new state would be lost. \
For predictions, pass `model.eval()`. In training, return the new model:

    jax.grad(loss_fn)(model, x)                                      # wrong
    (loss, model), grads = es.value_and_grad(loss_fn)(model, x)      # right
    jax.jit(lambda model, x: model(x))(model, x)                     # wrong
    es.jit(lambda model, x: es.mutable(model)(x))(model, x)          # right
"""

_CONSTANT: Final = """The function of a transform, such as `jax.jit`, `jax.grad`, \
`jax.vmap`, `eqx.filter_jit` or `eqx.filter_grad`, closes over it, and the new state \
would be lost. For predictions, use `model.eval()`. In training, return the new model:

    jax.vmap(lambda x: model(x))(xs)                                 # wrong
    ys, model = es.mutable(es.vmap(model))(xs)                       # right
    jax.grad(lambda x: model(x))(x)                                  # wrong
    (loss, model), grads = es.value_and_grad(loss_fn)(model, x)      # right
    jax.jit(lambda x: model(x))(x)                                   # wrong
    es.jit(lambda model, x: es.mutable(model)(x))(model, x)          # right
"""

_IN_EVAL: Final = """It is in eval mode, and writes all the same. In a layer, write \
only in train mode: `if self.training:`. To fill a cache in eval mode, call the model \
through `es.mutable`:

    y = model.eval()(x)                         # wrong
    y, model = es.mutable(model.eval())(x)      # right
"""

_NOT_OWNED: Final = """Cannot write `{0}.{1}`: this `{0}` is not part of an argument \
that `es.mutable`, `es.value_and_grad` or `es.init` makes writable, so its new state \
would be lost. The usual causes:

"""

_COPY: Final = """- It is a copy, made by `update`, `replace`, `train`, `eqx.tree_at`, \
or a transform of JAX or Equinox. Give the copy an `es.mutable`, or use the transform \
of `es`:
    y, copy = es.mutable(model.update(params))(x)
    ys = es.vmap(self.layer)(xs)                        # not eqx.filter_vmap
    y = es.jit(self.layer)(x)                           # not eqx.filter_jit"""

_ASSIGNED: Final = """- It was assigned to a field, which stores a copy. Write through \
the field:
    self.layer.n = 0                                    # not: `new.n = 0`"""

_TIED: Final = """- It has an array that `eqx.nn.Shared` ties to a different module. \
Its call returns a copy. Move the state into a module without tied arrays."""

_CREATED: Final = """- It was created in this call. Create it in `__init__`, and store \
it in a field."""

_OF_STACK: Final = """- It is a layer taken out of an `es.nn.Stacked`. Call the stack:
    x = self.blocks(x)                                  # not the layers of it"""

_OTHER_ARGUMENT: Final = """- It is an argument other than the first, a keyword, in a \
`functools.partial`, or a variable that the function closes over. Pass it by position, \
and name the position; or put it into a field of the model, alone or in an \
`eqx.Partial`:
    es.value_and_grad(loss_fn, argnums=1)(x, model)     # two models: argnums=(0, 1)"""

_IN_EVAL_MODE: Final = """

If nothing should change, call it in eval mode: `model.eval()(x)`."""
