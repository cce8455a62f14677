"""`es.Ema`: an exponential moving average of a model's parameters, as one pytree."""

import numbers
from collections.abc import Callable
from typing import Any, Final, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from ._errors import NotInitializedError, show
from ._kinds.kinds import Buffer, is_kind, Parameter
from ._state.lazy import check_not_a_class, check_ready
from ._tree.base import is_eqx_module
from ._tree.compare import is_hole, leaves_like
from ._tree.filters import check_filter, Filter
from ._tree.followers import AbstractPerParameter
from ._tree.keys import copied
from ._tree.modules import replace
from ._tree.parts import is_inexact
from ._tree.rules import check_names, nothing_selected
from ._tree.select import mask
from ._tree.walk import is_array, leaves
from ._typing import PyTree


class Ema(AbstractPerParameter):
    """The exponential moving average of a model, as a pytree that `jit` accepts.

    With decays `d_1, …, d_n` the model of update `i` has the weight `(1 - d_i)` times
    the product of all later decays. With `debias`, the weights are divided by their
    sum (Kingma and Ba, 2015), so the model given to `init` has no weight. Without it,
    the average starts at that model, and each update is `a = d * a + (1 - d) * p`: for
    target networks and teachers, which follow the model that they start from. Averages
    are computed in float32, or in the wider dtype of the array. Each update rounds them
    once; the weights have the precision of the dtype for every decay.

    Its arrays are constants, `es.Buffer`: inside a model, an `Ema` is not trained and
    cannot be written.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp

        ema = es.Ema(0.5).init({"w": jnp.zeros(2)})
        for value in (1.0, 4.0):
            ema = ema.update({"w": jnp.full(2, value)})
        assert jnp.allclose(ema.model["w"], (0.25 * 1.0 + 0.5 * 4.0) / 0.75)

        target = es.Ema(0.5, debias=False).init({"w": jnp.full(2, 8.0)})
        target = target.update({"w": jnp.zeros(2)})
        assert jnp.allclose(target.model["w"], 0.5 * 8.0)
        ```
    """

    # `means`: the averages, in float32 or wider, with `None` elsewhere. `rest`: the
    # last model, with `None` at averaged arrays.
    means: Buffer[Any]
    rest: Buffer[Any]
    weight: Buffer[Any]  # the sum of the weights
    lost: Buffer[Any]  # what `weight` lacks because it was rounded
    step: Buffer[Any]  # the number of updates
    decay: float | Callable[[Any], Any] = eqx.field(static=True)
    debias: bool = eqx.field(static=True)
    on: Filter = eqx.field(static=True)
    # The model's dtype for each average; `None` before `init`.
    _dtypes: tuple[Any, ...] | None = eqx.field(static=True, repr=False)

    def __init__(
        self,
        decay: float | Callable[[Any], Any],
        *,
        debias: bool = True,
        on: Filter = Parameter,
    ):
        """**Arguments:**

        - `decay`: the weight of the old average in an update, at least 0 and less than
            1; or a schedule, as in optax: a function of the number of earlier updates,
            such as `lambda step: jnp.minimum(0.999, (1 + step) / (10 + step))`. The
            field is static, so create a schedule once: a new function recompiles the
            step.
        - `debias`: whether the weights are divided by their sum. If not, the average
            starts at the model given to `init`.
        - `on`: the filter for the arrays to average. Only inexact arrays count. All
            other arrays are copied from the last model. Default: the parameters. The
            average of an array that never changes is exactly this array.

        **Raises:**

        - `TypeError`: `decay` is neither a number nor a schedule, or `on` not a filter.
        - `ValueError`: `decay` is negative, or 1 or more.
        """
        if is_eqx_module(decay) or not isinstance(decay, (numbers.Real, Callable)):
            raise TypeError(_NOT_A_DECAY.format(type(decay).__qualname__))
        if not callable(decay) and not 0 <= float(decay) < 1:
            raise ValueError(_NOT_A_DECAY.format(decay))
        self.decay = decay if callable(decay) else float(decay)
        self.debias = bool(debias)
        check_filter(on)
        self.on = on
        self.means = self.rest = self.weight = self.lost = self.step = None
        self._dtypes = None

    def init(self, model: PyTree) -> Self:
        """The average before the first update, with copies of the arrays of `model`.

        **Raises:**

        - `TypeError`: the model is a class.
        - `es.NotInitializedError`: the model still contains an `es.Initializer`.
        - `ValueError`: `on` selects no inexact array, and is not a kind; or a stateful
            module occurs twice in the model; or `1 - decay` is below the precision of
            an average (1.2e-7 in float32), so that updates would not change it.
        """
        check_not_a_class(model)
        params, rest = self._split(model)
        means = jtu.tree_map(lambda x: jnp.array(x, _wide(x.dtype)), params)
        dtypes = _dtypes_of(means)
        if not dtypes and not is_kind(self.on):
            raise nothing_selected("es.Ema(on", self.on, model)
        check_names(self.on, [model], "`es.Ema(on=…)`")
        real = [jnp.finfo(dtype).dtype for dtype in dtypes]
        if not callable(self.decay):
            for dtype in real:
                if 1 - self.decay < jnp.finfo(dtype).eps:
                    raise ValueError(_TOO_CLOSE.format(self.decay, dtype))
        dtype = max(real, key=lambda x: x.itemsize, default="float32")
        sums = {"weight": jnp.zeros((), dtype), "lost": jnp.zeros((), dtype)}
        sums["step"] = jnp.zeros((), jnp.int32)
        return replace(self, means=means, rest=rest, _dtypes=_dtypes_of(params), **sums)

    def update(self, model: PyTree) -> Self:
        """The average after one more model, whose mode may differ from earlier ones.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called; or the model still
            contains an `es.Initializer`.
        - `ValueError`: the model differs in structure or shapes from that of `init`, or
            lacks one of its leaves, as gradients do; or `on` selects different arrays
            (the message names the first path); or these are several averages, made
            under `vmap`.
        """
        self._check_initialized("update")
        params, rest = self._split(model)
        olds = leaves_like(params, self.means, "`es.Ema.update`: the average")
        rests = (jtu.tree_leaves(x, is_leaf=is_hole) for x in (self.rest, rest))
        decay = self.decay(self.step) if callable(self.decay) else self.decay
        fresh = _one_minus(decay, self.weight.dtype)
        added = fresh * (1 - self.weight) + self.lost
        weight, lost = _two_sum(self.weight, added)
        # The share of `model`. After an initial decay of 1, `weight` is still 0.
        share = jnp.where(weight == 0, 1, fresh / weight) if self.debias else fresh
        new = []
        visits = leaves(params, is_leaf=is_hole)
        for visit, old, was, now in zip(visits, olds, *rests, strict=True):
            x = visit.node
            if was is not None and x is None and now is None:
                raise ValueError(_LACKS.format(visit.name))
            expected = None if x is None else (x.shape, _wide(x.dtype))
            if expected != (None if old is None else (old.shape, old.dtype)):
                raise ValueError(_OTHER.format(visit.name, show(x), show(old)))
            if x is not None:
                new.append(_mean(old, jnp.asarray(x, old.dtype), share))
        means = jtu.tree_unflatten(jtu.tree_structure(params), new)
        sums = {"weight": weight, "lost": lost, "step": self.step + 1}
        return replace(self, means=means, rest=rest, _dtypes=_dtypes_of(params), **sums)

    @property
    def model(self) -> Any:
        """The averaged model, in the mode of the last one.

        Arrays that are not averaged are those of the last model. Before the first
        update, this is the model given to `init`.

        **Raises:**

        - `es.NotInitializedError`: `init` has not been called.
        - `ValueError`: these are several averages, made under `vmap` or stacked by a
            loop. Read them under `vmap`, too.
        """
        dtypes = self._check_initialized("model")
        values, treedef = jtu.tree_flatten(self.means)
        means = [x.astype(dtype) for x, dtype in zip(values, dtypes, strict=True)]
        return _joined(self.rest, jtu.tree_unflatten(treedef, means))

    def _split(self, model: PyTree) -> tuple[PyTree, PyTree]:
        """The arrays to average, and copies of the rest, which survive donation."""
        check_ready(model)
        params, rest = eqx.partition(model, mask(model, self.on, is_inexact))
        return params, jtu.tree_map(lambda x: copied(x) if is_array(x) else x, rest)

    def _check_initialized(self, what: str) -> tuple[Any, ...]:
        if self._dtypes is None:
            raise NotInitializedError(_NOT_INITIALIZED.format(what))
        if shape := jnp.shape(self.step):
            raise ValueError(_SEVERAL.format(what, shape))
        return self._dtypes

    def _recorded_model(self) -> PyTree:
        return _joined(self.rest, self.means)


