"""Rules: mappings from filters to values, which give each array a value.

For each array the first filter that is not a kind and matches applies, in the order of
the mapping; else the most derived kind; else `...`, the key for every other array. All
functions that take rules use this module: `es.spec`, `es.vmap`, and those in the layers
above.
"""

import contextlib
import difflib
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax.tree_util as jtu

from .._errors import show
from .._kinds import kinds
from .._kinds.kinds import is_kind, Kind, OptState, Parameter
from .._typing import PyTree, Tree
from .combinators import globs_in, path_matches, useless_globs
from .filters import (
    bind,
    bind_all,
    check_filter,
    Filter,
    filter_text,
    Predicate,
)
from .followers import AbstractPerParameter, parameters_of
from .parts import is_inexact, layers_of, Part, parts
from .walk import is_array, leaves, Visit


def is_rules(x: object) -> bool:
    """Whether `x` is a rule mapping, rather than a pytree that is a dict."""
    return isinstance(x, Mapping) and any(map(_is_key, x))


def _is_key(x: object) -> bool:
    return x is ... or is_kind(x) or (callable(x) and not isinstance(x, type))


def check_rules(rules: Any, caller: str) -> None:
    """Raise `TypeError` unless `rules` is a mapping from filters and `...`.

    `caller` begins the message: "`es.spec`", for example.
    """
    if not isinstance(rules, Mapping):
        raise TypeError(_NOT_A_MAPPING.format(caller, type(rules).__qualname__))
    for key in rules:
        if key is not ...:
            name = key if isinstance(key, str) else "*.bias"
            is_kind_name = is_kind(vars(kinds).get(name))
            right = f"es.{name}" if is_kind_name else f"es.path_matches({name!r})"
            check_filter(key, _KEYS.format(caller, right))


def most_derived(kind: type | None, rules: Mapping[Any, Any]) -> Any:
    """The kind or `...` among the keys that applies to arrays of `kind`, or `None`."""
    for base in () if kind is None else kind.__mro__:
        if base in rules:
            return base
    return ... if ... in rules else None


def choose(
    rules: Mapping[Any, Any], tree: PyTree, caller: str, *, per_parameter: bool = True
) -> list[Any]:
    """The key of `rules` for each leaf of `tree`, in the order of flattening.

    The key is `None` for a leaf that is not an array or that nothing matches. `caller`
    begins the messages. With `per_parameter`, a moment or an average of a parameter has
    the key of the parameter; only the key `es.OptState` applies to moments themselves.

    Raises `TypeError` for a key that is not a filter, and `ValueError` for a filter
    that matches no array of the tree.
    """
    check_rules(rules, caller)
    matcher = RuleMatcher(rules, caller)
    keys_of = {id(tree): matcher.bind(tree)}
    parameters, keys = parameters_of(tree) if per_parameter else {}, []
    for visit in leaves(tree):
        where, parameter = parameters.get(visit.path, (tree, visit))
        if id(where) not in keys_of:
            keys_of[id(where)] = key_of = matcher.bind(where)
            for each in leaves(where):  # a filter may match a parameter without moments
                key_of(each)
        keys.append(keys_of[id(where)](parameter, visit.kind))
    matcher.check_matched()
    return keys


class RuleMatcher:
    """A rule mapping, and the filters that have matched an array so far.

    Rules may apply to several trees with different paths. A filter has to match in only
    one of them, and may fail in others: `es.under(lambda m: m.head)` raises an error
    where there is no `head`.
    """

    def __init__(self, rules: Mapping[Any, Any], caller: str):
        self.rules, self.caller = rules, caller
        filters = [key for key in rules if key is not ... and not is_kind(key)]
        self.filters: list[Filter] = filters
        self.matched: set[int] = set()
        self.errors: dict[int, Exception] = {}
        self.trees: list[PyTree] = []

    def bind(self, tree: PyTree) -> Callable[..., Any]:
        """The function that finds the key for a leaf of `tree`.

        The function takes a leaf. To look up the key for a moment or an average of this
        leaf, also pass the kind of the moment.
        """
        self.trees.append(tree)
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
                self._note_shadowed(predicates, i + 1, part)
                return self.filters[i]
        by_own_kind = most_derived(kind, self.rules)
        by_kind = most_derived(part.kind, self.rules)
        says_moments = is_kind(by_own_kind) and issubclass(by_own_kind, OptState)
        return by_own_kind if says_moments or not is_kind(by_kind) else by_kind

    def _note_shadowed(
        self, predicates: Sequence[Predicate], start: int, part: Part
    ) -> None:
        """Record later filters that match, too: they are redundant, not misspelled."""
        for i in {*range(start, len(predicates))} - self.matched:
            # In `{ndim < 2: a, shape[1] > 8: b}`, the second filter raises an error for
            # the arrays that the first one takes.
            with contextlib.suppress(Exception):
                if predicates[i](part):
                    self.matched.add(i)

    def check_matched(self, hint: str = "") -> None:
        """Raise `ValueError` for a filter that has matched no array in any tree."""
        for i, key in enumerate(self.filters):
            if i not in self.matched:
                said = self.caller, filter_text(key), _near(key, self.trees)
                raise ValueError(_NO_MATCH.format(*said) + hint) from self.errors.get(i)
            check_names(key, self.trees, self.caller)


_NOT_A_MAPPING: Final = """{0}: rules are a mapping from filters to values, such as \
`{{es.path_matches("*.bias"): a, es.Parameter: b, ...: c}}`, but this is a `{1}`."""

