"""`es.capture`: a model's output together with sown values and outputs of layers."""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, overload, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._errors import show, TraceError
from .._kinds.kinds import State
from .._state.observe import can_be_observed, Observer, OBSERVING, ProgramKey, untagged
from .._state.scope import as_kinds, Kinds, Scope, Sown
from .._state.sow import keep, Key
from .._transforms.grad import Gradient
from .._transforms.mutable import run_on_copy
from .._transforms.target import Argnums, as_argnums, target
from .._transforms.transform import Transform, without_partials, wrap
from .._tree.base import is_eqx_module
from .._tree.combinators import compiled_glob
from .._tree.dtypes import fit_leaf, NUMBERS, same_type
from .._tree.modules import modules
from .._typing import P, PyTree, R


class Outputs(Observer):
    """Records the outputs that `which` selects, and replaces those in `replace`."""

    def __init__(self, which: Any, replace: Mapping[str, Any]):
        self.selects = selector(which)
        self.which, self.replace = which, replace
        self.replaced: set[str] = set()
        depth = sum(isinstance(x.observer, Outputs) for x in OBSERVING.get().values())
        # Replaced outputs are constants in the compiled function, so never share it.
        self.key = ProgramKey(("es.capture", depth, object() if replace else which))

    def select(self, name: str, module: Any) -> tuple[str, bool] | None:
        shows = self.selects(name, module)
        return (name, shows) if shows or name in self.replace else None

    def called(self, scope: Any, tag: Any, call: Any, /, *args: Any, **kw: Any) -> Any:
        name, shows = tag
        out = call(*args, **kw)
        if name in self.replace:
            out = _replaced(name, self.replace[name], out, scope.layers)
            self.replaced.add(name)
        if shows:
            keep(scope, Key(name, is_output=True), out)
        return out

    def check(self, model: PyTree) -> None:
        if self.which is None and not self.replace:
            return  # a module that sows needs no `__call__`
        names = callable_names(model, "es.capture")
        unknown = [name for name in self.replace if name not in names]
        if isinstance(self.which, str):
            unknown += [] if any(self.selects(x, None) for x in names) else [self.which]
        for name in unknown:
            known = ", ".join(f'`"{x}"`' for x in names)
            raise ValueError(_UNKNOWN.format(name, known))

    def check_replaced(self) -> None:
        """Raise `ValueError` after the call if a key of `replace` had no effect."""
        # This is reliable: with `replace`, each call has a new `key`, so JAX traces it.
        for name in self.replace:
            if name not in self.replaced:
                raise ValueError(_NEVER_CALLED.format(name, name or "the model"))


def callable_names(model: PyTree, what: str) -> list[str]:
    """The names of the modules whose calls can be observed.

    `ValueError` if the model contains no such module.
    """
    names = [name for name, x in modules(model) if can_be_observed(x)]
    if jtu.tree_leaves(model) and not names:
        raise ValueError(_NO_MODULE.format(what, show(model)))
    return names


def check_missed(key: ProgramKey, sown: Sown) -> None:
    """Warn about missed calls; raise `TraceError` if all calls were missed.

    Call it directly from `__call__` of a transform, so that the warning names the line
    of the user's call.
    """
    if key.missed:
        names = ", ".join(f"`{name or 'the model'}`" for name in key.missed)
        message = _MISSED.format(key.parts[0], names)
        if not any(key.is_output for key in sown):
            raise TraceError(message)
        warnings.warn(message, stacklevel=4)


def selector(which: Any) -> Callable[[str, Any], bool]:
    """A predicate of `(name, module)`: whether `outputs=which` selects the module."""
    if which is None:
        return lambda name, module: False
    if isinstance(which, str):
        pattern = compiled_glob(which)
        return lambda name, module: pattern.fullmatch(name) is not None
    classes = which if isinstance(which, tuple) else (which,)
    if all(isinstance(cls, type) for cls in classes):
        return lambda name, module: isinstance(module, classes)
    if callable(which) and not is_eqx_module(which):
        return lambda name, module: bool(which(name, module))
    raise TypeError(_NO_SELECTION.format(show(which)))


