"""Writing in a scope: `self.field = value`.

A write is checked when it happens, so that the traceback of an error leads to the line
that wrote. The checks at the end (`_collect.py`) are for what no `__setattr__` sees.
"""

import dataclasses
import functools as ft
import inspect
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._errors import TraceError
from .._kinds.fields import declarations
from .._kinds.kinds import kind_name, NOTHING, Parameter, State
from .._tree.base import (
    BaseModule,
    declared_fields,
    fields_of,
    FLAGS,
    get_place,
    is_eqx_module,
    is_module,
)
from .._tree.compare import same
from .._tree.context import Context, ROOT
from .._tree.dtypes import NUMBERS, strengthen_field, to_strong
from .._tree.keys import is_key
from .._tree.walk import is_array, leaves, modules_in, name_of, Visit, walk
from .._typing import KeyPath
from .scope import own, Place, Scope


# --- Errors for a write that the scope of the module does not allow.
#
# Errors for a module that no scope owns are in `_outside_scope.py`.


CLOSED: Final = """Cannot write `{}`: the scope of `es.mutable` that owned this module \
has closed, and has returned the new model. A module kept from inside (in a closure, a \
generator, a thread) is only a snapshot. Write while the call runs, or call again: \
`y, model = es.mutable(model)(x)`."""

STATIC: Final = """Cannot write `{}`: a static field is part of the structure of the \
tree, which a call cannot change. Declare it `es.State` if it is an array; modes are \
switched from outside: `model = model.eval()`."""

_TRACE: Final = """Cannot {0} {1} here: this code runs inside a JAX transform, and the \
mutable scope was opened outside of it. The values computed here are tracers, which \
would leak. Use the transform of `es`, which carries state through and is called like \
its namesake in JAX:

    jax.vmap(lambda x: self.layer(x))(xs)    # wrong
    es.vmap(lambda x: self.layer(x))(xs)     # right

Likewise `es.scan`, `es.while_loop`, `es.fori_loop`, `es.cond`, `es.switch`, \
`es.checkpoint`, `es.jit`, `es.vjp`, `es.jvp`, `es.linearize`, `es.jacfwd`, \
`es.jacrev`, `es.hessian`; for `jax.grad` it is `es.value_and_grad`, with the model as \
its argument. Or call `es.mutable` inside the transform, and return the new model from \
it."""

_NO_FIELD: Final = """Cannot write `{0}.{1}`: `{0}` has no field `{1}`. Declare it in \
the class body, `{1}: {2}`{3}. {4}"""

_NO_KIND: Final = """Cannot write `{0}`: `{1}` is {2}, and this scope writes {3}. \
Declare what a forward pass changes: `{4}: es.State`."""

_NOT_THERE: Final = """Cannot write `{0}`: `{1}` is a `{2}` that is not there yet, and \
a call keeps the structure of the model. Layers that take their shapes from an input \
make their arrays in `init`, which returns a new model:

    model = model.init(42, x)"""

_OTHER_KIND: Final = """Cannot write `{0}`: `{1}` is a `{2}`, and this scope writes \
{3}. If it is meant, name the kind: `es.mutable(f, kinds={4})`, or `kinds=es.TreePart` \
for all. If it is not a `{2}`, declare what it is: `{5}: es.State`."""


def frozen(message: str) -> dataclasses.FrozenInstanceError:
    """The error that Python raises for a write to a frozen dataclass."""
    return dataclasses.FrozenInstanceError(message)


def trace_message(name: str, where: str = "", verb: str = "write") -> str:
    """The error for state that is written in a trace that it cannot leave."""
    return _TRACE.format(verb, f"`{where}` (`{name}`)" if where else f"`{name}`")


def kind_at(visit: Visit) -> type | None:
    """The kind of the array here, or the declared one if there is something else."""
    return visit.kind if is_array(visit.node) else visit.context.declared


def kind_message(visit: Visit, where: str, scope: Scope, old: Any) -> str:
    """The error for an array of a kind that the scope does not write."""
    kind, name, field = kind_at(visit), visit.name, visit.context.field
    allowed = " and ".join(f"`{k.__name__}`" for k in scope.kinds)
    if kind is None:
        what = "an array without a kind" if is_array(visit.node) else "not an array"
        return _NO_KIND.format(where, name, what, allowed, field)
    if old is None:
        return _NOT_THERE.format(where, name, kind.__name__)
    return _OTHER_KIND.format(
        where, name, kind.__name__, allowed, kind_name(kind), field
    )


