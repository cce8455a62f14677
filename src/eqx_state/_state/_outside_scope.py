"""Errors for a write to a module that no scope owns: where did it come from?

The error is made in two steps. At the write only the module is known: its mode, and
what its fields are. On its way out the error passes the call that opened a scope, which
knows the function and its arguments; `explain` looks for the module there, and replaces
the message by one with the user's own names.
"""

import dataclasses
import functools as ft
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx

from .._kinds._fields import declarations
from .._kinds._kinds import kind_name, Parameter, State
from .._kinds._spec import NOTHING
from .._tree._base import BaseModule, fields_of, FLAGS, is_eqx_module
from .._tree._context import ROOT
from .._tree._walk import is_array, modules_in


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
