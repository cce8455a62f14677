"""Every place where a JAX or Python version, or a private name of JAX, matters."""

import contextlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final, TYPE_CHECKING

import equinox as eqx
import jax
import jax.core
from jax._src.traceback_util import api_boundary, register_exclusion
from jax.extend.core import Jaxpr as Jaxpr


try:
    from jax.extend.core import get_opaque_trace_state as _get_trace_state
except ImportError:  # pragma: no cover (JAX < 0.10)
    from jax.core import (  # pyright: ignore[reportAttributeAccessIssue]
        get_opaque_trace_state as _get_trace_state,
    )


def trace_state() -> Any:
    """Which trace is active now: equal (`==`) values mean the same trace."""
    return _get_trace_state(convention="eqx_state")


with jax.ensure_compile_time_eval():
    _NO_TRACE: Final = trace_state()


def is_in_trace() -> bool:
    """Whether this code runs inside a transform of JAX."""
    return trace_state() != _NO_TRACE


def has_escaped(leaf: Any) -> bool:
    """Whether `leaf` is a tracer of a trace that is not open here any more.

    A tracer may be used where it was made and in every trace inside; so it is looked
    for in the chain from the active trace outwards.
    """
    if not isinstance(leaf, jax.core.Tracer):
        return False
    trace = trace_state()._trace_ref()
    while trace is not None:
        if trace is leaf._trace:
            return False
        trace = getattr(trace, "parent_trace", None)
    return True


def is_mapped(leaf: Any) -> bool:
    """Inside `jax.vmap`: whether the lanes have different values for `leaf`."""
    if not isinstance(leaf, jax.core.Tracer):
        return False
    is_of_this_vmap = leaf._trace is trace_state()._trace_ref()
    return is_of_this_vmap and getattr(leaf, "batch_dim", None) is not None


def spread_like(mapped: list[tuple[Any, int]], x: Any, x_axis: int) -> Any:
    """`x`, spread over devices along an axis as these arrays are along theirs.

    `jax.vmap` wants what it maps over spread alike where types have shardings (a mesh
    with `AxisType.Explicit`, as `jax.make_mesh` makes). Elsewhere `x` as it is.
    """
    for value, axis in mapped:
        sharding = jax.typeof(value).sharding
        if (names := sharding.spec[axis]) is not None:
            spec = jax.sharding.PartitionSpec(*[None] * x_axis, names)
            like = jax.sharding.NamedSharding(sharding.mesh, spec)
            return jax.sharding.reshard(x, like)
    return x


def own_annotations(cls: type) -> dict[str, Any]:
    """The annotations written in the body of `cls`, unresolved names and all."""
    try:
        return inspect.get_annotations(cls)
    except NameError:  # pragma: no cover (Python >= 3.14 evaluates lazily)
        import annotationlib  # pyright: ignore[reportMissingImports]

        return annotationlib.get_annotations(
            cls, format=annotationlib.Format.FORWARDREF
        )


class _Probe(eqx.Module):
    pass


_probe = _Probe()
object.__setattr__(_probe, "cached", None)
# What Equinox puts into a copy of a module that has more in its `__dict__` than fields,
# as `functools.cached_property` leaves it: under `__name__` and such.
MISSING: Final = vars(jax.tree.map(lambda x: x, _probe)).get("__name__", object())


if TYPE_CHECKING:
    from equinox._module._module import (
        _ModuleMeta as EquinoxMeta,  # pyright: ignore[reportPrivateUsage]
    )
else:
    EquinoxMeta = type(eqx.Module)


# --- Tracebacks -----------------------------------------------------------------------

# Where an error comes out of a function with this around it, the frames of JAX and ours
# are taken out of its traceback, as JAX does it; `jax_traceback_filtering` is asked.
boundary = api_boundary
register_exclusion(os.path.join(os.path.dirname(__file__), ""))


@boundary
def _raise(error: Exception) -> None:
    raise error


def hide_frames(error: Exception) -> None:
    """What a `boundary` does, for a function that is called too often to have one.

    It catches the error, calls this, and raises it again, by `raise` alone.
    """
    before = error.__traceback__
    with contextlib.suppress(Exception):
        _raise(error)
    after = error.__traceback__
    assert after is not None
    codes = [frame.f_code for frame, _ in traceback.walk_tb(after)]
    if inspect.unwrap(_raise).__code__ in codes:  # there is a boundary further out
        error.__traceback__ = before
        return
    error.__traceback__ = after.tb_next
    # Boundaries of JAX, inside, may have left the same note.
    error.__notes__ = list(dict.fromkeys(error.__notes__))


# --- Programs that raise --------------------------------------------------------------

# A program that JAX runs within the call raises `ValueError`.
PROGRAM_ERRORS: Final = (jax.errors.JaxRuntimeError, ValueError)

# Where JAX reports, besides raising it, what a callback has raised.
CALLBACK_LOGGER: Final = logging.getLogger("jax._src.callback")

_CHECK: Final = "_EquinoxRuntimeError"
_PROGRAM: Final = b"eqx_state"
# How frames begin that lie between those of the user: ours, and of bound methods.
_BETWEEN: Final = tuple(
    f'  File "{os.path.join(os.path.dirname(file), *inside, "")}'
    for file, inside in ((__file__, ()), (eqx.__file__, ("_module",)))
)


def is_check(error: BaseException | None) -> bool:
    """Whether this is what the callback of `eqx.error_if` raises."""
    return type(error).__name__ == _CHECK


def run_in_program(f: Callable[..., Any], *args: Any) -> Any:
    """`f(*args)`, the frames of which are those inside of a program."""
    # `eqx.error_if` collects what goes by this name along with the frames.
    __equinox_jit_id__ = _PROGRAM  # noqa: F841
    return f(*args)


def jaxpr_of(jitted: Any, *args: Any) -> Any:
    """The program of `jitted` for these arguments, or `None` if it cannot be seen.

    For `EQX_ON_ERROR=breakpoint` Equinox puts a function in the place of `jax.jit`.
    """
    return jitted.trace(*args).jaxpr if hasattr(jitted, "trace") else None


def params_of(equation: Any) -> list[Any]:
    """The parameters of an equation."""
    values = list(equation.params.values())
    # JAX >= 0.12: a primitive may be an object, which has parameters of its own.
    own = [getattr(x, "params", None) for x in values]
    return values + [
        x for params in own if type(params) is dict for x in params.values()
    ]


def failed_check(error: BaseException | None) -> tuple[str, str] | None:
    """The message and the stack of the failed `eqx.error_if` that an error tells of.

    The stack is that of the program. It is empty if Equinox does not say it.
    """
    _, found, text = str(error).partition(f"{_CHECK}: ")
    if not found:
        return None
    module = sys.modules.get("equinox._jit")
    message, stack = getattr(module, "last_error_info", None) or (None, ())
    if message is None or not text.startswith(message):  # another thread's
        return text.partition("\n\n\n")[0], ""
    frames: list[str] = []  # the innermost is the first
    inside: list[str] = []
    for x in stack:
        if x == _PROGRAM:
            inside = list(frames)
        elif isinstance(x, str) and not x.startswith(_BETWEEN):
            frames.append(x)
    return message, "".join(reversed(inside or frames))
