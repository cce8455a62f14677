"""All code that depends on a version of JAX or Python, or on a private name.

The private names are those of JAX, Equinox and jaxtyping.
"""

# Eight names below are private to JAX, so any release of JAX may remove them. The
# library needs them to:
#
# - remove our frames and JAX's from tracebacks: `api_boundary`, `register_exclusion`;
# - detect escaped tracers that are written to state (`has_escaped`): `_trace_ref` of a
#   trace's state, `_trace` of a tracer, `parent_trace` of a trace;
# - detect that the lanes of `es.vmap` write different values to a shared state
#   (`is_mapped`): `batch_dim` of a tracer;
# - capture outputs under plain `jax.vmap` (`out_of_vmaps`): `val` of a tracer,
#   `axis_data` of a trace.
#
# A ninth is the name of the logger of callbacks. If it changes, JAX logs a failed check
# in addition to raising it.

import contextlib
import functools as ft
import inspect
import logging
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, TYPE_CHECKING, TypeAlias

import equinox as eqx
import equinox.internal
import jax
import jax.core
import jax.numpy as jnp
import jaxtyping
from jax._src.traceback_util import api_boundary, register_exclusion
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal as Literal


try:
    from jax.extend.core import get_opaque_trace_state as _get_trace_state
except ImportError:  # pragma: no cover (JAX < 0.10)
    from jax.core import (  # pyright: ignore[reportAttributeAccessIssue]
        get_opaque_trace_state as _get_trace_state,
    )


def trace_state() -> Any:
    """The active trace. Two results are equal (`==`) if the trace was the same."""
    return _get_trace_state(convention="eqx_state")


with jax.ensure_compile_time_eval():
    _NO_TRACE: Final = trace_state()


def is_in_trace() -> bool:
    """Whether this code runs inside a transform of JAX."""
    return trace_state() != _NO_TRACE


def has_escaped(leaf: Any) -> bool:
    """Whether `leaf` is a tracer of a trace that is not, or no longer, open here."""
    # A tracer is valid in its own trace and in every trace inside it, so search from
    # the active trace outwards.
    if not isinstance(leaf, jax.core.Tracer):
        return False
    trace = trace_state()._trace_ref()
    while trace is not None:
        if trace is leaf._trace:
            return False
        trace = getattr(trace, "parent_trace", None)
    return True


def is_of_trace(leaf: Any) -> bool:
    """Whether `leaf` is a tracer of the active trace: an input of it, for example."""
    is_tracer = isinstance(leaf, jax.core.Tracer)
    return is_tracer and leaf._trace is trace_state()._trace_ref()


def is_mapped(leaf: Any) -> bool:
    """Whether `leaf` may differ between the lanes of the innermost `jax.vmap`."""
    return is_of_trace(leaf) and getattr(leaf, "batch_dim", None) is not None


def out_of_vmaps(values: Any, outer: Any) -> Any:
    """Convert a pytree of values of the active trace to values of the trace `outer`.

    Each `jax.vmap` in between adds a first axis. Returns `None` if any other transform
    is in between.
    """
    trace, outer = trace_state()._trace_ref(), outer._trace_ref()
    while trace is not outer:
        if not hasattr(trace, "axis_data"):
            return None
        values = jax.tree.map(lambda x, trace=trace: _all_lanes(x, trace), values)
        trace = trace.parent_trace
    return values


def _all_lanes(x: Any, trace: Any) -> Any:
    """The values of all lanes of a `jax.vmap`, stacked along a new first axis.

    The result is a value of the trace around the `jax.vmap`.
    """
    # One `jax.vmap` may have several traces, which share their `axis_data`.
    is_lane = isinstance(x, jax.core.Tracer)
    is_lane = is_lane and getattr(x._trace, "axis_data", None) is trace.axis_data
    if is_lane and isinstance(x.batch_dim, int):
        return jnp.moveaxis(x.val, x.batch_dim, 0)
    x = x.val if is_lane else x
    return jnp.broadcast_to(x, (trace.axis_data.size, *jnp.shape(x)))


def spread_like(mapped: list[tuple[Any, int]], x: Any, x_axis: int) -> Any:
    """`x`, with its axis `x_axis` sharded like the axes in `mapped`.

    `mapped`: pairs of an array and its axis. On a mesh with `AxisType.Explicit`, the
    default of `jax.make_mesh`, types have shardings, and `jax.vmap` requires equal
    shardings of all mapped axes. If no axis in `mapped` is sharded, `x` is returned
    unchanged.
    """
    for value, axis in mapped:
        sharding = jax.typeof(value).sharding
        if (names := sharding.spec[axis]) is not None:
            spec = jax.sharding.PartitionSpec(*[None] * x_axis, names)
            like = jax.sharding.NamedSharding(sharding.mesh, spec)
            return jax.sharding.reshard(x, like)
    return x