def _replaced(name: str, new: Any, out: Any, layers: Any) -> Any:
    """The output that replaces `out`; `layers` is that of the scope."""
    if callable(new):
        return new(out)
    what = f"the output of `{name or 'the model'}`"
    for value in (new, *_of_layer(new, layers)):
        with contextlib.suppress(ValueError):  # from `tree_map` or `_as_output`
            return jtu.tree_map(lambda old, x: _as_output(x, old, what), out, value)
    raise ValueError(_OTHER_OUTPUT.format(what, show(out), show(new)))


def _of_layer(new: Any, layers: Any) -> list[Any]:
    """A value without the axes of the stacks around a call; empty if it has none."""
    leaves, structure = jtu.tree_flatten(new)
    sizes = tuple(count for _, count in layers)
    if not sizes or any(jnp.shape(x)[: len(sizes)] != sizes for x in leaves):
        return []
    index = tuple(number for number, _ in layers)
    return [structure.unflatten(jnp.asarray(x)[index] for x in leaves)]


def _as_output(new: Any, old: Any, what: str) -> Any:
    """`new` as an array like `old`. Numbers are broadcast, and have its dtype."""
    is_number = type(new) in NUMBERS
    new = fit_leaf(old, new, what)
    new = jnp.broadcast_to(new, jnp.shape(old)) if is_number else new
    if not same_type(old, new):
        raise ValueError
    return new


_NO_MODULE: Final = """`{0}` looks into the model, which is the first argument. Here \
that is `{1}`, which contains no module that can be called. Pass the model itself: a \
function that closes over it hides it, and so does a JAX transform. Write \
`{0}(es.vmap(model))(xs)`."""

_MISSED: Final = """`{0}` did not see what {1} returned inside a JAX transform such as \
`jax.lax.scan` or `eqx.filter_jit`, because values can leave a transform only as its \
results. Call `{0}(...)(x)` in `with jax.disable_jit():`, where loops, branches and \
jit run as Python; in your own code use the transforms of `es`, such as `es.scan` and \
`es.jit`. Only these help inside `jax.checkpoint` and `jax.grad`."""

_UNKNOWN: Final = """`es.capture`: `"{}"` matches no module that can be called. The \
names are {}."""

_NEVER_CALLED: Final = """`es.capture(..., replace={{"{0}": ...}})`: `{1}` was never \
called, so it has no output to replace. Only calls of `__call__` count, not the use of \
its arrays or of other methods."""

_NO_SELECTION: Final = """`es.capture(..., outputs={})`: `outputs` must be a module \
class or a tuple of them, a glob for names, or a function of `(name, module)`."""

_OTHER_OUTPUT: Final = """`es.capture(..., replace=...)`: {} is `{}`. A value that \
replaces it must have the same structure, shapes and dtypes, but this is `{}`. Pass a \
function of the output instead, which may return anything."""


_M = TypeVar("_M", bound=eqx.Module)
_M_co = TypeVar("_M_co", covariant=True)
_F_co = TypeVar("_F_co", covariant=True)


class _Capture(Transform):
    replace: Any
    outputs: Any = eqx.field(static=True)
    kinds: Kinds = eqx.field(static=True)
    argnums: Argnums = eqx.field(static=True)
    returns_model = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observer = Outputs(self.outputs, self.replace)
        reports = ((observer.key, (), ()),)
        f, bound, options = without_partials(self.f)
        if isinstance(f, Gradient):

            def observed(kinds: Kinds, *, codecs: Any, **_: Any) -> Scope:
                both = tuple(dict.fromkeys((*self.kinds, *kinds)))
                return Scope(both, observer, reports, codecs)

            result, sown = f.run((*bound, *args), {**options, **kwargs}, observed)
        else:
            model, call = target(self.f, args, kwargs, self.argnums, "es.capture")
            scope = Scope(self.kinds, observer, reports)
            result = run_on_copy(model, scope, call)
            sown = scope.sown
        observer.check_replaced()
        check_missed(observer.key, sown)
        found = _by_name(sown).items()
        return result, {name: untagged(x, observer.key) for name, x in found}


