"""Rules: one language for which array gets which value.

A rule mapping leads from filters to values. For each array the first filter that is not
a kind and matches wins, in the order of the mapping; else the most derived kind; else
`...`, which stands for every other array. Everything that chooses by kind or by path
asks here: `es.spec`, `es.vmap`, and what the layers above add.
"""

import abc
import contextlib
import functools as ft
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._kinds.kinds import is_kind, Kind, OptState
from .._typing import KeyPath, PyTree
from .filters import bind, check_filter, Filter, Predicate, written
from .parts import Part
from .walk import is_array, leaves, Visit, walk


# --- Which parameter a moment of an optimizer, or an array of an average, belongs to.
#
# Rules for the parameters of a model also hold for what is kept beside each of them:
# its momentum lies where the parameter lies, and under its name. The class that keeps
# such arrays is an `AbstractFollower`. Its copies of the model are found as nodes of
# the model's own class: nothing has to be known of the structure around them.


class AbstractFollower(eqx.Module):
    """A module that keeps arrays for the parameters of a model."""

    @abc.abstractmethod
    def _followed(self) -> PyTree:
        """The model it was made for, with a shape or an array at each parameter.

        `None` if it was not made for one yet.
        """


class Followed(NamedTuple):
    """A parameter, and the tree in which its path and its name begin."""

    tree: PyTree
    parameter: Visit


def followed(tree: PyTree) -> dict[KeyPath, Followed]:
    """By the path of each array in `tree` that belongs to a parameter: that parameter.

    It is the one in `tree`, if the model is there, too: `(model, optimizer)`. Otherwise
    it is that of the model that the follower was made for, where it has a shape and no
    value.
    """
    found: dict[KeyPath, Followed] = {}
    for visit in walk(tree):
        if isinstance(visit.node, AbstractFollower):
            model = visit.node._followed()
            parameters = _arrays(model)
            if not parameters:
                continue
            where, start = _model_in(tree, visit, model, parameters)
            by_path = _arrays(where)
            for path, below in _copies(visit, model, parameters):
                found[path] = Followed(where, by_path[(*start, *below)])
    return found


def followed_parameters(tree: PyTree) -> list[Visit]:
    """The parameters that the followers in `tree` were made for.

    A follower need not have arrays for them: `optax.sgd` keeps no moments.
    """
    return [
        parameter
        for visit in walk(tree)
        if isinstance(visit.node, AbstractFollower)
        for parameter in _arrays(visit.node._followed()).values()
    ]


def _arrays(tree: PyTree) -> dict[KeyPath, Visit]:
    return {visit.path: visit for visit in leaves(tree) if is_array(visit.node)}


def _copies(
    follower: Visit, model: PyTree, parameters: dict[KeyPath, Visit]
) -> Iterator[tuple[KeyPath, KeyPath]]:
    """The paths of the follower's arrays in its tree, and of their parameters."""

    def is_copy(node: PyTree) -> bool:
        if not _is_alike(node, model):
            return False
        paths = _arrays(node).keys()
        return bool(paths) and paths <= parameters.keys()

    for visit in leaves(follower.node, follower.path, is_leaf=is_copy):
        if is_copy(visit.node):
            for below in _arrays(visit.node):
                yield (*visit.path, *below), below


def _is_alike(node: PyTree, model: PyTree) -> bool:
    if not is_array(model):
        return type(node) is type(model)
    # The whole model is one array. Neither a count nor a learning rate is its moment.
    is_inexact = is_array(node) and jnp.issubdtype(node.dtype, jnp.inexact)
    return is_inexact and node.shape == model.shape