def split_like(x: Any, like: Any) -> Any:
    """`x` with the sharding of `like`, an array of the same shape, if that is split."""
    sharding = jax.typeof(like).sharding
    is_split = any(names is not None for names in sharding.spec)
    return jax.sharding.reshard(x, sharding) if is_split else x


def while_loop(cond_fun: Any, body_fun: Any, init: Any, max_steps: int | None) -> Any:
    """`jax.lax.while_loop`; with `max_steps`, one with a derivative in reverse mode.

    It stops after `max_steps` steps. In the backward pass it recomputes the steps from
    a number of checkpoints that grows with the square root of `max_steps`.
    """
    if max_steps is None:
        return jax.lax.while_loop(cond_fun, body_fun, init)
    loop = equinox.internal.while_loop
    return loop(cond_fun, body_fun, init, max_steps=max_steps, kind="checkpointed")


# --- Meshes ---------------------------------------------------------------------------


# The default of `in_specs`, for which JAX has no public name.
Infer: Final = inspect.signature(jax.shard_map).parameters["in_specs"].default


def manual_axes() -> frozenset[Any]:
    """The mesh axes that the `jax.shard_map`s around this code map over."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which `x` varies, according to its type."""
    aval = jax.typeof(x)
    if (manual := getattr(aval, "mat", None)) is not None:  # JAX >= 0.10
        return frozenset(manual.varying)
    return frozenset(aval.vma)  # pragma: no cover (JAX < 0.10)


def vary(x: Any, axes: frozenset[Any]) -> Any:
    """`x`, with a type that also varies along these mesh axes."""
    new = tuple(sorted(axes - varying_axes(x)))
    if not new:
        return x
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, new, to="varying")
    pvary = getattr(jax.lax, "pvary")  # noqa: B009  # pragma: no cover (JAX < 0.9)
    return pvary(x, new)  # pragma: no cover (JAX < 0.9)


# --- Annotations and modules ----------------------------------------------------------


def own_annotations(cls: type) -> dict[str, Any]:
    """The annotations in the body of `cls`, also those with undefined names."""
    try:
        return inspect.get_annotations(cls)
    except NameError:  # pragma: no cover (Python >= 3.14 evaluates lazily)
        import annotationlib  # pyright: ignore[reportMissingImports]

        return annotationlib.get_annotations(
            cls, format=annotationlib.Format.FORWARDREF
        )


# The axes in a jaxtyping annotation: a name, `None` for an unnamed axis, or `...` for
# any number of unnamed axes.
Dims: TypeAlias = tuple[str | types.EllipsisType | None, ...]


def dims_of(annotation: Any) -> Dims | None:
    """The axes in an annotation; `None` if it is not a jaxtyping array annotation."""
    # jaxtyping documents this attribute only as the original text.
    text = getattr(annotation, "dim_str", None)
    return tuple(map(_dim, text.split())) if isinstance(text, str) else None


def read_dims(text: str) -> Dims:
    """The axes in a text; `ValueError` if jaxtyping does not accept the text."""
    dims = dims_of(jaxtyping.Shaped[jax.Array, text])
    assert dims is not None
    return dims


def _dim(text: str) -> str | types.EllipsisType | None:
    text = text.rpartition("=")[2]  # `rows=4` is documentation for `4`
    name = text.lstrip("#*_?")
    marks = text[: len(text) - len(name)]
    if text == "..." or "*" in marks:
        return ...
    return name if name.isidentifier() and "_" not in marks else None


_probe = eqx.nn.Identity()
object.__setattr__(_probe, "cached", None)
# If the `__dict__` of a module contains more than its fields, for example the value of
# a `functools.cached_property`, Equinox's copies of the module store this sentinel
# under `__name__` and similar names.
MISSING: Final = vars(jax.tree.map(lambda x: x, _probe)).get("__name__", object())


class _Probe(eqx.Module):
    def method(self) -> None: ...


# The class of Equinox's bound methods, which are pytrees. `__call__` and other magic
# methods are not wrapped.
BoundMethod: Final[Any] = type(_Probe().method)


@ft.cache
def shared_node() -> type:
    """The class of the placeholder in an `eqx.nn.Shared` for a tied node."""
    return type(eqx.nn.Shared("tied", lambda x: x, lambda x: x).pytree)


@ft.cache
def no_state() -> type:
    """The class of the value that `eqx.nn.delete_init_state` leaves."""
    return type(eqx.nn.delete_init_state(eqx.nn.StateIndex(0)).init)


