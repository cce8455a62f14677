"""Batch normalisation with its statistics as state."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._kinds._kinds import BatchStat, Parameter
from .._state._module import Module


class BatchNorm(Module):
    """Normalises each channel over the batch (Ioffe and Szegedy, 2015).

    In train mode with the mean and the biased variance of the batch, of which running
    averages are kept: `new = momentum * old + (1 - momentum) * batch`, from 0 and 1, as
    in Flax. In eval mode, and when frozen, with the running averages, which stay.

    The averages start at 0 and 1 and are not corrected for it (Equinox divides by
    `1 - momentum**n`): with few steps choose a `momentum` such as 0.9.

    With an `axis_name`, for one example at a time under a `vmap` with that axis, as
    `equinox.nn.BatchNorm`. Without, for a whole batch at once.

    The averages are float32 or wider whatever the `dtype` of the parameters is, and so
    is the computation: in bfloat16 an average stops moving after some steps.

    !!! example

        ```python
        import eqx_state as es
        import jax.numpy as jnp
        import jax.random as jr

        x = jr.normal(jr.key(0), (8, 3))
        norm = es.nn.BatchNorm(3)
        y, norm = es.mutable(norm)(x)
        assert jnp.allclose(y.mean(axis=0), 0, atol=1e-6)
        assert jnp.allclose(norm.mean, 0.01 * x.mean(axis=0))

        each = es.nn.BatchNorm(3, axis_name="batch")
        y2, each = es.mutable(es.vmap(each, axis_name="batch"))(x)
        assert jnp.allclose(y, y2, atol=1e-5)

        padded = jnp.concatenate([x, jnp.zeros((2, 3))])
        mask = jnp.arange(10) < 8
        y3, norm = es.mutable(es.nn.BatchNorm(3))(padded, mask=mask[:, None])
        assert jnp.allclose(y3[:8], y, atol=1e-5)
        ```
    """

    weight: Parameter[Array | None]
    bias: Parameter[Array | None]
    mean: BatchStat
    var: BatchStat
    input_size: int = eqx.field(static=True)
    axis_name: Any = eqx.field(static=True)
    channel_axis: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    momentum: float = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        axis_name: Any = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        momentum: float = 0.99,
        dtype: Any = None,
        *,
        channel_axis: int | None = None,
        key: Any = None,
    ):
        """**Arguments:**

        - `input_size`: the number of channels.
        - `axis_name`: the name of the `vmap` axis (or tuple of names) to reduce over;
            the input is one example then. Default: `None`, the input is a batch.
        - `eps`: added to the variance. Default: 1e-5.
        - `channelwise_affine`: whether to scale and shift with `weight` and `bias`.
        - `momentum`: how much of the running average stays at each step. Default: 0.99.
        - `dtype`: of the parameters, a real floating one. Default: JAX's default float.
            The statistics have it too, if it has at least 32 bits; else float32.
        - `channel_axis`: the axis of the input that holds the channels. Default: 0 with
            an `axis_name`, else 1.
        - `key`: ignored; there is nothing random.

        **Raises:**

        - `ValueError`: `dtype` is not a real floating one.
        """
        del key
        dtype = jnp.zeros((), dtype).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"`es.nn.BatchNorm(dtype={dtype})`: a variance is a real number, so"
                " `dtype` is a real floating one, such as `jnp.float32`."
            )
        self.weight = jnp.ones(input_size, dtype) if channelwise_affine else None
        self.bias = jnp.zeros(input_size, dtype) if channelwise_affine else None
        self.mean = jnp.zeros(input_size, _widest(dtype))
        self.var = jnp.ones(input_size, _widest(dtype))
        self.input_size = input_size
        self.axis_name = axis_name
        if channel_axis is None:
            channel_axis = 1 if axis_name is None else 0
        self.channel_axis = channel_axis
        self.eps = eps
        self.momentum = momentum

    def __call__(self, x: Array, *, key: Any = None, mask: Any = None) -> Array:
        """**Arguments:**

        - `x`: an array with `input_size` elements along `channel_axis`, real.
        - `key`: ignored.
        - `mask`: true where `x` counts and false where it is padding; an array that
            broadcasts to the shape of `x`, as in Flax: for a batch of shape `(N, C)`
            whose last rows are padding, of shape `(N, 1)`. Under a `vmap` with
            `axis_name` the mask of one example, which may be a single bool. Default:
            everything counts. It matters in train mode alone: mean, variance and
            running averages are those of the elements that count. The padding is
            normalised like the rest, and has no gradient. A channel without an element
            that counts keeps its running averages, and is normalised with them.

        **Returns:**

        An array of the shape of `x`, and of its dtype if that is a floating one.

        **Raises:**

        - `NameError`: there is no axis called `axis_name`.

        - `ValueError`: `x` has another number of channels, or is complex; or `mask`
            does not broadcast to the shape of `x`.
        """
        del key
        x = jnp.asarray(x)
        _check_input(self, x)
        mask = None if mask is None else _as_mask(mask, x)
        wide = _cast(x, _widest(x.dtype, self.mean.dtype))
        if self.training and not self.frozen:
            deviation, kept, rest, var = _center(self, wide, mask)
        else:
            mean, var = (_cast(a, wide.dtype) for a in (self.mean, self.var))
            deviation = kept = wide - _spread(self, mean, x)
            rest = None
        scale = jax.lax.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * _cast(self.weight, scale.dtype)
        shift = None if self.bias is None else _cast(self.bias, scale.dtype)
        if rest is not None:
            shift = -rest * scale if shift is None else shift - rest * scale
        y = _affine(self, kept, scale, shift)
        if kept is not deviation:
            padding = _affine(self, *jax.lax.stop_gradient((deviation, scale, shift)))
            y = jnp.where(mask, y, padding)
        # Integers are not rounded back; a lower precision is that of the layers around.
        return _cast(y, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else y


# Functions, for Equinox makes a pytree of each method that is looked up.


def _widest(*dtypes: Any) -> Any:
    """The widest of these that are real floating dtypes; float32 at least."""
    floating = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return max(jnp.dtype("float32"), *floating, key=lambda d: jnp.finfo(d).bits)


def _cast(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else x.astype(dtype)


def _check_input(norm: BatchNorm, x: Array) -> None:
    axis, size = norm.channel_axis, norm.input_size
    if not -x.ndim <= axis < x.ndim or x.shape[axis] != size:
        raise ValueError(
            f"`es.nn.BatchNorm(input_size={size})` got an input of shape {x.shape}, and"
            f" looks for its {size} channels along axis {axis}. Set `channel_axis`;"
            " with `axis_name=None` the input is a whole batch."
        )
    if jnp.iscomplexobj(x):
        raise ValueError(
            f"`es.nn.BatchNorm` got an input of dtype {x.dtype}, and normalises real"
            " numbers. Which variance a complex number has is for the model to say."
            " For both parts on their own, as twice as many channels:\n\n"
            f"    norm = es.nn.BatchNorm({2 * size})\n"
            f"    norm(jnp.concatenate([x.real, x.imag], axis={axis}))"
        )


def _spread(norm: BatchNorm, channels: Array, x: Array) -> Array:
    """One value per channel, of the rank of `x`.

    Not of its shape: a gradient would keep all of that.
    """
    shape = [1] * x.ndim
    shape[norm.channel_axis] = norm.input_size
    return channels.reshape(shape)


def _affine(norm: BatchNorm, x: Array, scale: Array, shift: Array | None) -> Array:
    y = x * _spread(norm, scale, x)
    return y if shift is None else y + _spread(norm, shift, x)


def _center(
    norm: BatchNorm, x: Array, mask: Array | None
) -> tuple[Array, Array, Array, Array]:
    """`x` without its mean, and with 0 for padding; the rest of the mean; the variance.

    The running averages move on. The mean of large numbers is rounded, by more than a
    small deviation is. So the second pass, which finds the variance, also finds what
    the first has left; without it, 100 times 1e4/3 would deviate from its mean by 0.15.
    It has no gradient: exactly computed it is 0, whatever `x` is.
    """
    axes = tuple(i for i in range(x.ndim) if i != norm.channel_axis % x.ndim)

    def sums(*xs: Array) -> list[Array]:
        return _over_lanes(norm, [jnp.sum(a, axes) for a in xs])

    if mask is None:
        [number] = _over_lanes(norm, [math.prod(x.shape[i] for i in axes)])

        def only(a: Array) -> Array:
            return a

        def if_any(new: Array, old: Array) -> Array:
            return new

    else:
        [found] = sums(mask.astype(x.dtype))
        number = jnp.maximum(found, 1)

        def only(a: Array) -> Array:
            # Padding may be NaN, and 0 times NaN is the gradient of what comes later.
            return jnp.where(mask, a, 0)

        def if_any(new: Array, old: Array) -> Array:
            return jnp.where(found > 0, new, _cast(old, new.dtype))

    [mean] = (a / number for a in sums(only(x)))
    mean = if_any(mean, norm.mean)
    deviation = x - _spread(norm, mean, x)
    kept = only(deviation)
    # Not `jnp.square`, whose gradient would keep `2 * kept` besides `kept`.
    rest, square = (a / number for a in sums(kept, kept * kept))
    rest = jax.lax.stop_gradient(rest)
    var = square - jnp.minimum(jnp.square(rest), jax.lax.stop_gradient(square))
    var = if_any(var, norm.var)
    norm.mean = if_any(_average(norm, norm.mean, mean + rest), norm.mean)
    norm.var = if_any(_average(norm, norm.var, var), norm.var)
    return deviation, kept, rest, var


def _as_mask(mask: Any, x: Array) -> Array:
    mask = jnp.asarray(mask, bool)
    try:
        return jnp.broadcast_to(mask, x.shape)
    except ValueError as e:
        raise ValueError(
            f"`es.nn.BatchNorm`: the mask of shape {mask.shape} does not broadcast to"
            f" the input of shape {x.shape}. Give it an axis of size 1 for each that it"
            " lacks: for a batch `(N, C)` whose last rows are padding, `mask[:, None]`."
        ) from e


def _over_lanes(norm: BatchNorm, xs: list[Any]) -> list[Any]:
    if norm.axis_name is None:
        return xs
    try:
        return jax.lax.psum(xs, norm.axis_name)
    except NameError as e:  # JAX's, for an axis name that no transform has bound
        raise NameError(
            f"`es.nn.BatchNorm(axis_name={norm.axis_name!r})` averages over an"
            " axis of that name, and there is none. Name it where the model is"
            f" mapped: `es.vmap(model, axis_name={norm.axis_name!r})(xs)`. For a"
            " whole batch at once make the layer with `axis_name=None`."
        ) from e


def _average(norm: BatchNorm, old: Array, new: Array) -> Array:
    new = jax.lax.stop_gradient(new)
    mixed = norm.momentum * _cast(old, new.dtype) + (1 - norm.momentum) * new
    return _cast(mixed, old.dtype)
