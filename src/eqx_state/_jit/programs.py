"""The compiled programs of a function under `es.jit`, and how a call finds its program.

All arrays of a call are traced; the rest is its *cache key*. Each key has one
`Program`. The slow path computes the key, and looks up the program. While the program
runs, it has access to the live objects of the call, in case JAX has to trace.

The fast path is a `Plan`, created after the first call with a key outside any scope:
code that collects the arrays, and an `Output` that builds the result. It does not
search for modules. Only if JAX retraces, because a shape or a sharding changed, does it
create a `JitCall`, which finds them.
"""

import contextlib
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu

from .._compat import (
    CALLBACK_LOGGER,
    failed_check,
    is_check,
    Jaxpr,
    jaxpr_of,
    params_of,
    PROGRAM_ERRORS,
    run_in_program,
)
from .._state.scope import is_any_open, is_open_here
from .call import cache_key_of, JitCall, origin_of, Output, Result
from .code import Mismatch
from .options import Options
from .results import ArgumentFlattener


class _Retrace(threading.local):
    """`new_call` creates the call on which a new trace in this thread runs.

    The call is not an argument of the program, because JAX would keep it alive. Always
    set `new_call`, even if no trace is expected: if the first trace for some argument
    types fails, JAX never uses its fast path for them again.
    """

    new_call: Callable[[], JitCall] | None = None


class Program:
    """The compiled programs for one cache key, one for each set of shapes.

    Each key has its own `jax.jit`. If all keys shared one, the key would be a static
    argument, which JAX hashes and compares in Python on every call, and the arrays
    could not have names in errors.
    """

    def __init__(self, call: JitCall, options: Options):
        live = _Retrace()

        def run(*arrays: Any) -> Result:
            assert live.new_call is not None
            return run_in_program(live.new_call().trace, *arrays)

        _present(run, call.origin, call.names())
        donated = call.donated(options)
        self.jitted = jax.jit(run, donate_argnums=donated, **options.for_jax)
        self.donated = frozenset(donated)
        self.live = live
        self.can_raise = False

    def __call__(
        self, arrays: Sequence[Any], new_call: Callable[[], JitCall]
    ) -> Result:
        """Run the program on these arrays, and wait for it if it can raise.

        If JAX has to trace, the trace runs on `new_call()`.
        """
        before, self.live.new_call = self.live.new_call, new_call
        try:
            with unlogged() if self.can_raise else _UNCHANGED:
                result = self.jitted(*arrays)
                if result.output.callbacks is None:  # JAX has traced
                    self._look(result.output, arrays)
                if result.output.callbacks:
                    wait(result.output.callbacks, arrays, result)
            return result
        except PROGRAM_ERRORS as error:
            raise_failed_check(error)
            if isinstance(error, jax.errors.JaxRuntimeError):
                _check_donated_once(arrays, self.donated, new_call)
            raise
        finally:
            self.live.new_call = before

    def _look(self, output: Output, arrays: Sequence[Any]) -> None:
        """Find out whether a program that JAX has just compiled can raise."""
        # With `jax_disable_jit` there is no program, and JAX would trace again.
        config: Any = jax.config
        is_there = not config.jax_disable_jit
        jaxpr = jaxpr_of(self.jitted, *arrays) if is_there else None
        output.callbacks = callbacks_in(jaxpr)
        self.can_raise |= bool(output.callbacks)

    def lower(self, call: JitCall) -> Any:
        """Lower the program for a call, as `jax.jit(f).lower` does."""
        before, self.live.new_call = self.live.new_call, lambda: call
        try:
            traced = self.jitted.trace(*call.arrays())
        finally:
            self.live.new_call = before
        traced.out_info.output.callbacks = callbacks_in(traced.jaxpr)
        return traced.lower()


