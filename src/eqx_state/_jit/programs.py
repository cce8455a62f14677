"""The programs of a function that `es.jit` compiles, and the ways to find them.

All arrays of a call are traced; the rest is its *signature*, for which there is one
`Program`. The general way works out the signature, and looks the program up. While the
call lasts, the program also leads to the live objects, which the trace runs on if it
comes to a trace.

The short way is a plan (see `_plan.py`), made after the first call of a signature that
is outside of any scope: it takes the arrays out and puts the output together by code
made for just that. It has no live objects: only if JAX comes to a trace, for arrays of
another shape or in other shards, are they looked for.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

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
from .._state.scope import is_any_open
from .._transforms.lift import captured
from .call import (
    Call,
    origins_of,
    Output,
    present,
    Result,
    Signature,
    signature_of,
)
from .options import Options, quiet
from .plan import flattener, Mismatch, Unplannable


# --- Programs that can raise: waiting for them, and what they raise.
#
# JAX returns before a program has run, and an error in it comes up where its results
# are used. So a program in which a callback can raise, as that of `eqx.error_if`
# does, is waited for. Others are not.


# `debug_callback` is not among them: JAX may leave it out.
_CAN_RAISE: Final = frozenset({"pure_callback", "io_callback"})


def callbacks_in(jaxpr: Any) -> frozenset[str]:
    """The callbacks that can raise, in a program and all programs inside it.

    `None` is a program that cannot be seen; all of them may be in it.
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
        elif hasattr(x, "jaxpr"):  # one that is closed
            todo.append(x.jaxpr)
    return _CAN_RAISE & found


def wait(callbacks: frozenset[str] | None, arguments: Any, result: Any) -> None:
    """Return when a program with these callbacks has run."""
    if not callbacks:
        return
    arrays = jtu.tree_leaves((arguments, result))
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return
    jax.block_until_ready(result)
    if "io_callback" in callbacks:  # no result need depend on it
        jax.effects_barrier()


class Reporting:
    """Inside, a failed `eqx.error_if` is an `eqx.EquinoxRuntimeError`, not logged."""

    def __enter__(self) -> None:
        CALLBACK_LOGGER.addFilter(self)

    def filter(self, record: Any) -> bool:
        return not (record.exc_info and is_check(record.exc_info[1]))

    def __exit__(self, cls: Any, error: BaseException | None, traceback: Any) -> None:
        CALLBACK_LOGGER.removeFilter(self)
        report(error)


def report(error: BaseException | None) -> None:
    """Raise a program's error as a failed `eqx.error_if`, if it is one."""
    if isinstance(error, PROGRAM_ERRORS) and (check := failed_check(error)):
        # JAX's own error is long, and tells nothing more.
        raise eqx.EquinoxRuntimeError(_REPORT.format(*check)) from None


_REPORT: Final = """{}

This check of `eqx.error_if` failed while a program of `es.jit` ran. The frames above
are outside of the program. Inside it (most recent call last):
{}
To stop there and look at the values, run with `EQX_ON_ERROR=breakpoint` in the
environment; or with `JAX_DISABLE_JIT=1`, which runs it as ordinary Python.
"""


class Untraced(Exception):
    """JAX comes to a trace where there is no call to run it on."""


class _Live(threading.local):
    """What makes the call that a new trace in this thread runs on.

    It is not an argument of the program, since JAX would keep it alive. The trace must
    not fail for want of it, to be done again with it: JAX never again takes its own
    short way for arrays of which the first trace has failed.
    """

    new_call: Callable[[], Call] | None = None


class Program:
    """The compiled programs for calls of one signature, one for each set of shapes.

    Each signature has a `jax.jit` of its own: with one for all of them the signature
    would be a static argument, hashed and compared in Python at every call, and JAX
    could not be told what the arrays are called.
    """

    def __init__(self, call: Call, options: Options, seen: "Seen"):
        live, unseen = _Live(), set[Output]()

        def run(*arrays: Any) -> Result:
            if live.new_call is None:
                raise Untraced
            result = run_in_program(live.new_call().trace, *arrays)
            unseen.add(result.output)
            return result

        origin, names = seen(call)
        name = getattr(origin, "__name__", type(origin).__name__)
        present(run, name, origin, names)
        donated = call.donated(options.donate)
        self.jitted = jax.jit(run, donate_argnums=donated, **options.for_jax)
        self.live = live
        # Traced, and not yet searched for callbacks. Another thread may get to run such
        # a program first: it has to take it for one that can raise.
        self.unseen = unseen
        self.can_raise = False
        self.may_have_plan = True

    def __call__(self, arrays: Sequence[Any], new_call: Callable[[], Call]) -> Result:
        """The result: if the program can raise, when it has run.

        A new trace runs on `new_call()`.
        """
        before, self.live.new_call = self.live.new_call, new_call
        try:
            if self.can_raise or self.unseen:
                with Reporting():
                    result = self.jitted(*arrays)
            else:
                result = self.jitted(*arrays)
        except PROGRAM_ERRORS as error:
            report(error)
            raise
        finally:
            self.live.new_call = before
        # This call, or that of another thread, may have compiled a program that can.
        if not self.can_raise and not self.unseen:
            return result
        with Reporting():
            if result.output.callbacks is None:
                try:
                    jaxpr = jaxpr_of(self.jitted, *arrays)  # which JAX still has
                except Untraced:  # with `jax_disable_jit` there is no program
                    jaxpr = None
                self._look(result.output, jaxpr)
            wait(result.output.callbacks, arrays, result)
        return result

    def lower(self, call: Call) -> Any:
        """As `jax.jit(f).lower`."""
        before, self.live.new_call = self.live.new_call, lambda: call
        try:
            traced = self.jitted.trace(*call.arrays())
        finally:
            self.live.new_call = before
        self._look(traced.out_info.output, traced.jaxpr)
        return traced.lower()

    def _look(self, output: Output, jaxpr: Any) -> None:
        output.callbacks = callbacks_in(jaxpr)
        self.can_raise |= bool(output.callbacks)
        self.unseen.discard(output)


