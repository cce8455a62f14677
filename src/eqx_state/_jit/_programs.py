"""The programs of a function that `es.jit` compiles, and the ways to find them.

All arrays of a call are traced; the rest is its *signature*, for which there is one
compiled program. The general way works out the signature and looks the program up by a
key, which is equal for equal signatures. While the call lasts the key also leads to the
live objects, which the trace runs on, if it comes to a trace.

The short way is a plan (see `_plan.py`), made after the first call of a signature that
is outside of any scope: it takes the arrays out and puts the output together by code
made for just that. Its key leads to no objects: what needs a trace goes the general
way.
"""

import threading
import weakref
from typing import Any, Final, Literal

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._compat import jaxpr_of, run_in_program
from .._state._scope import is_any_open
from .._transforms._closures import held, reaches_module
from .._transforms._copies import Opened
from ._call import Call, Output
from ._plan import flattener, Mismatch, Unplannable
from ._runtime_errors import callbacks_in, Reporting, wait
from ._signature import Signature


Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]

# Which arrays are donated, of the first argument and of the others.
DONATED: Final[dict[str, tuple[bool, bool]]] = {
    "all": (True, True),
    "all-except-first": (False, True),
    "warn": (True, True),
    "warn-except-first": (False, True),
    "none": (False, False),
}


class Key:
    """What the program of a call depends on besides the shapes of its arrays.

    JAX keeps it for longer than the function. So it is no more than a token for the
    signature, of which each `Programs` has a list.
    """

    def __init__(self, token: object, call: Call):
        self.token = token
        self.call: Call | None = call  # only while the call lasts

    def __hash__(self) -> int:
        return hash(self.token)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Key) and self.token is other.token


class Retrace(Exception):
    """A plan's call needs a new program, which only the general way can trace."""


