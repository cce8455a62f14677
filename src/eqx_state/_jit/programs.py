"""The compiled programs of a function under `es.jit`, and how a call finds its program.

All arrays of a call are traced; the rest is its *cache key*. Each key has one
`Program`. The slow path computes the key, and looks up the program. The fast path is a
`Plan`: it compares the `Form` of a call with that of an earlier one.
"""

import contextlib
import copy
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, Final

import jax

from .._compat import jaxpr_of, PROGRAM_ERRORS, run_in_program
from .._state.scope import is_any_open, scopes_open_here
from .._transforms.transform import with_origin_as_leaf
from .call import cache_key_of, is_of_plain_object, JitCall, origin_of
from .checks import callbacks_in, raise_failed_check, unlogged, wait
from .form import Form, form_of
from .options import Options
from .results import Output, Result
from .static import is_fixed, typed


_NewCall = Callable[[], JitCall]


class _Running(threading.local):
    """How to trace, if JAX has to: the call, and what to close when it has returned.

    The call is not an argument of the program, because JAX would keep it alive. Always
    set `now`, even if no trace is expected: if the first trace for some argument types
    fails, JAX never uses its fast path for them again.
    """

    now: tuple[_NewCall, contextlib.ExitStack] | None = None


class Program:
    """The compiled programs for one cache key, one for each set of shapes.

    Each key has its own `jax.jit`. If all keys shared one, the key would be a static
    argument, which JAX hashes and compares in Python on every call.
    """

    def __init__(self, key: Any, call: JitCall, options: Options):
        running = _Running()

        def run(*arrays: Any) -> Result:
            assert running.now is not None
            new_call, stack = running.now
            stack.enter_context(unlogged())
            stack.enter_context(options.quiet())
            return run_in_program(new_call().trace, *arrays)

        _name_like(run, call.origin)
        donated = call.donated(options.donate)
        self.jitted: Any = jax.jit(run, donate_argnums=donated, **options.for_jax)
        self.key = key
        self.running = running
        self.can_raise = False

    def __call__(self, arrays: Sequence[Any], new_call: _NewCall) -> Result:
        """Run the program on these arrays, and wait for it if it can raise.

        If JAX has to trace, the trace runs on `new_call()`.
        """
        try:
            with self._tracing(new_call) as stack:
                if self.can_raise:
                    stack.enter_context(unlogged())
                result = self.jitted(*arrays)
                if result.output.callbacks is None:  # the first run after a trace
                    self._find_callbacks(result.output, jaxpr_of(self.jitted, *arrays))
                if result.output.callbacks:
                    wait(result.output.callbacks, arrays, result)
                return result
        except PROGRAM_ERRORS as error:
            raise_failed_check(error)
            raise

    @contextlib.contextmanager
    def _tracing(self, new_call: _NewCall) -> Iterator[contextlib.ExitStack]:
        """Inside, JAX may trace. The stack closes what a trace has opened."""
        before = self.running.now
        with contextlib.ExitStack() as stack:
            self.running.now = new_call, stack
            try:
                yield stack
            finally:
                self.running.now = before

    def _find_callbacks(self, output: Output, jaxpr: Any) -> None:
        """Find out whether the program with this jaxpr and output can raise."""
        output.callbacks = callbacks_in(jaxpr)
        self.can_raise |= bool(output.callbacks)

    def lower(self, call: JitCall) -> Any:
        """Lower the program for a call, as `jax.jit(f).lower` does."""
        with self._tracing(lambda: call):
            traced = self.jitted.trace(*call.arrays())
        self._find_callbacks(traced.out_info.output, traced.jaxpr)
        return traced.lower()

    def of_stage(self, compiled: Any) -> "Program":
        """This program, as `lower` and JAX's `compile` have compiled it."""
        new = copy.copy(self)
        new.jitted = compiled
        return new


def _name_like(run: Any, origin: Any) -> None:
    """Make profiles and JAX's errors name the user's function instead of `run`.

    JAX finds the source of a function through `__wrapped__`. Store only the code: a
    reference to `origin` would keep it alive.
    """
    run.__signature__ = inspect.signature(run)
    name = getattr(origin, "__name__", type(origin).__name__)
    run.__name__ = run.__qualname__ = name
    is_function = isinstance(origin, (types.FunctionType, types.MethodType))
    source = inspect.unwrap(origin if is_function else origin.__call__)
    if (code := getattr(source, "__code__", None)) is not None:
        run.__wrapped__ = types.SimpleNamespace(__name__=name, __code__=code)