def _joined(rest: PyTree, means: PyTree) -> PyTree:
    """`eqx.combine` in the mode of `rest`."""
    values, structure = jtu.tree_flatten(rest, is_leaf=is_hole)
    pairs = zip(values, jtu.tree_leaves(means, is_leaf=is_hole), strict=True)
    return structure.unflatten(y if x is None else x for x, y in pairs)


def _dtypes_of(params: PyTree) -> tuple[Any, ...]:
    return tuple(x.dtype for x in jtu.tree_leaves(params))


def _wide(dtype: Any) -> Any:
    """The dtype of the averages of arrays of this dtype."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def _one_minus(decay: Any, dtype: Any) -> Array:
    # Subtract a number before it is rounded. In float32, 0.99999 is close to itself,
    # but `1 - 0.99999` is wrong by 0.1 %.
    if isinstance(decay, jax.Array):
        return 1 - decay.astype(dtype).reshape(())
    return jnp.asarray(1 - np.float64(decay), dtype).reshape(())


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """`a + b`, and its exact rounding error (Knuth, 1969).

    Without the error, the sum of the weights would stop before it is 1: with a decay
    of 0.99999, at 0.994.
    """
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _mean(old: Array, x: Array, share: Array) -> Array:
    share = share.astype(old.dtype)
    # Not `(1 - share) * old + share * x`: for an array that never changes, its rounding
    # errors would add up to 1e-3. The inner `where` avoids `inf - inf`, which is NaN.
    moved = old + share * jnp.where(jnp.isinf(old), 0, x - old)
    return jnp.where(share == 1, x, moved)  # `old` may be NaN from `init`


_NOT_A_DECAY: Final = """`es.Ema(decay)`: `decay` must be a number, at least 0 and \
less than 1, or a function of the step, but `{}` was given. Pass the model to `init`: \
`es.Ema(0.999).init(model)`."""

_TOO_CLOSE: Final = """`es.Ema({})`: in {}, the dtype of the averages, an update would \
not change them, because `1 - decay` is below the precision. Use a smaller decay: \
`es.Ema(0.9999)`."""

_NOT_INITIALIZED: Final = """`es.Ema.{}` was used before `init`, which returns a new \
average: `ema = es.Ema(0.999).init(model)`."""

_SEVERAL: Final = """`es.Ema.{}`: these are several averages, of shape {}, made under \
`vmap` or stacked by a loop, and outside of it their axis cannot be told from those of \
the arrays. Use each average by itself: `eqx.filter_vmap(lambda ema: \
ema.model)(emas)`, or `jax.tree.map(lambda x: x[0], emas)`."""

_LACKS: Final = """`es.Ema.update`: `{}` is `None`, but was not in the model given to \
`init`, and `ema.model` would lack it. Pass the whole model, and not its gradients or \
parameters: `ema = ema.update(model)`. To average parameters alone, pass them to \
`init`, too."""

_OTHER: Final = """`es.Ema.update`: `{}` is `{}`, but its average is `{}`. An average \
belongs to one structure and to the arrays that `on` selected (freezing changes what \
`es.trainable` selects). For others, create a new average: `ema = \
es.Ema(decay).init(model)`."""
