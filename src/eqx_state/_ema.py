"""`es.Ema`: an exponential moving average of a model's parameters, as one pytree."""

import numbers
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from ._errors import NotInitializedError, show
from ._kinds.kinds import Buffer, is_kind, Parameter
from ._state.init import check_ready
from ._tree.base import is_eqx_module
from ._tree.compare import difference, is_hole, same_modes
from ._tree.filters import bind_to_visits, check_filter, Filter, written
from ._tree.parts import Part
from ._tree.rules import AbstractFollower
from ._tree.select import update
from ._tree.walk import copy_tree, is_numpy, leaves, Visit
from ._typing import PyTree


class _Leaf(NamedTuple):
    """An array that is averaged: its dtype in the model, and whether a mean is kept."""

    dtype: Any
    is_mean: bool


class Ema(AbstractFollower):
    """The exponential moving average of a model, which passes through `jit`.

    With decays `d_1, …, d_n` the model of update `i` has the weight `(1 - d_i)` times
    the product of all later decays. With `debias` the weights are divided by their sum,
    so that the average is one of the models alone, and not of zeros before them (Kingma
    and Ba, 2015). Sums are accumulated in float32, or in float64 for float64.

    Its arrays are constants, `es.Buffer`: wherever an `Ema` is held, it is neither
    trained nor written.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp

        ema = es.Ema(0.5).init({"w": jnp.zeros(2)})
        for value in (1.0, 4.0):
            ema = ema.update({"w": jnp.full(2, value)})
        assert (ema.model["w"] == (0.25 * 1.0 + 0.5 * 4.0) / 0.75).all()
        ```
    """

    # The last model, with the sums, in float32, in the place of what is averaged.
    sums: Buffer[Any]
    # A model of nothing but means, which `sums` lacks; `None` if there are none. While
    # an array is frozen its mean is kept, which is the array itself as long as nobody
    # replaces it. The rounding errors of a sum would add up to a thousandth with a
    # decay of 0.9999. In files both have names of their own, so that one cannot be
    # loaded for the other.
    means: Buffer[Any]
    weight: Buffer[Any]  # the sum of the weights
    step: Buffer[Any]  # how many updates there were
    decay: float | Callable[[Any], Any] = eqx.field(static=True)
    debias: bool = eqx.field(static=True)
    on: Filter = eqx.field(static=True)
    # For each leaf of the model; `None` where it is not averaged.
    _leaves: tuple[_Leaf | None, ...] | None = eqx.field(static=True, repr=False)

    def __init__(
        self,
        decay: float | Callable[[Any], Any],
        *,
        debias: bool = True,
        on: Filter = Parameter,
    ):
        """**Arguments:**

        - `decay`: how much of the average remains in an update, at least 0 and less
            than 1; or a schedule, as in optax: a function of the number of updates
            before this one, such as `lambda step: jnp.minimum(0.999, (1 + step) / (10 +
            step))`. It is static: make a schedule once.
        - `debias`: whether the weights are divided by their sum.
        - `on`: the filter for what is averaged, of which inexact arrays count. All
            other arrays are those of the last model. Default: the parameters. A
            parameter that has been frozen all the time, and is the same in all models,
            is exactly its own average.

        **Raises:**

        - `TypeError`: `decay` is neither a number nor a schedule, or `on` not a filter.
        - `ValueError`: `decay` is negative, or 1 or more.
        """
        self.decay = _checked_decay(decay)
        self.debias = bool(debias)
        check_filter(on)
        self.on = on
        self.sums = self.means = self.weight = self.step = self._leaves = None

    def init(self, model: PyTree) -> Self:
        """The average before the first update, with copies of the arrays of `model`.

        **Raises:**

        - `es.NotInitializedError`: the model still holds an `es.Initializer`.
        - `ValueError`: `on` selects no inexact array, and is not a kind; or one
            stateful module is in two places of the model.
        """
        check_ready(model)
        is_averaged = self._is_averaged(model)
        new, now = [], list[_Leaf | None]()
        for visit in leaves(model):
            if is_averaged(visit):
                x = jnp.asarray(visit.node)
                new.append(jnp.copy(x).astype(_wide(x.dtype)))
                now.append(_Leaf(x.dtype, self._keeps_mean(visit)))
            else:
                new.append(_copy(visit.node))
                now.append(None)
        wide = [jnp.finfo(_wide(leaf.dtype)) for leaf in now if leaf is not None]
        if not wide and not is_kind(self.on):
            raise ValueError(_NOTHING.format(written(self.on)))
        widest = max(wide, key=lambda info: info.bits, default=jnp.finfo(jnp.float32))
        both = jtu.tree_unflatten(jtu.tree_structure(model), new)
        weight, step = jnp.zeros((), widest.dtype), jnp.zeros((), jnp.int32)
        return self._with(both, weight, step, now)

    def update(self, model: PyTree) -> Self:
        """The average after one more model, which may be in another mode.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called; or the model still holds
            an `es.Initializer`.
        - `ValueError`: the model has another structure, or arrays of other shapes, than
            that of `init`, or `on` selects others. The message names the first path.
        """
        rest = iter(self._initialized("update"))
        check_ready(model)
        self._check_structure(model)
        decay = self._decay_now()
        weight = _product(decay, self.weight) + (1 - decay)
        is_averaged = self._is_averaged(model)
        new, now = [], list[_Leaf | None]()
        # Holes count, since Equinox's flags may be holes in one of the two.
        olds: list[Any] = jtu.tree_leaves(self._followed(), is_leaf=is_hole)
        for old, visit in zip(olds, leaves(model, is_leaf=is_hole), strict=True):
            leaf = None if old is None else next(rest)
            if is_averaged(visit) is not (leaf is not None):
                how = _HOW[leaf is not None]
                raise ValueError(_SELECTED.format(visit.name, *how))
            if old is not None and leaf is not None:
                x = jnp.asarray(visit.node)
                _check_like(old, x, visit.name)
                is_mean = leaf.is_mean and self._keeps_mean(visit)
                now.append(_Leaf(x.dtype, is_mean))
                total = self._total(old) if leaf.is_mean and not is_mean else old
                add = self._new_mean if is_mean else self._sum
                new.append(add(total, x, decay, weight))
            elif visit.node is not None:
                new.append(_copy(visit.node))
                now.append(None)
        both = jtu.tree_unflatten(jtu.tree_structure(model), new)
        return self._with(both, weight, self.step + 1, now)

    @property
    def model(self) -> Any:
        """The averaged model, in the mode of the last one.

        What is not averaged is as in the last model. Before the first update it is the
        model given to `init`.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called.
        """
        each = self._initialized("model")
        values, treedef = jtu.tree_flatten(self._followed())
        new = []
        for x, leaf in zip(values, each, strict=True):
            if leaf is not None:
                x = (x if leaf.is_mean else self._mean(x)).astype(leaf.dtype)
            new.append(x)
        return jtu.tree_unflatten(treedef, new)

    def _sum(self, old: Array, x: Array, decay: Array, weight: Array) -> Array:
        # Where the old weight is zero, what `init` has put there does not count; and a
        # model of weight zero is the average of nothing.
        def one(old: Array, x: Array) -> Array:
            d, w, before = (y.astype(old.dtype) for y in (decay, weight, self.weight))
            added = jnp.where(w == 0, x, _product(1 - d, x))
            return _unless_zero(before, _product(d, old)) + added

        return _on_reals(one, old, x.astype(old.dtype))

    def _new_mean(self, old: Array, x: Array, decay: Array, weight: Array) -> Array:
        def one(old: Array, x: Array) -> Array:
            d, w, before = (y.astype(old.dtype) for y in (decay, weight, self.weight))
            moved = old + (1 - d) / jnp.where(w == 0, 1, w) * (x - old)
            # The array of `init` does not count, and an infinity has not moved, either.
            has_stayed = jnp.isinf(x) & (x == old)
            return jnp.where((before == 0) | has_stayed, x, moved)

        return _on_reals(one, old, x.astype(old.dtype))

    def _total(self, mean: Array) -> Array:
        """The sum so far for an array that is frozen no more."""

        def one(x: Array) -> Array:
            return _product(self.weight.astype(x.dtype), x)

        return _on_reals(one, mean)

    def _mean(self, total: Array) -> Array:
        if not self.debias:
            return total

        def one(total: Array) -> Array:
            weight = jnp.where(self.weight == 0, 1, self.weight).astype(total.dtype)
            # By an array, which a select again makes of the scalar: XLA would replace
            # the division by a multiplication, which rounds twice.
            return total / jnp.where(jnp.isnan(total), total, weight)

        return _on_reals(one, total)

    def _decay_now(self) -> Array:
        decay = self.decay(self.step) if callable(self.decay) else self.decay
        if jnp.shape(decay) != ():
            raise ValueError(_NOT_A_SCALAR.format(show(decay)))
        return jnp.asarray(decay).astype(self.weight.dtype)

    def _is_averaged(self, model: PyTree) -> Callable[[Visit], bool]:
        is_selected = bind_to_visits((self.on,), model)
        return lambda v: is_selected(v) and jnp.issubdtype(v.node.dtype, jnp.inexact)

    def _keeps_mean(self, visit: Visit) -> bool:
        # Without `debias` the average of a constant is smaller than the constant.
        return self.debias and Part(visit).frozen

    def _initialized(self, what: str) -> tuple[_Leaf | None, ...]:
        if self._leaves is None:
            raise NotInitializedError(_NOT_INITIALIZED.format(what))
        return self._leaves

    def _check_structure(self, model: PyTree) -> None:
        both = self._followed()
        if jtu.tree_structure(model) == jtu.tree_structure(both):
            return
        expected, given = map(same_modes, (both, model))
        if jtu.tree_structure(expected) != jtu.tree_structure(given):
            raise ValueError(_STRUCTURE.format(difference(expected, given)))

    def _followed(self) -> PyTree:
        """The last model, with sums and means."""
        return self.sums if self.means is None else update(self.sums, self.means)

    def _with(
        self, both: Any, weight: Array, step: Array, each: list[_Leaf | None]
    ) -> Self:
        new = copy_tree(self)
        sums, means = both, None
        is_mean = [leaf is not None and leaf.is_mean for leaf in each]
        if any(is_mean):
            mask = jtu.tree_unflatten(jtu.tree_structure(both), is_mean)
            means, sums = eqx.partition(both, mask)
        fields = {"sums": sums, "means": means, "weight": weight, "step": step}
        for name, value in {**fields, "_leaves": tuple(each)}.items():
            object.__setattr__(new, name, value)
        return new


