"""Names of ours as another program writes them: the argument `rename=`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from .._tree._filters import compiled_glob


Rename: TypeAlias = Callable[[str], str] | Mapping[str, str] | None


def renamed(names: Iterable[str], rename: Rename, what: str) -> dict[str, str]:
    """For each name what `rename` makes of it: a function, or a mapping of globs.

    Two names may become one: tied weights are often stored once.
    """
    if isinstance(rename, Mapping):
        return _by_globs(list(names), rename, what)
    if rename is not None and not callable(rename):
        raise TypeError(_NOT_A_RENAME.format(what, type(rename).__name__))
    new = {name: name if rename is None else rename(name) for name in names}
    for name, other in new.items():
        if not isinstance(other, str):
            raise TypeError(_NOT_A_NAME.format(what, name, type(other).__name__))
    return new


def _by_globs(names: list[str], globs: Mapping[str, str], what: str) -> dict[str, str]:
    for ours, theirs in globs.items():
        if not (isinstance(ours, str) and isinstance(theirs, str)):
            raise TypeError(_NOT_GLOBS.format(what, repr(ours), repr(theirs)))
        if ours.count("*") != theirs.count("*"):
            raise ValueError(_STARS.format(what, ours, theirs))
    patterns = {compiled_glob(ours): theirs for ours, theirs in globs.items()}
    unused = [
        ours
        for ours, pattern in zip(globs, patterns, strict=True)
        if not any(map(pattern.fullmatch, names))
    ]
    if unused:
        raise ValueError(_NO_MATCH.format(what, ", ".join(map(repr, unused))))
    return {name: _first_match(name, patterns) for name in names}


def _first_match(name: str, patterns: Mapping[Any, str]) -> str:
    for pattern, theirs in patterns.items():
        if (match := pattern.fullmatch(name)) is not None:
            first, *rest = theirs.split("*")
            pairs = zip(match.groups(), rest, strict=True)
            return first + "".join(star + text for star, text in pairs)
    return name


_NOT_A_RENAME: Final = """`{}(..., rename=...)` takes a function from our name to \
theirs, or a dictionary from globs to globs, `{{"layers[*].*": "blocks.*.*"}}`. \
A `{}` was given."""

_NOT_A_NAME: Final = """`{}(..., rename=...)`: the function made of the name `{}` a \
`{}`. Return a string: the name itself if it stays."""

_NOT_GLOBS: Final = """`{}(..., rename=...)`: the entry `{}: {}` is not one from a \
string to a string."""

_STARS: Final = """`{}(..., rename={{"{}": "{}"}})`: each `*` on the left stands for \
a part of a name, and goes in order to a `*` on the right. There must be as many on \
both sides."""

_NO_MATCH: Final = """`{}(..., rename=...)`: no array has a name that matches {}. \
Globs match the whole name, as in `es.path_matches`: `*` is anything, brackets are \
literal, and the first glob that matches counts."""