def _check_donated_once(
    arrays: Sequence[Any], donated: frozenset[int], new_call: Callable[[], JitCall]
) -> None:
    """Raise `ValueError` if a donated array is also a second argument."""
    first: dict[int, int] = {}
    for i, x in enumerate(arrays):
        j = first.setdefault(id(x), i)
        if j < i and not donated.isdisjoint((i, j)):
            names = new_call().names()
            raise ValueError(_DONATED_TWICE.format(names[j], names[i])) from None


_DONATED_TWICE: Final = """`es.jit` cannot donate `{0}`: `{1}` is the same array. Copy \
one of them: `target = jax.tree.map(jnp.copy, q)`. If not all leaves are arrays: \
`target = es.map(jnp.copy, q, on=lambda part: True)`."""


_UNCHANGED: Final = contextlib.nullcontext()


def _present(run: Any, origin: Any, names: list[str]) -> None:
    """Make JAX's errors name the user's function and arguments instead of `run`.

    JAX finds the source of a function through `__wrapped__`, and the names of the
    arguments in the signature. Store only the code: a reference to `origin` would keep
    it alive.
    """
    name = getattr(origin, "__name__", type(origin).__name__)
    run.__name__ = run.__qualname__ = name
    is_function = isinstance(origin, types.FunctionType)
    source = origin if is_function else inspect.unwrap(origin.__call__)
    if (code := getattr(source, "__code__", None)) is not None:
        run.__wrapped__ = types.SimpleNamespace(__name__=name, __code__=code)
    if len(set(names)) == len(names):  # else JAX counts: `arrays[0]`
        kind = inspect.Parameter.POSITIONAL_ONLY
        run.__signature__ = inspect.Signature(
            [inspect.Parameter(_Name(name), kind) for name in names]
        )


class _Name(str):
    """A name that `inspect.Parameter` accepts without being an identifier."""

    def isidentifier(self) -> bool:
        return True


class Plan(NamedTuple):
    """The fast path for calls outside any scope whose cache key occurred before."""

    program: Program
    # Raises `Mismatch` or `KeyError` for a different cache key.
    arrays: ArgumentFlattener

    @staticmethod
    def of(call: JitCall, program: Program) -> "Plan":
        return Plan(program, ArgumentFlattener(call.tree, call.origin))


# Plans are expensive to create. If more cache keys than this alternate, each new plan
# would evict the one that is needed next. Then only every hundredth call without a plan
# creates one.
_MAX_PLANS: Final = 8
_PATIENCE: Final = 100