class Plan:
    """The short way of a call that was made before, outside of any scope."""

    def __init__(self, call: Call, program: Program):
        if call.lifted.scopes:
            raise Unplannable
        self.program = program
        tree = call.f, call.args, call.kwargs
        self.flatten = flattener(tree, call.origins)
        # Functions may come to lead to a module which a scope owns, and is threaded.
        self.holds_functions = any(map(captured, jtu.tree_leaves(tree)))
        self.types = frozenset(map(type, call.arrays()))

    def arrays(self, tree: Any) -> Sequence[Any]:
        """As `Call.arrays`. Raises `Mismatch` or `KeyError` for another signature."""
        if self.holds_functions and is_any_open():
            raise Mismatch
        arrays = self.flatten(tree)
        is_known = self.types.issuperset(map(type, arrays))
        if not is_known and not all(map(eqx.is_array, arrays)):
            raise Mismatch
        return arrays


# Plans are not cheap. With more signatures than this in turn each new plan would push
# out the one that is needed next, so only every hundredth is let in.
_MAX_PLANS: Final = 8
_PATIENCE: Final = 100


# What JAX's errors show of a call: a function, and a name for each array.
Seen = Callable[[Call], tuple[Any, list[str]]]


class Programs:
    """The programs of one function, and the short ways to them."""

    def __init__(self, options: Options, seen: Seen = Call.seen):
        self.options, self.seen = options, seen
        self.by_signature: dict[Signature, Program] = {}
        self.plans: tuple[Plan, ...] = ()
        self.new = 0  # how often there was no plan for a call
        self.lock = threading.Lock()  # for threads that remember at once

    def __call__(self, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`f(*args, **kwargs)`, by a program."""
        if not self.plans:  # as for a method in a scope
            return self.general(f, args, kwargs)
        tree = f, args, kwargs
        for plan in self.plans:
            try:
                arrays = plan.arrays(tree)
            except (Mismatch, KeyError):
                continue
            stack: contextlib.ExitStack | None = None

            def new_call() -> Call:
                nonlocal stack
                stack = contextlib.ExitStack()
                stack.enter_context(Reporting())
                stack.enter_context(quiet(self.options.donate))
                return Call(f, args, kwargs)

            try:
                result = plan.program(arrays, new_call)
            finally:
                if stack is not None:
                    stack.close()
            return result.output.put(result.arrays, [])
        return self.general(f, args, kwargs)

    def general(self, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call that may be any: in a scope, the first of its signature."""
        call = Call(f, args, kwargs)
        if call.lifted.is_initializing:
            return f(*args, **kwargs)
        self._check_donation(call)
        program = self.of(call)
        with Reporting(), quiet(self.options.donate):
            result = program(call.arrays(), lambda: call)
        self._remember(call, program)
        return call.finish(result)

    def of(self, call: Call) -> Program:
        """The program that serves a call."""
        signature = signature_of(call)
        program = self.by_signature.get(signature)
        if program is None:
            new = Program(call, self.options, self.seen)
            program = self.by_signature.setdefault(signature, new)
        return program

    def _check_donation(self, call: Call) -> None:
        donate = self.options.donate
        if donate != "none" and call.lifted.roots:
            raise ValueError(
                f"`es.jit(donate={donate!r})` was called inside `es.mutable`, on"
                " modules that belong to it. Their old arrays are needed until the"
                " scope ends, and could not be given away. Donate at the top, around"
                " `es.mutable`: `es.jit(step, donate='all')(model, x)`."
            )

    def _remember(self, call: Call, program: Program) -> None:
        """Make a plan for calls like this one, if there was none yet."""
        with self.lock:
            planned = any(plan.program is program for plan in self.plans)
            if planned or not program.may_have_plan:
                return
            self.new += 1
            if len(self.plans) == _MAX_PLANS and self.new % _PATIENCE:
                return
            try:
                plan = Plan(call, program)
            except Unplannable:
                program.may_have_plan = False
            else:
                self.plans = (plan, *self.plans[: _MAX_PLANS - 1])


# By function: its programs go when it goes, of which they keep nothing.
_PROGRAMS: Final[dict[Options, weakref.WeakKeyDictionary[Any, Programs]]] = {}


def programs_of(f: Any, options: Options) -> Programs:
    """The programs of what `f` calls in the end."""
    by_origin, (origin,) = _PROGRAMS.get(options), origins_of(f)
    if by_origin is None:
        by_origin = _PROGRAMS.setdefault(options, weakref.WeakKeyDictionary())
    programs = by_origin.get(origin)
    if programs is None:
        programs = by_origin.setdefault(
            origin, Programs(options)
        )  # or another thread's
    return programs
