"""Names of ours as another program writes them: the argument `rename=`."""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from .._tree._filters import compiled_glob


_SHOWN: Final = 4  # names in an error, to show how they are written

Rename: TypeAlias = Callable[[str], str] | Mapping[str, str] | None


class Renaming:
    """A function from a name to the one that `rename` makes of it.

    Two names may become one: tied weights are often stored once.
    """

    def __init__(self, rename: Rename, what: str):
        self.what = what
        self.globs: Mapping[str, str] = {}
        if isinstance(rename, Mapping):
            self.globs, self.f = rename, self.by_globs
        elif rename is None:
            self.f = lambda name: name
        elif callable(rename):
            self.f = rename
        else:
            raise TypeError(_NOT_A_RENAME.format(what, type(rename).__name__))
        for ours, theirs in self.globs.items():
            if not (isinstance(ours, str) and isinstance(theirs, str)):
                raise TypeError(_NOT_GLOBS.format(what, repr(ours), repr(theirs)))
            if ours.count("*") != theirs.count("*"):
                raise ValueError(_STARS.format(what, ours, theirs))
        self.patterns = {ours: compiled_glob(ours) for ours in self.globs}
        self.unused = dict.fromkeys(self.globs)
        self.names: dict[str, None] = {}

    def __call__(self, name: str) -> str:
        self.names[name] = None
        if not isinstance(new := self.f(name), str):
            raise TypeError(_NOT_A_NAME.format(self.what, name, type(new).__name__))
        return new

    def by_globs(self, name: str) -> str:
        found = {g: p.fullmatch(name) for g, p in self.patterns.items()}
        matches = {glob: match for glob, match in found.items() if match}
        for glob in matches:
            self.unused.pop(glob, None)
        for glob, match in matches.items():  # the first one
            first, *rest = self.globs[glob].split("*")
            pairs = zip(match.groups(), rest, strict=True)
            return first + "".join(star + text for star, text in pairs)
        return name

    def check_used(self) -> None:
        """Raise if a glob has matched no name so far."""
        if self.unused:
            globs = ", ".join(map(repr, self.unused))
            names = ", ".join(f"`{name}`" for name in list(self.names)[:_SHOWN])
            raise ValueError(_NO_MATCH.format(self.what, globs, names))


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
literal, and the first glob that matches counts. Names are such as {}."""