def _wide(dtype: Any) -> Any:
    """The dtype of the sums for an array of this dtype."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def _copy(x: Any) -> Any:
    """A copy of an array, so that a donated model takes nothing from the average."""
    if is_numpy(x):
        return x.copy()
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def _product(a: Array, x: Array) -> Array:
    """`a * x`, rounded before anything is added to it."""
    # XLA would make one operation of the product and the sum, which rounds only once:
    # a compiled update would not have the bits of the formula. The select, which
    # changes nothing, is in the way.
    return jnp.where(jnp.isnan(x), x, a * x)


def _unless_zero(weight: Array, x: Array) -> Array:
    """`x`, or zero where the weight that it comes with is zero."""
    return jnp.where(weight == 0, jnp.zeros_like(x), x)


def _on_reals(f: Callable[..., Array], *arrays: Array) -> Array:
    """`f` of real arrays; of complex ones by their real and imaginary parts."""
    if not jnp.iscomplexobj(arrays[0]):
        return f(*arrays)
    real, imag = (f(*(part(x) for x in arrays)) for part in (jnp.real, jnp.imag))
    return jax.lax.complex(real, imag)


def _checked_decay(decay: Any) -> float | Callable[[Any], Any]:
    if callable(decay) and not isinstance(decay, type) and not is_eqx_module(decay):
        return decay
    if isinstance(decay, bool) or not isinstance(decay, numbers.Real):
        raise TypeError(_NOT_A_DECAY.format(type(decay).__qualname__))
    if not 0 <= (number := float(decay)) < 1:
        raise ValueError(_OUT_OF_RANGE.format(decay))
    return number


def _check_like(old: Array, x: Array, name: str) -> None:
    if old.shape != x.shape or old.dtype != _wide(x.dtype):
        raise ValueError(_OTHER.format(name, show(x), show(old)))


_NOT_A_DECAY: Final = """`es.Ema(decay)`: `decay` is a number, or a function of the \
step, and a `{}` was given. The model is given to `init`:

    es.Ema(model)                  # wrong
    es.Ema(0.999).init(model)      # right"""