class Plan:
    """The short way of a call that was made before, outside of any scope."""

    def __init__(self, f: Any, call: Call, key: Key):
        if call.lifted.roots:
            raise Unplannable
        self.key = key
        self.origin = weakref.ref(call.origin)
        self.shape = call.opened.shape
        self.f = None
        if self.shape is not None:
            self.held = flattener(call.opened.tree.values, call.origin)
            f = None
        elif self.holds_module(f):
            raise Unplannable
        elif not any(map(eqx.is_array, jtu.tree_leaves(f))):
            try:
                self.f, f = weakref.ref(f), None
            except TypeError:
                raise Unplannable from None
        # Functions may come to lead to a module which a scope owns, and is threaded.
        leaves = jtu.tree_leaves((call.args, call.kwargs))
        self.holds_functions = self.f is None or any(map(held, leaves))
        self.first = flattener(call.args[:1], call.origin)
        self.rest = flattener((f, call.args[1:], call.kwargs), call.origin)
        self.types = frozenset(type(x) for arrays in call.arrays() for x in arrays)

    def arrays(
        self, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """As `Call.arrays`. Raises `Mismatch` or `KeyError` for another signature."""
        if self.holds_functions and is_any_open():
            raise Mismatch
        first: list[Any] = []
        rest: list[Any] = []
        kept: list[Any] = []
        if self.shape is not None:
            opened = Opened(f, self.origin())
            if opened.shape != self.shape:
                raise Mismatch
            self.held(opened.tree.values, kept.append)
            f = None
        elif self.holds_module(f):
            raise Mismatch
        elif self.f is not None:
            if self.f() is not f:
                raise Mismatch
            f = None
        self.first(args[:1], first.append)
        self.rest((f, args[1:], kwargs), rest.append)
        types = {*map(type, first), *map(type, rest), *map(type, kept)}
        if not types <= self.types and not all(
            map(eqx.is_array, [*first, *rest, *kept])
        ):
            raise Mismatch
        return first, rest, kept

    def holds_module(self, f: Any) -> bool:
        """Whether the function has come to hold a module, which is to be traced.

        Of functions with closures only `f`, or the one in it, may have a plan.
        """
        if jtu.all_leaves((f,)):
            return reaches_module(f)
        return Opened(f, self.origin()).is_copied


class Programs:
    """The programs of one function, and the short ways to them."""

    def __init__(self, name: str, donate: Donate):
        def run(key: Key, *arrays: list[Any]) -> Any:
            if key.call is None:
                raise Retrace
            return run_in_program(key.call.trace, *arrays)

        run.__name__ = run.__qualname__ = name
        argnums = tuple(i + 1 for i in range(2) if DONATED[donate][i])
        self.jitted = jax.jit(run, static_argnums=0, donate_argnums=argnums)
        # Whether there is one to wait for; otherwise `jitted` may be called as it is.
        self.can_raise = False
        self.tokens: dict[Signature, object] = {}
        self.plans: tuple[Plan, ...] = ()
        self.unplanned: set[Key] = set()
        self.new = 0  # how often there was none for a call
        self.lock = threading.Lock()  # for threads that remember at once

    def key(self, call: Call) -> Key:
        """Equal for calls that one program serves."""
        return Key(self.tokens.setdefault(call.signature, object()), call)

    def __call__(self, key: Key, *arrays: list[Any]) -> Any:
        """What `jitted` returns: if the program can raise, when it has run."""
        try:
            with Reporting():
                result = self.jitted(key, *arrays)
                key.call = None  # JAX keeps the key
                self.settle(result, key, *arrays)
                return result
        except (RuntimeError, ValueError):
            self.can_raise = True  # it may have raised before it could be looked at
            raise
        finally:
            key.call = None

    def lower(self, key: Key, *arrays: list[Any]) -> Any:
        """As `jitted.lower`."""
        try:
            traced = self.jitted.trace(key, *arrays)
            key.call = None
            self._look(traced.out_info[2], key, *arrays)
            return traced.lower()
        finally:
            key.call = None

    def settle(self, result: Any, key: Key, *arrays: list[Any]) -> None:
        """Wait for the result, if its program can raise."""
        output = result[2]
        if output.callbacks is None:
            self._look(output, key, *arrays)
        wait(output.callbacks, arrays, result)

    def _look(self, output: Output, key: Key, *arrays: list[Any]) -> None:
        """Find the callbacks of a program that was just traced: JAX still has it."""
        try:
            jaxpr = jaxpr_of(self.jitted, key, *arrays)
        except Retrace:  # or it has not: with `jax_disable_jit` there is no program
            jaxpr = None
        output.callbacks = callbacks_in(jaxpr)
        self.can_raise |= bool(output.callbacks)

    def remember(self, f: Any, call: Call, key: Key) -> None:
        """Make a plan for calls like this one, if there was none yet."""
        with self.lock:
            if key in self.unplanned or any(plan.key == key for plan in self.plans):
                return
            self.new += 1
            if len(self.plans) == _MAX_PLANS and self.new % _PATIENCE:
                return
            try:
                plan = Plan(f, call, key)
            except Unplannable:
                self.unplanned.add(key)
            else:
                self.plans = (plan, *self.plans[: _MAX_PLANS - 1])


# Of more signatures in turn each would push out the next, and plans are not cheap.
_MAX_PLANS: Final = 8
_PATIENCE: Final = 100

# By function: its programs go when it goes, of which they keep nothing.
_PROGRAMS: Final[weakref.WeakKeyDictionary[Any, dict[Donate, Programs]]] = (
    weakref.WeakKeyDictionary()
)


def programs_of(origin: Any, donate: Donate) -> Programs:
    of_origin = _PROGRAMS.get(origin)
    if of_origin is None:
        of_origin = _PROGRAMS.setdefault(origin, {})
    if donate not in of_origin:
        name = getattr(origin, "__name__", type(origin).__name__)
        of_origin.setdefault(donate, Programs(name, donate))  # or another thread's
    return of_origin[donate]