def no_field_message(module: BaseModule, name: str, value: Any) -> str:
    """The error for a field that is assigned and that the class does not declare."""
    place = get_place(module)
    is_forward = place is not None and not place.scope.is_initializing
    constant = ""
    if type(value) in NUMBERS and not is_forward:
        constant = f" (or, for a constant, `{name}: {type(value).__name__}`)"
    return _NO_FIELD.format(
        type(module).__qualname__,
        name,
        _annotation_for(value, is_forward),
        constant,
        declared_fields(module),
    )


def _annotation_for(value: Any, is_forward: bool) -> str:
    """How to declare a field that will hold `value`.

    `is_forward`: a forward pass assigns it, so it is state. Elsewhere training is the
    usual reason to hold an inexact array.
    """
    visits = walk(value)
    if not all(visit.is_leaf for visit in visits):
        return _class_name(type(value))  # a module, or a container of modules
    held = [visit.node for visit in visits]
    if held and all(map(is_key, held)):
        return "es.Rng"
    is_inexact = [is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact) for x in held]
    if held and all(is_inexact) and not is_forward:
        return "es.Parameter"
    if isinstance(value, str):
        return "str"
    return "Callable" if callable(value) else "es.State"


def _class_name(cls: type) -> str:
    """A class as users write it: `eqx.nn.Linear`, `es.nn.BatchNorm`, `dict`."""
    library, _, _ = cls.__module__.partition("._")
    aliases = {"equinox": "eqx.", "eqx_state": "es."}
    first, dot, rest = library.partition(".")
    prefix = f"{aliases[first]}{rest}{dot}" if first in aliases else ""
    return prefix + cls.__name__


# --- Errors for a write to a module that no scope owns: where did it come from?
#
# The error is made in two steps. At the write only the module is known: its mode, and
# what its fields are. On its way out the error passes the call that opened a scope,
# which knows the function and its arguments; `explain` looks for the module there,
# and replaces the message by one with the user's own names.


_FLAG = """\
Cannot write `{cls}.{name}`: it is a flag, which is part of the structure of the tree, \
and modules are frozen. Make a new model, in which all modules are switched:

    model.{name} = {value}     # wrong
    model = model.{method}()     # right
"""

_NO_SCOPE = """\
Cannot write `{cls}.{name}`: modules are frozen, and this one is in no scope of \
`es.mutable`. """

_CALLED = """State is written in a call that returns the new model:

    y = model(x)                        # wrong
    y, model = es.mutable(model)(x)     # right
"""

_OR_EVAL = """\
    y = model.eval()(x)                 # or: layers write nothing then
"""

# For a callback, or a transform around the whole function, nothing calls `explain`.
_OR_COPY = """
Under a transform, use the one of `es`, which carries state: `es.value_and_grad` for \
`eqx.filter_value_and_grad`, `es.mutable(es.vmap(model))(xs)` for `jax.vmap(model)(xs)`.
If a scope is open around a callback, or around a transform of JAX or Equinox, the \
module does not belong to it, or it is a copy made inside the scope: `jax.jit` and \
`eqx.filter_jit` call copies, and `es.jit` does not.
"""

_NOT_STATE = """The field is {what}: it is not written but replaced, in a copy:

    model.{name} = value                                     # wrong
    model = model.replace({name}=value)                      # right
    model = eqx.tree_at(lambda m: m.{name}, model, value)    # deep inside

If a forward pass changes it, declare it, `{name}: es.State`, and open a scope for the \
call: `y, model = es.mutable(model)(x)`.
"""

_ORIGINAL = """It is the model that `{what}` was given: the call runs on a private \
copy of that, and `{f}` has the original from outside. Use the argument:

    {what}(lambda m: model(x))(model)     # wrong
    {what}(lambda m: m(x))(model)     # right
"""

_ARGUMENT = """It is in {where} of `{f}`, and `{what}` threads {threaded}:

    {what}({f})(...)     # wrong
    {what}({f}, argnums={argnums})(...)     # right
"""

_BY_NAME = """It is in the argument `{key}` of `{f}`, and `{what}` threads positional \
arguments. Give it by position, and name all that are threaded:

    {what}({f})(model, {key}={key})     # wrong
    {what}({f}, argnums=(0, 1))(model, {key})     # right
"""

_CARRIED = """It is the object that `{f}` is called on, and `argnums=` names other \
arguments. Either the object or the arguments are threaded. To thread both, make the \
object an argument, too:

    {what}(lambda model, other: ..., argnums=(0, 1))(model, other)
"""

_BESIDE = """It is in {where}, and `{what}` threads {threaded}. To thread both, make \
both arguments:

    {what}({f})(...)     # wrong
    {what}(lambda model, other: ..., argnums=(0, 1))(model, other)     # right
"""