class Programs:
    """The programs of one function, and the fast paths to them."""

    def __init__(self, options: Options):
        self.options = options
        self.by_key: dict[Any, Program] = {}
        self.plans: tuple[Plan, ...] = ()
        self.without_plan = 0  # the number of calls without a plan

    def __call__(self, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`f(*args, **kwargs)`, compiled."""
        tree = f, args, kwargs
        # A plan does not write to modules. While a scope is open, which may own some of
        # these modules, take the slow path.
        for plan in () if is_any_open() else self.plans:
            try:
                arrays = plan.arrays(tree)
            except (Mismatch, KeyError):
                continue
            stack: contextlib.ExitStack | None = None

            def new_call() -> JitCall:
                nonlocal stack
                stack = contextlib.ExitStack()
                stack.enter_context(unlogged())
                stack.enter_context(self.options.quiet())
                return JitCall(f, args, kwargs)

            try:
                result = plan.program(arrays, new_call)
            finally:
                if stack is not None:
                    stack.close()
            return result.output.put(result.ran.out, [], False)
        return self.general(f, args, kwargs)

    def general(self, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The slow path: any call, in a scope or with a new cache key."""
        call = JitCall(f, args, kwargs)
        if call.lifted.is_initializing:
            return f(*args, **kwargs)
        if self.options.donate != "none" and is_open_here():
            raise ValueError(_DONATED_IN_SCOPE.format(self.options.donate))
        program = self.of(call)
        with unlogged(), self.options.quiet():
            result = program(call.arrays(), lambda: call)
        if not call.lifted.scopes:
            self._remember(call, program)
        return call.finish(result)

    def of(self, call: JitCall) -> Program:
        """The program for a call."""
        key = cache_key_of(call)
        program = self.by_key.get(key)
        if program is None:
            program = self.by_key.setdefault(key, Program(call, self.options))
        return program

    def _remember(self, call: JitCall, program: Program) -> None:
        """Create a plan for calls like this one, unless there is one."""
        if any(plan.program is program for plan in self.plans):
            return
        self.without_plan += 1
        if len(self.plans) < _MAX_PLANS or self.without_plan % _PATIENCE == 0:
            self.plans = (Plan.of(call, program), *self.plans[: _MAX_PLANS - 1])


_DONATED_IN_SCOPE: Final = """`es.jit(donate={!r})` was called inside `es.mutable`, \
which needs the old arrays of its model until it returns. Donate at top level, around \
`es.mutable`: `es.jit(step, donate='all')(model, x)`."""


# The programs of each function. They do not refer to it, and are freed with it.
_PROGRAMS: Final[dict[Options, weakref.WeakKeyDictionary[Any, Programs]]] = {}


def programs_of(f: Any, options: Options) -> Programs:
    """The programs of the innermost function that `f` calls."""
    origin = origin_of(f)
    try:
        return _PROGRAMS[options][origin]
    except KeyError:  # if two threads get here, both use the programs of the first
        by_origin = _PROGRAMS.setdefault(options, weakref.WeakKeyDictionary())
        return by_origin.setdefault(origin, Programs(options))


# --- Programs that can raise ----------------------------------------------------------
#
# JAX returns before a program has run, and raises an error of the program where its
# results are used. Wait for a program that contains a callback, such as that of
# `eqx.error_if`, so that the call itself raises the error.


# `debug_callback` is not among them: JAX may remove it.
_CAN_RAISE: Final = frozenset({"pure_callback", "io_callback"})


def callbacks_in(jaxpr: Any) -> frozenset[str]:
    """The callbacks that can raise, in a jaxpr and all jaxprs inside it.

    If the jaxpr is not available (`None`), assume all of them.
    """
    if jaxpr is None:
        return _CAN_RAISE
    found, todo, seen = set(), [jaxpr], set()
    while todo:
        x = todo.pop()
        if isinstance(x, (tuple, list)):
            todo.extend(x)
        elif isinstance(x, Jaxpr):
            if id(x) not in seen:
                seen.add(id(x))
                found.update(equation.primitive.name for equation in x.eqns)
                todo.extend(map(params_of, x.eqns))
        elif hasattr(x, "jaxpr"):  # a closed jaxpr
            todo.append(x.jaxpr)
    return _CAN_RAISE & found


def wait(callbacks: frozenset[str], arguments: Any, result: Any) -> None:
    """Wait for a program with these callbacks."""
    arrays = jtu.tree_leaves((arguments, result))
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return
    jax.block_until_ready(result)
    if "io_callback" in callbacks:  # may run after the results are ready
        jax.effects_barrier()


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep JAX from logging a failed `eqx.error_if`, which it also raises."""

    def is_logged(record: Any) -> bool:
        return not (record.exc_info and is_check(record.exc_info[1]))

    CALLBACK_LOGGER.addFilter(is_logged)
    try:
        yield
    finally:
        CALLBACK_LOGGER.removeFilter(is_logged)


def raise_failed_check(error: BaseException) -> None:
    """Raise an `eqx.EquinoxRuntimeError` if this is the error of an `eqx.error_if`."""
    if (check := failed_check(error)) is not None:
        # JAX's own error is longer, but has no more information.
        raise eqx.EquinoxRuntimeError(_FAILED_CHECK.format(*check)) from None


_FAILED_CHECK: Final = """{}

This check of `eqx.error_if` failed in a program of `es.jit` (most recent call last):
{}
To look at the values there, run with `EQX_ON_ERROR=breakpoint` or `JAX_DISABLE_JIT=1`.
"""
