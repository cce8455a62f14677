"""The errors and the warning that a caller might catch; others have built-in types."""

import difflib
import sys
from typing import Any, Final

import equinox as eqx

from ._typing import PyTree


class TraceError(RuntimeError):
    """State was written inside a JAX transform that cannot return it.

    `jax.vmap`, `jax.lax.scan`, `jax.grad`, … replace arrays by tracers, which are
    invalid once the transform has returned. The `es` transform of the same name returns
    the new state.
    """


class NotInitializedError(RuntimeError):
    """A model contains an `es.Initializer`, or a `module_init` that has not run."""


class LostStateWarning(UserWarning):
    """`es.Optimizer.update` was given the model from before a call that wrote state.

    Usually the new model was not unpacked: `loss, grads = es.value_and_grad(f)(model)`
    instead of `(loss, model), grads = …`. To drop the state on purpose, pass only the
    parameters to `update`: `model.filter(es.Parameter)`.
    """


# --- Names and pytrees in messages: no values, no whole models.


def show(tree: PyTree) -> str:
    """A pytree in a message: arrays as dtype and shape, on as few lines as possible."""
    return eqx.tree_pformat(tree, short_arrays=True)


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for a name that `eqx_state` or `eqx_state.nn` does not have."""
    places = _places()
    known = {x: f"{k}.{x}" for k in places for x in dir(places[k]) if x[0] != "_"}
    known |= {"Param": "es.Parameter", "Rngs": "es.RngStream", "remat": "es.checkpoint"}
    near = difflib.get_close_matches(name, known, 1, 0.75)
    hint = f": did you mean `{known[near[0]]}`?" if near else ""
    hint = _HINTS.get(name, hint) if module == __package__ else hint
    # Do not pass `obj`: with it, Python would add its own suggestion.
    said = f"module {module!r} has no attribute {name!r}{hint}"
    return AttributeError(said, name=name)


_HINTS: Final = {
    "hold": ": it is gone. Write the step with `es.jit`. To call small steps faster,"
    " put several into one call: `es.scan` inside one `es.jit`.",
    "lax": ": its transforms are in `es` itself: `es.scan`, `es.cond`, …",
}


def public_name(cls: type) -> str:
    """The name of a class as users write it: `eqx.nn.Linear`, or else the bare name."""
    name = cls.__qualname__
    found = [k for k, x in _places().items() if getattr(x, name, None) is cls]
    return f"{found[0]}.{name}" if found else name


def _places() -> dict[str, Any]:
    own = sys.modules[__package__]
    return {"eqx": eqx, "eqx.nn": eqx.nn, "es.nn": own.nn, "es": own}


def an(name: str) -> str:
    """An article and a name in backticks: "an `Rng`"."""
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} `{name}`"