_CLOSURE = """`{f}` has it from outside, as `{key}`, and `{what}` threads \
{threaded}. Make it an argument, and name all that are threaded:

    {what}(lambda m: {key}(m(x)))(model)     # wrong
    {what}(lambda m, {key}: {key}(m(x)), argnums=(0, 1))(model, {key})     # right
"""

_COPY = """Either it is in none of the arguments that are threaded (make it one, and \
name it by `argnums=`), or it is a copy made inside the scope, from which nothing \
would come back: `train`, `es.map`, `jax.tree.map` and the transforms of JAX and \
Equinox make copies. So does `eqx.nn.Shared` of a module around a tied node: keep the \
state in the modules inside. Use the transform of `es`, and switch modes outside:

    eqx.filter_vmap(self.layer)(x)      # wrong; so is jax.vmap(model)(xs)
    es.vmap(self.layer)(x)              # right
"""

_ONLY_READ = """
If this call should not write to it, pass it in eval mode: `teacher.eval()`.
"""

_IN_EVAL = """
It is in eval mode, and writes all the same. Guard what only training changes:

    if self.training:
        self.{name} = ...
"""

_IN_EITHER_MODE = """
A `{cls}` writes in train and in eval mode alike: `eval` makes no difference.
"""


@dataclasses.dataclass
class Unowned:
    """The module and the field of a write for which there was no scope."""

    module: BaseModule
    name: str


@dataclasses.dataclass
class ModelCall:
    """A call `f(*args, **kwargs)` that threads a model, as errors describe it.

    - `positions`: which arguments are threaded; `None` for the object that `f` carries.
    - `carried`: the object that `f` carries, if any, such as that of a bound method.
    - `run`: the call as a function of the model.
    """

    what: str
    f: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: list[int] | None
    carried: Any
    model: Any
    run: Callable[[Any], Any]


def frozen_error(
    module: BaseModule, name: str, value: Any
) -> dataclasses.FrozenInstanceError:
    """The error for a write to a module that no scope owns."""
    cls = type(module).__qualname__
    if name in FLAGS:
        off, on = ("eval", "train") if name == "training" else ("unfreeze", "freeze")
        is_on = not eqx.is_array(value) and bool(value)
        text = _FLAG.format(
            cls=cls, name=name, value=is_on, method=on if is_on else off
        )
        return dataclasses.FrozenInstanceError(text.strip())
    text = _NO_SCOPE.format(cls=cls, name=name)
    if (what := _other_than_state(module, name)) is not None:
        text += _NOT_STATE.format(what=what, name=name)
    else:
        mode = _of_mode(module, name)
        text += _CALLED + (mode or _OR_EVAL) + _OR_COPY
    return dataclasses.FrozenInstanceError(text.strip(), obj=Unowned(module, name))


def explain(
    error: dataclasses.FrozenInstanceError, call: ModelCall | None = None
) -> None:
    """Add to the error where the call, which has a scope, got the module from."""
    if not isinstance(error.obj, Unowned):
        return
    module, name = error.obj.module, error.obj.name
    text = _NO_SCOPE.format(cls=type(module).__qualname__, name=name)
    text += (call and _cause(module, call)) or _COPY
    text += _of_mode(module, name)
    error.args = (text.strip(),)
    error.obj = None  # an outer call knows less, and must not replace the message


def _cause(module: BaseModule, call: ModelCall) -> str | None:
    """Where the call got the module from, if that can be found out."""
    name = getattr(call.f, "__name__", "f")
    words = {"what": call.what, "f": name}
    if _is_in(module, call.model):
        return _ORIGINAL.format(**words)
    if _is_in(module, call.carried):
        return _CARRIED.format(**words)
    places: list[tuple[str, Any, str, Any]] = [
        *(("argument {}", i, _ARGUMENT, x) for i, x in enumerate(call.args)),
        *(("the argument `{}`", k, _BY_NAME, x) for k, x in call.kwargs.items()),
        *(
            ("a variable from outside, `{}`", k, _CLOSURE, x)
            for k, x in _outside(call.f)
        ),
    ]
    for where, key, template, value in places:
        if not _is_in(module, value):
            continue
        argnums: Any = key
        if call.positions is None:
            template, threaded = _BESIDE, f"the object that `{name}` is called on"
        else:
            threaded = "only " + " and ".join(f"argument {n}" for n in call.positions)
            if any(modules_in(call.model)) and template is _ARGUMENT:
                argnums = tuple(sorted({*call.positions, key}))
        text = template.format(
            where=where.format(key),
            key=key,
            threaded=threaded,
            argnums=argnums,
            **words,
        )
        return text if _of_mode(module, "") else text + _ONLY_READ
    return None