if TYPE_CHECKING:
    from equinox._module._module import (
        _ModuleMeta as EquinoxMeta,  # pyright: ignore[reportPrivateUsage]
    )
else:
    EquinoxMeta = type(eqx.Module)


# How the qualified name of code that `dataclasses` has generated starts.
GENERATED: Final = "__create_fn__"


# --- Tracebacks -----------------------------------------------------------------------

# A decorator that removes our frames and JAX's from the tracebacks of errors, in the
# way that the option `jax_traceback_filtering` selects.
boundary = api_boundary
register_exclusion(os.path.join(os.path.dirname(__file__), ""))


@boundary
def _raise(error: Exception) -> None:
    raise error


def hide_frames(error: Exception) -> None:
    """Filter a traceback like `boundary`, which costs too much in a hot function.

    The hot function catches the error, calls this one, and ends with a bare `raise`.
    """
    before = error.__traceback__
    with contextlib.suppress(Exception):
        _raise(error)
    after = error.__traceback__
    assert after is not None
    codes = [frame.f_code for frame, _ in traceback.walk_tb(after)]
    if inspect.unwrap(_raise).__code__ in codes:  # an outer boundary will filter it
        error.__traceback__ = before
        return
    error.__traceback__ = after.tb_next
    # Inner boundaries of JAX may have added the same note. Some modes of filtering add
    # none.
    if notes := getattr(error, "__notes__", None):
        error.__notes__ = list(dict.fromkeys(notes))


# --- Programs that raise --------------------------------------------------------------

# JAX raises `ValueError` if it runs the program during the call.
PROGRAM_ERRORS: Final = (jax.errors.JaxRuntimeError, ValueError)

# JAX logs the error of a callback here, in addition to raising it.
CALLBACK_LOGGER: Final = logging.getLogger("jax._src.callback")

_CHECK: Final = "_EquinoxRuntimeError"
_PROGRAM: Final = b"eqx_state"
# How the lines for frames of Equinox's bound methods begin in a stack. Our own frames
# are excluded above.
_METHODS: Final = f'  File "{os.path.join(os.path.dirname(eqx.__file__), "_module")}'


def is_check(error: BaseException | None) -> bool:
    """Whether the callback of `eqx.error_if` raised this error."""
    return type(error).__name__ == _CHECK


def run_in_program(f: Callable[..., Any], *args: Any) -> Any:
    """`f(*args)`, with a sentinel in the stack that marks the start of the program."""
    # `eqx.error_if` collects variables of this name together with the frames.
    __equinox_jit_id__ = _PROGRAM  # noqa: F841
    return f(*args)


def jaxpr_of(jitted: Any, *args: Any) -> Any:
    """The jaxpr of `jitted` for these arguments, or `None` if it is not available."""
    # With `EQX_ON_ERROR=breakpoint`, Equinox replaces `jax.jit` by a plain function;
    # with `jax_disable_jit` there is no program, and JAX would trace again.
    config: Any = jax.config
    has_program = hasattr(jitted, "trace") and not config.jax_disable_jit
    return jitted.trace(*args).jaxpr if has_program else None


def jaxprs_in(equation: Any) -> Iterator[Any]:
    """Every jaxpr among the parameters of an equation, also in tuples and lists."""
    todo = [*equation.params.values()]
    # JAX >= 0.12: a primitive may be an object with its own parameters.
    own = [getattr(x, "params", None) for x in todo]
    todo += [x for params in own if type(params) is dict for x in params.values()]
    for x in todo:  # it grows
        if isinstance(x, (tuple, list)):
            todo.extend(x)
        elif isinstance(x, (Jaxpr, ClosedJaxpr)):
            yield x


def failed_check(error: BaseException | None) -> tuple[str, str] | None:
    """The message and the stack of the `eqx.error_if` that raised an error.

    Returns `None` for an error from elsewhere. The stack begins where the program
    begins. It is empty if Equinox does not provide it.
    """
    _, found, text = str(error).partition(f"{_CHECK}: ")
    if not found:
        return None
    module = sys.modules.get("equinox._jit")
    message, stack = getattr(module, "last_error_info", None) or (None, ())
    if message is None or not text.startswith(message):  # of a different thread
        return text.partition("\n\n\n")[0], ""
    frames: list[str] = []  # the innermost is the first
    inside: list[str] = []
    for x in stack:
        if x == _PROGRAM:
            inside = list(frames)
        elif isinstance(x, str) and not x.startswith(_METHODS):
            frames.append(x)
    return message, "".join(reversed(inside or frames))