def _by_name(sown: Sown) -> dict[str, Any]:
    """The values by name; a tuple if one name has several values."""
    found: dict[str, Any] = {}
    for key, values in sown.items():
        if key.name in found:
            raise ValueError(_BOTH.format(key.name))
        found[key.name] = values[0] if len(values) == 1 else tuple(values)
    return found


def _check_sees_the_model(f: Any, argnums: Argnums) -> None:
    """Raise `TypeError` if `f` would run on a copy, whose sown values are lost."""
    f = without_partials(f)[0]
    if isinstance(f, Gradient):
        if argnums is not None:
            raise TypeError(_ARGNUMS_OF_GRAD.format(f.name, argnums))
        return
    while isinstance(f, Transform):
        if f.returns_model:
            raise TypeError(_WRITABLE_ALREADY)
        f = without_partials(f.f)[0]


_BOTH: Final = """`es.capture(..., outputs=...)`: `{}` is a module whose output was \
captured, and a value was sown under the same name. Sow it under a different name."""

_WRITABLE_ALREADY: Final = """`es.capture` makes the model writable itself, as \
`es.mutable` does, but was given a transform that does so on its own copy. Values sown \
in that copy would be lost. Write `es.capture(model)(x)`, or \
`es.jit(es.capture(es.value_and_grad(loss)))(model, x)`."""

_ARGNUMS_OF_GRAD: Final = """Pass `argnums=` to the gradient, not to `es.capture`: \
`es.capture({0}(loss, argnums={1}))`."""


class _Captured(Generic[_M_co, _F_co]):
    """The type of `capture(model)`, for type checkers, like that of `mutable`."""

    def __call__(
        self: "_Captured[_M_co, Callable[P, R]]", *args: P.args, **kwargs: P.kwargs
    ) -> tuple[tuple[R, _M_co], dict[str, Any]]: ...


