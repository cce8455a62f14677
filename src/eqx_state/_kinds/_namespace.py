"""The names that string annotations may use, and where each is looked up.

Annotations are read when they are first needed, long after the class statement. Names
that were local to the function around it are gone by then, so those that an annotation
mentions are remembered when the class is made.
"""

import abc
import builtins
import collections
import contextlib
import re
import sys
import types
import typing
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, ForwardRef

import equinox as eqx

from .._compat import own_annotations
from ._spec import unresolved


# What only the frame of the class statement knew: local names and globals.
_Statement = tuple[dict[str, Any], Mapping[str, Any]]
_statements = weakref.WeakKeyDictionary[type, _Statement]()


def remember_statement(cls: type) -> None:
    """Keep the names that the string annotations of `cls`, just made, may need.

    Only local names that occur in one of them are kept, and no frame.
    """
    texts = [a for a in own_annotations(cls).values() if _has_string(a)]
    if not texts:
        return
    names = set(re.findall(r"\w+", " ".join(map(repr, texts))))
    frame: types.FrameType | None = sys._getframe()
    while frame.f_back is not None and _is_machinery(frame):
        frame = frame.f_back
    found: dict[str, Any] = {}
    frame_globals, code = frame.f_globals, frame.f_code
    while frame is not None:
        # Only the functions that lexically enclose the statement count, not callers.
        if frame.f_code is code or code in frame.f_code.co_consts:
            code = frame.f_code
            if frame.f_locals is not frame_globals:
                for name, value in frame.f_locals.items():
                    if name in names and not eqx.is_array(value):
                        found.setdefault(name, value)
        frame = frame.f_back
    _statements[cls] = found, frame_globals


def globals_of(cls: type) -> Mapping[str, Any]:
    """The globals of the code around the statement of `cls`, if they are known."""
    return _statements[cls][1] if cls in _statements else {}


def _is_machinery(frame: types.FrameType) -> bool:
    """Whether a frame only helps to make the class: ours, Equinox's or Python's."""
    if frame.f_globals is vars(abc) or frame.f_globals is vars(types):
        return True
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("eqx_state", "equinox")


def _has_string(annotation: Any) -> bool:
    return isinstance(annotation, (str, ForwardRef)) or any(
        map(_has_string, typing.get_args(annotation))
    )


class Namespace(collections.ChainMap[str, Any]):
    """Where the names in the string annotations of `cls` are looked up.

    `types`: what type variables stand for.
    """

    def __init__(self, cls: type, types: dict[Any, Any]):
        module = vars(sys.modules.get(cls.__module__, builtins))
        local, frame_globals = _statements.get(cls, ({}, module))
        fields = own_annotations(cls)
        # A field's default hides nothing: `jax: Array = field()` in the body.
        body = {k: v for k, v in vars(cls).items() if k not in fields}
        around = (local, frame_globals, vars(builtins))
        super().__init__({cls.__name__: cls}, body, *around)
        self.types = types
        self.open_aliases: list[Any] = []

    @contextlib.contextmanager
    def where(self, types: dict[Any, Any]) -> Iterator[None]:
        """Let the type variables stand for these meanwhile."""
        outer, self.types = self.types, types
        try:
            yield
        finally:
            self.types = outer

    def __missing__(self, name: str) -> Any:
        return unresolved(name)