class Plan:
    """The fast path to a program, for calls outside any scope with an equal `Form`."""

    def __init__(self, program: Program, form: Form):
        self.program = program
        self.treedef, self.static, self.places, _ = form
        self.key = tuple(map(typed, form.static))
        self.hash = hash(self.key)
        self.are_fixed = all(map(is_fixed, form.static))

    def fits(self, form: Form) -> bool:
        """Whether a call with this form has the cache key of this program."""
        if len(form.static) != len(self.static) or form.places != self.places:
            return False
        try:
            if not self.are_fixed or not all(map(is_, form.static, self.static)):
                key = tuple(map(typed, form.static))
                # As in a dict: the hash of an object that was changed differs.
                if hash(key) != self.hash or key != self.key:
                    return False
                self.static = form.static  # the next call probably has these objects
            return form.treedef == self.treedef
        except Exception:  # of the user's `__eq__`, with which the slow path copes
            return False


# A function is called in a few ways: in train and eval mode, with a model that was read
# since the last call and with one that was not.
_MAX_PLANS: Final = 8


class Programs:
    """The programs of one function, and the fast paths to them."""

    def __init__(self, options: Options):
        self.options = options
        self.by_key: dict[Any, Program] = {}
        self.plans: tuple[Plan, ...] = ()  # the last used first

    def __call__(self, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`f(*args, **kwargs)`, compiled."""
        # A plan does not write to modules. While a scope is open, in any thread, it may
        # own some of these modules, so take the slow path.
        form = None if is_any_open() else form_of_call(f, args, kwargs)
        if form is not None and (plan := self._plan(form)) is not None:
            result = plan.program(form.arrays, lambda: JitCall(f, args, kwargs))
            return result.output.put(result.ran.out)  # no module is owned
        return self._slowly(f, args, kwargs, form)

    def _plan(self, form: Form) -> Plan | None:
        for i, plan in enumerate(plans := self.plans):
            if plan.fits(form):
                if i > 0:
                    self.plans = (plan, *plans[:i], *plans[i + 1 :])
                return plan
        return None

    def _slowly(self, f: Any, args: Any, kwargs: Any, form: Form | None) -> Any:
        """The slow path: any call, in a scope or with a new cache key."""
        call = JitCall(f, args, kwargs)
        # `init` creates fields, whose arrays a program could not return.
        if call.lifted.is_initializing:
            return f(*args, **kwargs)
        if self.options.donate != "none" and scopes_open_here():
            raise ValueError(_DONATED_IN_SCOPE.format(self.options.donate))
        program = self.of(call)
        result = program(call.arrays(), lambda: call)
        # A plan must not keep the function alive.
        if form is not None and not any(x is call.origin for x in form.static):
            self.plans = (Plan(program, form), *self.plans[: _MAX_PLANS - 1])
        return call.finish(result)

    def of(self, call: JitCall) -> Program:
        """The program for a call."""
        key = cache_key_of(call)
        found = self.by_key.get(key)
        return found or self.by_key.setdefault(key, Program(key, call, self.options))

    def clear(self) -> None:
        """Drop the programs."""
        self.by_key, self.plans = {}, ()


def form_of_call(f: Any, args: Any, kwargs: Any) -> Form | None:
    """The form of a call; `None` if JAX cannot flatten it, which the slow path says."""
    origin = origin_of(f)
    try:
        return form_of((with_origin_as_leaf(f, origin), args, kwargs), origin)
    except Exception:
        return None


_DONATED_IN_SCOPE: Final = """`es.jit(donate={!r})` was called inside `es.mutable`, \
which needs the old arrays of its model until it returns. Donate at top level, around \
`es.mutable`: `es.jit(step, donate='all')(model, x)`."""


# --- The programs of each function ----------------------------------------------------


# By the `id` of the object with which the programs are freed: the function; of a method
# of a plain object, this object. The programs do not refer to it. A `WeakKeyDictionary`
# would compare these objects by their own `__eq__`.
_PROGRAMS: Final[dict[int, tuple[weakref.ref[Any], dict[Any, Programs]]]] = {}


def programs_of(f: Any, options: Options) -> Programs:
    """The programs of the innermost function that `f` calls."""
    owner, which = origin_of(f), None
    if is_of_plain_object(owner):
        owner, which = owner.__self__, typed(owner.__func__)
    number = id(owner)
    if number not in _PROGRAMS:
        drop = _PROGRAMS.pop  # not `_PROGRAMS`: when Python exits, globals are `None`
        ref = weakref.ref(owner, lambda _: drop(number, None))
        # If two threads get here, both use the programs of the first.
        _PROGRAMS.setdefault(number, (ref, {}))
    kept, key = _PROGRAMS[number][1], (which, options)
    return kept.get(key) or kept.setdefault(key, Programs(options))