@overload
def capture(
    f: _M,
    *,
    outputs: Any = None,
    replace: Mapping[str, Any] | None = None,
    kinds: Any = State,
    argnums: None = None,
) -> _Captured[_M, _M]: ...
@overload
def capture(
    f: Callable[P, R],
    *,
    outputs: Any = None,
    replace: Mapping[str, Any] | None = None,
    kinds: Any = State,
    argnums: int | tuple[int, ...] | None = None,
) -> Callable[P, tuple[tuple[R, Any], dict[str, Any]]]: ...
def capture(
    f: Any,
    *,
    outputs: Any = None,
    replace: Mapping[str, Any] | None = None,
    kinds: Any = State,
    argnums: int | tuple[int, ...] | None = None,
) -> Any:
    """`es.mutable(f)` that also returns values from inside: those that modules sow, and
    the outputs of modules that you select.

    A layer calls `self.sow("attention", weights)`. Outside `es.capture` this does
    nothing and costs nothing, so it can stay in the code. To capture the output of a
    layer, select it, without a change to the layer: `outputs=eqx.nn.Linear`.

    **Arguments:**

    - `f`, `kinds`, `argnums`: as for [`es.mutable`][eqx_state.mutable]; `f` may also be
        an `es.value_and_grad` or an `es.grad`.
    - `outputs`: selects the modules whose outputs to capture. A module class or a tuple
        of them; a glob for names, such as `"layers[*].attention"`, in which `*` matches
        any characters and `?` one; or a function of `(name, module)` that returns a
        bool. The name of the root is `""`. A class that matches no module is not an
        error. Every call of the module itself counts, but not calls of its other
        methods.
    - `replace`: a mapping from names of modules to replacements for their outputs: a
        value, or a function of the output. A value must have the structure, shapes and
        dtypes of the output (under a transform, of the output of one lane or step); a
        number is broadcast. In an `es.nn.Stacked`, a value with the axis of the layers
        in front, as `found` has it, replaces the output of each layer by its own entry.
        The module itself still runs.

    **Returns:**

    A function of the same arguments that returns `((output, new_model), found)`; for
    `es.value_and_grad(loss)`, `(((loss, new_model), grads), found)`. `found` is a
    dictionary. An output has the name of its module, `"layers[0]"`; a sown value has
    its own name added, `"layers[0].attention"`. Several values under one name are a
    tuple. Under `es.vmap`, `es.scan` and plain `jax.vmap` the values of all lanes or
    steps are stacked along a new first axis. `es.jit`, `es.checkpoint` and an inner
    `es.value_and_grad` return them unchanged. Values cannot leave `jax.lax.scan`,
    `eqx.filter_jit` and most other transforms: if a model uses one, call the function
    in `with jax.disable_jit():`, where loops, branches and jit run as Python. With
    `replace`, `found` contains the replacement.

    A copy that is created inside the call (`self.layer.eval()`,
    `eqx.filter_vmap(self.layer)`, an inner `es.mutable`) does not sow, but its outputs
    are captured.

    During the call, each selected module is an instance of a generated subclass, which
    stores the module's name as static data. The functions of `es` and `es.Optimizer`
    accept such a tree together with an ordinary one. `jax.tree.map`, and therefore
    plain optax, does not, and cannot stack two selected layers.

    **Raises:**

    - `ValueError`: a value was found in a step of `es.while_loop` or `es.fori_loop`, or
        only in some branches of `es.cond` or `es.switch`; `replace` names a module that
        does not exist or was not called, or has a value that does not fit; `outputs` is
        a glob that matches no module; or an output and a sown value have the same name.
    - `es.TraceError`: a value was sown inside a plain JAX transform; or all calls of
        the selected modules were inside a JAX transform other than `jax.vmap`. If only
        some of the calls were, a `UserWarning` names their modules, and `found`
        contains the outputs of the other calls.
    - `TypeError`: a value is not a pytree of arrays; or `f` is already an `es.mutable`,
        or a gradient inside a transform. Otherwise as `es.mutable`.

    The design follows `sow` and `capture_intermediates` of Flax Linen, and PyTorch's
    hooks.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp


        class Layer(es.Module):
            scale: es.Parameter

            def __call__(self, x):
                x = self.scale * x
                self.sow("mean", jnp.mean(x))
                return x


        class Net(es.Module):
            layers: list[Layer]

            def __call__(self, x):
                for layer in self.layers:
                    x = layer(x)
                return x


        net = Net([Layer(2.0), Layer(3.0)])
        xs = jnp.array([[1.0, 3.0], [5.0, 7.0]])
        (ys, net), sown = es.capture(es.vmap(net))(xs)
        assert list(sown) == ["layers[0].mean", "layers[1].mean"]
        assert sown["layers[0].mean"].tolist() == [4.0, 12.0]

        _, found = es.capture(es.vmap(net), outputs="layers[?]")(xs)
        assert found["layers[1]"].tolist() == [[6.0, 18.0], [30.0, 42.0]]

        patch = {"layers[0]": jnp.zeros_like}
        (ys, _), found = es.capture(es.vmap(net), outputs=Net, replace=patch)(xs)
        assert (found[""] == 0).all() and (ys == 0).all()
        ```
    """
    argnums = as_argnums(argnums, "es.capture")
    _check_sees_the_model(f, argnums)
    selector(outputs)  # for its error
    return wrap(
        _Capture,
        f,
        replace=dict(replace or {}),
        outputs=outputs,
        kinds=as_kinds(kinds, "es.capture"),
        argnums=argnums,
    )