_OUT_OF_RANGE: Final = """`es.Ema({0})`: the decay is what remains of the average in \
an update, at least 0 and less than 1. With 1 no model would ever count."""

_NOT_A_SCALAR: Final = """`es.Ema`: the schedule returned `{}`, and a decay is one \
number. It is called with the number of updates so far, an array of shape `()`."""

_NOTHING: Final = """`es.Ema(on={0})`: `{0}` selects no inexact array of the model, so \
nothing would be averaged. `es.parts(model)` lists the arrays with their names and \
kinds."""

_NOT_INITIALIZED: Final = """`es.Ema.{}` was used before `init`: there is no average \
yet. `init` returns a new one: `ema = es.Ema(0.999).init(model)`."""

_START_ANEW: Final = """An average belongs to one structure. For another, start anew: \
`ema = es.Ema(decay).init(model)`."""

_STRUCTURE: Final = (
    """`es.Ema.update`: the model has another structure than that of \
`init`, {}. Only modes may differ: train, eval, frozen. """
    + _START_ANEW
)

_SELECTED: Final = (
    """`es.Ema.update`: `on` {1} `{0}`, and {2} when the average began. \
Freezing changes what `es.trainable` selects; `on=es.Parameter` selects frozen \
parameters, too. """
    + _START_ANEW
)

_HOW: Final = {
    False: ("selects", "did not"),
    True: ("does not select", "did"),
}

_OTHER: Final = """`es.Ema.update`: `{}` is `{}`, and its average is `{}`. """ + (
    _START_ANEW
)