def _is_in(module: BaseModule, tree: Any) -> bool:
    try:
        return any(visit.node is module for visit in modules_in(tree))
    except Exception:
        return False  # a closure may hold anything, also objects that cannot be walked


def _outside(f: Any) -> list[tuple[str, Any]]:
    """The globals and closure variables of a function, by name."""
    while isinstance(f, (ft.partial, eqx.Partial)) or hasattr(f, "__wrapped__"):
        f = f.__wrapped__ if hasattr(f, "__wrapped__") else f.func
    try:
        held = inspect.getclosurevars(f)
    except (TypeError, ValueError):  # not a function; a variable not assigned yet
        return []
    return [*held.nonlocals.items(), *held.globals.items()]


def _of_mode(module: BaseModule, name: str) -> str:
    """The sentence about the mode of a module that was written; empty in train mode."""
    if module._eqx_state_writes_in_eval:
        return _IN_EITHER_MODE.format(cls=type(module).__qualname__)
    return "" if module.training else _IN_EVAL.format(name=name)


def _other_than_state(module: BaseModule, name: str) -> str | None:
    """Describe a field that cannot be state; `None` if it may be."""
    spec = declarations(type(module)).get(name, NOTHING)
    if spec.kind is not None:
        if issubclass(spec.kind, State):
            return None
        return f"declared `{kind_name(spec.kind)}`"
    value = fields_of(module).get(name)
    if is_eqx_module(value):
        return "a module of its own"
    is_unknown = spec.unresolved or not is_array(value)
    if not is_unknown and ROOT.kind_of(value) is Parameter:
        return "an array without a declaration, which counts as an `es.Parameter`"
    return None


def write(module: BaseModule, place: Place, name: str, value: Any) -> None:
    """`module.name = value` inside a scope."""
    with place.scope.alone(transform=False):
        _write(module, place, name, value)


def _write(module: BaseModule, place: Place, name: str, value: Any) -> None:
    scope, cls = place.scope, type(module)
    where = f"{cls.__qualname__}.{name}"
    key = jtu.GetAttrKey(name)
    path = (*place.path, key)
    full_name = name_of(path)
    if not scope.is_open:
        raise frozen(CLOSED.format(where))
    if not scope.is_here:
        raise TraceError(trace_message(full_name, where))
    context = place.context.enter(module, key)
    field = next((f for f in dataclasses.fields(module) if f.name == name), None)
    if field is None:
        drawn = scope.accept(None, value, path, context)
        raise frozen(no_field_message(module, name, drawn))
    if field.metadata.get("static", False) and not scope.allows(None):
        raise frozen(STATIC.format(where))
    old = fields_of(module).get(name)
    value = scope.accept(old, value, path, context)
    if is_array(old) and is_array(value):
        # Most writes take this path: an array has no modules to adopt, and no leaves to
        # compare.
        new = to_strong(value)
        _check_kind(old, Visit(path, new, context, True), scope, where)
    else:
        value = strengthen_field(cls, name, value)
        _check_kinds(old, value, path, context, scope, where)
        new = _adopt(value, scope)
        # These modules are replaced on purpose. Otherwise the end of the scope would
        # complain that what was written to them is lost.
        for visit in modules_in(old):
            scope.written.pop(id(visit.node), None)
        own(new, scope, path, context)
    object.__setattr__(module, name, new)
    scope.written[id(module)] = module, full_name


def _belongs_to(x: Any, scope: Scope) -> bool:
    place = get_place(x) if is_module(x) else None
    return place is not None and place.scope is scope


def _adopt(value: Any, scope: Scope) -> Any:
    """`value`, with copies of the modules that `scope` does not own already."""
    if all(v.is_leaf for v in walk(value)):
        return value
    return jtu.tree_map(lambda x: x, value, is_leaf=lambda x: _belongs_to(x, scope))


def _check_kinds(
    old: Any, new: Any, path: KeyPath, context: Context, scope: Scope, where: str
) -> None:
    """Raise if a leaf differs whose kind the scope does not allow.

    A module that the scope already owns may move. Whether it then is in the model twice
    is checked when the scope ends.
    """
    before = {v.path: v.node for v in leaves(old, path, context)}
    for visit in leaves(new, path, context, lambda x: _belongs_to(x, scope)):
        if not is_module(visit.node):
            _check_kind(before.get(visit.path), visit, scope, where)


def _check_kind(old: Any, visit: Visit, scope: Scope, where: str) -> None:
    if not same(old, visit.node) and not scope.allows(kind_at(visit)):
        raise frozen(kind_message(visit, where, scope, old))
