"""The mutable scope: which modules may be written, and for how long.

A scope owns private copies of modules. Each owned `es.Module` stores an `Ownership`
beside its fields. A module without an `Ownership` cannot be written, whatever scopes
are open around the code.

A scope records the trace in which it was created. A write in a different trace would
leak the tracers of that trace, and is an error.
"""

import copy
import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Final, Self

from .._compat import trace_state
from .._kinds.kinds import is_kind, State
from .._tree.base import (
    BaseModule,
    is_module,
    ownership_of,
    set_ownership,
)
from .._tree.compare import difference
from .._tree.context import Context
from .._tree.dtypes import fit_leaf
from .._tree.walk import name_of, Traversal, traverse
from .._typing import KeyPath
from .codecs import Codec, Numpy, Shared, Tags
from .observe import Observer, OBSERVING


Kinds = tuple[type, ...]


def as_kinds(kinds: Any, caller: str) -> Kinds:
    """The kinds that may be written, as a tuple."""
    given = tuple(kinds) if isinstance(kinds, (tuple, list)) else (kinds,)
    for kind in given:
        if not is_kind(kind):
            raise TypeError(_KINDS.format(caller, repr(kind)))
    return given


_KINDS: Final = """`{}(..., kinds={})`: `kinds` must be a kind such as `es.State`, or \
a tuple of kinds; `es.TreePart` allows all."""


# The open scopes of all threads, by `id`.
_OPEN: "Final[dict[int, Scope]]" = {}


def is_any_open() -> bool:
    """Whether any scope is open; if not, no module is owned."""
    return bool(_OPEN)


def scopes_open_here() -> "list[Scope]":
    """The open scopes of this thread, the outermost first."""
    thread = threading.get_ident()
    return [scope for scope in [*_OPEN.values()] if scope.thread == thread]


# The observers that record sown values. Each entry has the key of an observer, the path
# of a part of the scope's model, and the path of the same part in the observer's model.
Reports = tuple[tuple[Hashable, KeyPath, KeyPath], ...]

# The sown values by `sow.Key`. An `OrderedDict`, because JAX sorts the keys of a dict,
# and the order is a part of the result.
Sown = OrderedDict[Any, list[Any]]


class Scope:
    """Permission to write arrays of some kinds, in one trace and thread, until closed.

    - `observer`: intercepts the calls of modules, and records values in `sown`.
    - `reports`: the observers that record the sown values of modules in this scope.
    - `codecs`: what is represented differently inside, in addition to the usual.
    - `layers`: for each stack whose layers run around this code, the number of the
        running layer, and how many layers there are. Only known to an `observer`.
    - `written`: the modules that were written, with the name of a written field.
    - `traversals`: earlier ones of the roots of private copies, by `id`, so that a
        transform need not walk the whole model.
    """

    # Whether this is an `InitScope`, in which the structure may change.
    is_initializing: ClassVar[bool] = False

    def __init__(
        self,
        kinds: Kinds,
        observer: Observer | None = None,
        reports: Reports = (),
        codecs: Sequence[Codec] = (),
    ):
        self.kinds = kinds
        tags = [] if observer is None else [Tags(observer)]
        self.codecs: list[Codec] = [Numpy(), Shared(), *codecs, *tags]
        self.observer = observer
        self.reports = reports
        self.layers: tuple[tuple[Any, int], ...] = ()
        self._begin()

    def _begin(self) -> None:
        """Set what belongs to this scope alone, in the active trace and thread."""
        self.sown: Sown = OrderedDict()
        self.trace = trace_state()
        self.is_open = True
        self.written: dict[int, tuple[BaseModule, str]] = {}
        self.traversals: dict[int, Traversal] = {}
        self.thread = threading.get_ident()

    def check_thread(self) -> None:
        """Raise `RuntimeError` in any thread but the one that opened the scope."""
        if self.is_open and self.thread != threading.get_ident():
            raise RuntimeError(_OTHER_THREAD)

    @property
    def is_here(self) -> bool:
        """Whether the scope's trace is active, so that it may store values."""
        return self.trace == trace_state()

    def __enter__(self) -> Self:
        _OPEN[id(self)] = self
        if self.observer is not None:
            observing = {**OBSERVING.get(), self.observer.key: self}
            self._token = OBSERVING.set(observing)
        return self

    def __exit__(self, *_: object) -> None:
        if self.observer is not None:
            OBSERVING.reset(self._token)
        self.is_open = False
        # The modules refer back to the scope. Break the cycle, so that they are freed
        # at once instead of by the garbage collector.
        self.written.clear()
        self.traversals.clear()
        _OPEN.pop(id(self), None)

    def inner(self) -> Self:
        """A scope like this one, for the trace of a transform inside it."""
        new = copy.copy(self)  # with the same codecs
        new._begin()
        return new

    @property
    def cache_key(self) -> Any:
        """Hashable; equal for scopes in which a call has the same trace."""
        return (
            self.kinds,
            self.reports,
            self.observer and self.observer.key,
            tuple(codec.cache_key for codec in self.codecs),
        )

    @property
    def state_kinds(self) -> Kinds:
        """The kinds that make a module stateful here: also a buffer that may change."""
        return State, *(kind for kind in self.kinds if kind.covering)

    def allows(self, kind: type | None) -> bool:
        """Whether an array of this kind (`None`: any other leaf) may be written."""
        return kind is not None and issubclass(kind, self.kinds)

    def owns(self, x: Any) -> bool:
        """Whether `x` is an `es.Module` that this scope owns."""
        ownership = ownership_of(x) if is_module(x) else None
        return ownership is not None and ownership.scope is self

    def accept(self, value: Any, path: KeyPath, context: Context) -> Any:
        """The value to store when `value` is written. An `InitScope` draws it."""
        return value

    def fit_leaf(self, old: Any, new: Any, path: KeyPath) -> Any:
        """`new` in the dtype that `old` has here; `ValueError` if it does not fit."""
        if new is old:
            return new
        for codec in self.codecs:
            new = codec.write(old, new, path)
        return fit_leaf(old, new, name_of(path))

    def take(self, traversal: Traversal) -> bool:
        """Own the modules of a tree, as the codecs change them.

        Returns whether the treedef has changed.
        """
        changed = [codec.adopt(traversal.visits) for codec in self.codecs]
        own(traversal, self)
        return any(changed)

    def note_write(self, module: BaseModule, name: str, old: Any, new: Any) -> None:
        """Called for each write of a field. Only an `InitScope` needs it."""