def _model_in(
    tree: PyTree, follower: Visit, model: PyTree, parameters: dict[KeyPath, Visit]
) -> tuple[PyTree, KeyPath]:
    """The tree that has the model, and the model's path there.

    Of several models of a class it is the one that is nearest to the follower. If that
    cannot be told, it is none of them.
    """

    def stops(node: PyTree) -> bool:
        is_model = _is_alike(node, model) and parameters.keys() <= _arrays(node).keys()
        return is_model or isinstance(node, AbstractFollower)

    models = [
        visit.path
        for visit in leaves(tree, is_leaf=stops)
        if stops(visit.node) and not isinstance(visit.node, AbstractFollower)
    ]
    near = [_common(path, follower.path) for path in models]
    models = [path for path, n in zip(models, near, strict=True) if n == max(near)]
    return (tree, models[0]) if len(models) == 1 else (model, ())


def _common(a: KeyPath, b: KeyPath) -> int:
    """How many keys two paths begin with in common."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


_Tree = TypeVar("_Tree")


def is_rules(x: object) -> bool:
    """Whether `x` is meant as a rule mapping, and not as a pytree that is a dict."""
    return isinstance(x, Mapping) and any(map(_is_key, x))


def _is_key(x: object) -> bool:
    return x is ... or is_kind(x) or (callable(x) and not isinstance(x, type))


def check_rules(rules: Any, what: str) -> None:
    """Raise `TypeError` unless `rules` is a mapping from filters and `...`.

    `what` begins the message: "`es.spec`", for example.
    """
    if not isinstance(rules, Mapping):
        raise TypeError(_NOT_A_MAPPING.format(what, type(rules).__qualname__))
    for key in rules:
        if key is not ...:
            try:
                check_filter(key)
            except TypeError as error:
                raise TypeError(_NOT_A_KEY.format(what, key, error)) from None


def most_derived(kind: type | None, rules: Mapping[Any, Any]) -> Any:
    """The kind or `...` among the keys that applies to arrays of `kind`, or `None`."""
    for base in () if kind is None else kind.__mro__:
        if base in rules:
            return base
    return ... if ... in rules else None


def choose(
    rules: Mapping[Any, Any], tree: PyTree, what: str, *, follow: bool = True
) -> list[Any]:
    """The key of `rules` for each leaf of `tree`, in the order of flattening.

    It is `None` for what is not an array, and where nothing matches. `what` begins the
    messages. With `follow` an array of an optimizer or an average that belongs to a
    parameter has that parameter's key; only the kind `es.OptState` means the moments
    themselves.

    Raises `TypeError` for a key that is not a filter, and `ValueError` for a filter
    that matches no array of the tree.
    """
    check_rules(rules, what)
    asked = Asked(rules, what)
    keys_of = {id(tree): asked.bind(tree)}
    parameters, keys = followed(tree) if follow else {}, []
    for visit in leaves(tree):
        where, at = parameters.get(visit.path, (tree, visit))
        if id(where) not in keys_of:
            keys_of[id(where)] = key_of = asked.bind(where)
            for each in leaves(where):  # also what has no moments: it is a match
                key_of(each)
        keys.append(keys_of[id(where)](at, visit.kind))
    asked.check_matched()
    return keys


class Asked:
    """A rule mapping, and which of its filters have matched an array so far.

    Rules may be asked in several trees, each of which has names of its own. Then a
    filter need not match, or even make sense, in all of them: `lambda m: m.head` raises
    an error where there is no head.
    """

    def __init__(self, rules: Mapping[Any, Any], what: str):
        self.rules, self.what = rules, what
        filters = [key for key in rules if key is not ... and not is_kind(key)]
        self.filters: list[Filter] = filters
        self.matched: set[int] = set()
        # For each array that a filter took, the filters behind that one.
        self.behind: list[tuple[Part, dict[int, Predicate]]] = []
        self.errors: list[Exception | None] = [None for _ in filters]
        self.trees = 0

    def bind(self, tree: PyTree) -> Callable[..., Any]:
        """The function that finds the key for a leaf of `tree`.

        It takes the leaf, and the kind of the array that the key is for, if that one
        only belongs to the leaf.
        """
        self.trees += 1
        predicates = [self._bind(i, tree) for i in range(len(self.filters))]
        return ft.partial(self._key, predicates)

    def _bind(self, i: int, tree: PyTree) -> Predicate:
        try:
            return bind(self.filters[i], tree)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.errors[i] = error
            return lambda part: False

    def _key(
        self, predicates: Sequence[Predicate], visit: Visit, kind: Kind | None = None
    ) -> Any:
        if not is_array(visit.node):
            return None
        part = Part(visit)
        for i, matches in enumerate(predicates):
            if matches(part):
                self.matched.add(i)
                behind = range(i + 1, len(predicates))
                self.behind.append((part, {n: predicates[n] for n in behind}))
                return self.filters[i]
        by_own_kind = most_derived(kind, self.rules)
        by_kind = most_derived(part.kind, self.rules)
        says_moments = is_kind(by_own_kind) and issubclass(by_own_kind, OptState)
        return by_own_kind if says_moments or not is_kind(by_kind) else by_kind

    def check_matched(self, hint: str = "") -> None:
        """Raise `ValueError` for a filter that has matched nothing in any tree."""
        for i, key in enumerate(self.filters):
            if i not in self.matched and not self._is_shadowed(i):
                error = self.errors[i]
                if error is not None and self.trees == 1:
                    raise error
                message = _NO_MATCH.format(self.what, written(key))
                raise ValueError(message + hint) from error

    def _is_shadowed(self, i: int) -> bool:
        """Whether a filter matches an array that an earlier one took: not a typo."""
        for part, predicates in self.behind:
            # It may rely on being asked last: `lambda part: part.value.shape[1] > 8`.
            with contextlib.suppress(Exception):
                if i in predicates and predicates[i](part):
                    return True
        return False


_NOT_A_MAPPING: Final = """{0}: rules are a mapping from filters to values, and a \
`{1}` was given: `{{es.path_matches("*.bias"): a, es.Parameter: b, ...: c}}`."""

_NOT_A_KEY: Final = """{}: the key `{!r}` is not a kind, another filter or `...`. {}"""

_NO_MATCH: Final = """{}: the filter `{}` matches no array. `es.parts(tree)` lists the \
arrays with their names and kinds. Only kinds and `...` may match nothing."""


def spec(tree: _Tree, values: Mapping[Any, Any], default: Any = None) -> _Tree:
    """A tree of values chosen by rules: vmap axes, shardings, labels.

    **Arguments:**

    - `tree`: any pytree.
    - `values`: from filters to values. For each array the first filter that is not a
        kind and matches counts, in the order of the mapping; else the most derived
        kind; else the key `...`, which stands for every other array.
    - `default`: the value for all other leaves.

    **Returns:**

    The tree with a value in place of each leaf. In an `es.Optimizer` or an `es.Ema`
    what belongs to a parameter gets the parameter's value, by the parameter's name and
    kind; the key `es.OptState` means the moments themselves.

    To `optax.multi_transform` pass `lambda _: labels`, since it would call labels that
    are callable, as many models are.

    **Raises:**

    - `TypeError`: a key is not a filter.
    - `ValueError`: a filter that is not a kind matches no array of the tree, which is a
        typo.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr

        norm = es.nn.BatchNorm(3)
        axes = es.spec(norm, {es.State: 0}, default=None)
        assert (axes.weight, axes.mean) == (None, 0)

        mlp = eqx.nn.MLP(2, 2, 4, 1, key=jr.key(0))
        decay = es.spec(mlp, {es.path_matches("*.bias"): 0.0, es.Parameter: 0.1})
        assert (decay.layers[0].weight, decay.layers[0].bias) == (0.1, 0.0)
        ```
    """
    keys = choose(values, tree, "`es.spec`")
    chosen = [default if key is None else values[key] for key in keys]
    return jtu.tree_unflatten(jtu.tree_structure(tree), chosen)