_KEYS: Final = """{0}: the keys of rules are filters, and not names: \
`{{{1}: value}}`."""

_NO_MATCH: Final = """{}: the filter `{}` matches no array.{} `es.parts(tree)` lists \
the arrays with their names and kinds. Only kinds and `...` may match nothing."""


def check_filters(filters: tuple[Filter, ...], tree: PyTree, caller: str) -> None:
    """Raise `ValueError` if one of the filters, or all together, select no array.

    `TypeError` for something that is not a filter, such as a second tree.
    """
    arrays = parts(tree)
    for each in filters:
        check_filter(each, _ONE_TREE)
        if not any(map(bind(each, tree), arrays)):
            text = filter_text(each)
            raise ValueError(_SELECTS_NOTHING.format(caller, text, _near(each, [tree])))
        check_names(each, [tree], caller)
    if filters and not any(map(bind_all(filters, tree), arrays)):
        text = ", ".join(map(filter_text, filters))
        cure = _ALL_OF_THEM.format(text)
        raise ValueError(_SELECTS_NOTHING.format(caller, text, cure))


def check_names(filter: Filter, trees: list[PyTree], caller: str) -> None:
    """Raise `ValueError` for a name in `filter` that no array of the trees has.

    As in `es.not_(es.path_matches("hed.*"))`, which selects every array.
    """
    if globs_in(filter):  # else `es.trainable` would cost a walk in each gradient
        for glob in useless_globs(filter, _names(trees)):
            wrong = path_matches(glob)
            said = caller, filter_text(wrong), _near(wrong, trees)
            raise ValueError(_NO_MATCH.format(*said))


_SELECTS_NOTHING: Final = """{}: the filter `{}` selects no array of the tree.{} \
`es.parts(tree)` lists the arrays with their names and kinds."""

_ALL_OF_THEM: Final = """ An array must satisfy all filters. To select the arrays \
that satisfy one of them: `es.any_of({})`."""

_ONE_TREE: Final = """Only filters follow the tree. Pass several trees as one, \
`es.save(path, (model, optimizer))`, and options by keyword: `es.save(path, model, \
metadata={"epoch": "3"})`, `es.load(path, model, strict=False)`."""


def nothing_selected(caller: str, filter: Filter, tree: PyTree) -> ValueError:
    """The error for a filter that selects no inexact array of a model.

    `caller` is the call and the name of the argument: "es.grad(wrt", for example.
    """
    is_parameter, is_selected = bind(Parameter, tree), bind(filter, tree)
    frozen = [part.frozen for part in parts(tree) if is_parameter(part)]
    said = filter_text(filter), len(frozen), sum(frozen), _near(filter, [tree])
    message = _NOTHING.format(caller, *said)
    for part in parts(tree):
        if not is_inexact(part) and (is_parameter(part) or is_selected(part)):
            message += _NOT_INEXACT.format(part.name or "The array", show(part.value))
            break
    return ValueError(misplaced(tree) or message)


def _near(filter: Any, trees: list[PyTree]) -> str:
    """The names of arrays that are nearest to the globs in a filter, as a sentence."""
    globs, names = globs_in(filter), _names(trees)
    near = [x for glob in globs for x in difflib.get_close_matches(glob, names, 3, 0)]
    return f" The nearest names: `{'`, `'.join(near)}`." if any(near) else ""


def _names(trees: list[PyTree]) -> list[str]:
    """The names of all arrays; in a stack, one for each layer."""
    arrays = [part for tree in trees for part in parts(tree)]
    return [x.name for part in arrays for x in layers_of(part, alike=True) or [part]]


def misplaced(x: Any) -> str:
    """The error message if an optimizer or average is used as a model; else `""`."""
    x = x[-1] if isinstance(x, tuple) and x else x  # the result of `update`
    said = _MISPLACED.format(type(x).__name__)
    return said if isinstance(x, AbstractPerParameter) else ""


_NOTHING: Final = """`{}={})` selects no inexact array of the model, which has {} \
parameters, {} of them frozen (`es.unfreeze`).{} `es.parts(model)` lists all names."""

_NOT_INEXACT: Final = """ `{}` is `{}`, but only floats and complex numbers can be \
trained: `x.astype(float)`."""

_MISPLACED: Final = """`es.{}` was passed instead of the model, or in a tuple with it. \
Pass the model: `model, optimizer = optimizer.update(grads, model)`, and first: \
`step(model, optimizer, x)`."""


def spec(tree: Tree, values: Mapping[Any, Any], default: Any = None) -> Tree:
    """A tree of values chosen by rules: vmap axes, shardings, labels.

    **Arguments:**

    - `tree`: any pytree.
    - `values`: a mapping from filters to values. For each array, the first filter that
        is not a kind and matches applies, in the order of the mapping; else the most
        derived kind; else `...`, the key for every other array.
    - `default`: the value for all other leaves.

    **Returns:**

    The tree with each leaf replaced by a value. In an `es.Optimizer` or an `es.Ema`,
    each moment or average gets the value of its parameter; only the key `es.OptState`
    applies to the moments themselves.

    To `optax.multi_transform`, pass `lambda _: labels`, because optax calls labels that
    are callable, and many models are.

    **Raises:**

    - `TypeError`: a key is not a filter.
    - `ValueError`: a filter that is not a kind matches no array of the tree.

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