def is_observed() -> bool:
    """Whether an observer intercepts calls of modules here."""
    return bool(OBSERVING.get())


def enter_layer(number: Any, count: int) -> None:
    """Tell the observers which layer of a stack runs, in the scopes of this step."""
    for scope in OBSERVING.get().values():
        scope.layers = (*scope.layers, (number, count))


@dataclasses.dataclass(slots=True)
class Ownership:
    """The scope that owns a module, and the module's path and context."""

    scope: Scope
    path: KeyPath
    context: Context


def structure_error(old: Any, new: Any, path: KeyPath = ()) -> ValueError:
    """The error for a part of the model, at `path`, whose structure has changed."""
    return ValueError(_STRUCTURE.format(difference(old, new, path=path)))


_STRUCTURE: Final = """A call keeps the structure of the model, but this one changed \
it, {}. Construct the model with the final structure of every field: zeros instead of \
`None`, lists of the final length. Switch modes outside the call, by `train` and \
`eval`. If a layer takes shapes from an input, initialize it first: `model = \
model.init(42, x)`."""

_OTHER_THREAD: Final = """This thread wrote state, or ran a transform of `es`, in a \
scope of `es.mutable` that a different thread has opened. A scope and its private copy \
belong to one thread. Open a scope in each thread:

    threading.Thread(target=lambda: results.append(es.mutable(model)(x)))"""


def own(traversal: Traversal, scope: Scope) -> None:
    """Give the modules of a private copy to a scope."""
    for path, node, context, is_leaf in traversal.visits:
        if not is_leaf and is_module(node):
            set_ownership(node, Ownership(scope, path, context))


def is_owned(x: Any) -> bool:
    """Whether `x` is an `es.Module` that an open scope owns."""
    # The `is_leaf` of many flattenings, so without a call of `is_module`.
    ownership = ownership_of(x) if BaseModule in type(x).__mro__ else None
    return ownership is not None and ownership.scope.is_open


def traversal_of(module: Any) -> Traversal:
    """The traversal of an owned module, from the model that its scope owns."""
    ownership = ownership_of(module)
    if (known := ownership.scope.traversals.get(id(module))) is not None:
        return known.again(module)
    return traverse(module, ownership.path, ownership.context)
