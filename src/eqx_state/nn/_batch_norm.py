"""Batch normalisation with its statistics as state."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._kinds import BatchStat, Parameter
from .._module import Module


class BatchNorm(Module):
    """Normalises each channel over the batch (Ioffe and Szegedy, 2015).

    In train mode with the mean and the biased variance of the batch, of which running
    averages are kept: `new = momentum * old + (1 - momentum) * batch`, from 0 and 1, as
    in Flax. In eval mode, and when frozen, with the running averages, which stay.

    The averages start at 0 and 1 and are not corrected for it (Equinox divides by
    `1 - momentum**n`): with few steps choose a `momentum` such as 0.9.

    With an `axis_name`, for one example at a time under a `vmap` with that axis, as
    `equinox.nn.BatchNorm`. Without, for a whole batch at once.

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
        - `dtype`: of the parameters and statistics. Default: JAX's default float.
        - `channel_axis`: the axis of the input that holds the channels. Default: 0 with
            an `axis_name`, else 1.
        - `key`: ignored; there is nothing random.
        """
        del key
        dtype = jnp.zeros(()).dtype if dtype is None else dtype
        self.weight = jnp.ones(input_size, dtype) if channelwise_affine else None
        self.bias = jnp.zeros(input_size, dtype) if channelwise_affine else None
        self.mean = jnp.zeros(input_size, dtype)
        self.var = jnp.ones(input_size, dtype)
        self.input_size = input_size
        self.axis_name = axis_name
        if channel_axis is None:
            channel_axis = 1 if axis_name is None else 0
        self.channel_axis = channel_axis
        self.eps = eps
        self.momentum = momentum

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        """**Arguments:**

        - `x`: an array with `input_size` elements along `channel_axis`.
        - `key`: ignored.

        **Returns:**

        An array of the shape of `x`, and of its dtype if that is a floating one.

        **Raises:**

        - `NameError`: there is no axis called `axis_name`.

        - `ValueError`: `x` has another number of channels.
        """
        del key
        axis = self.channel_axis
        if not -x.ndim <= axis < x.ndim or x.shape[axis] != self.input_size:
            raise ValueError(
                f"`es.nn.BatchNorm(input_size={self.input_size})` got an input of shape"
                f" {x.shape}, and looks for its {self.input_size} channels along axis"
                f" {axis}. Set `channel_axis`; with `axis_name=None` the input is a"
                " whole batch."
            )
        if self.training and not self.frozen:
            mean, var = _batch_moments(self, x)
            self.mean = _average(self, self.mean, mean)
            self.var = _average(self, self.var, var)
        else:
            mean, var = self.mean, self.var
        scale = jax.lax.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = mean * scale
        shift = -shift if self.bias is None else self.bias - shift
        scale, shift = (_spread(self, a, x) for a in (scale, shift))
        y = _cast(x, scale.dtype) * scale + shift
        # Integers are not rounded back; a lower precision is that of the layers around.
        return _cast(y, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else y


# Functions, for Equinox makes a pytree of each method that is looked up.


def _cast(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else x.astype(dtype)


def _spread(norm: BatchNorm, channels: Array, x: Array) -> Array:
    """One value per channel, of the rank of `x`.

    Not of its shape: a gradient would keep all of that.
    """
    shape = [1] * x.ndim
    shape[norm.channel_axis] = norm.input_size
    return channels.reshape(shape)


def _batch_moments(norm: BatchNorm, x: Array) -> tuple[Array, Array]:
    axes = tuple(i for i in range(x.ndim) if i != norm.channel_axis % x.ndim)
    x = _cast(x, norm.mean.dtype)
    mean = _over_lanes(norm, jnp.mean(x, axes))
    deviation = x - _spread(norm, mean, x)
    return mean, _over_lanes(norm, jnp.mean(jnp.square(deviation), axes))


def _over_lanes(norm: BatchNorm, x: Array) -> Array:
    if norm.axis_name is None:
        return x
    try:
        return jax.lax.pmean(x, norm.axis_name)
    except NameError as e:  # JAX's, for an axis name that no transform has bound
        raise NameError(
            f"`es.nn.BatchNorm(axis_name={norm.axis_name!r})` averages over an"
            " axis of that name, and there is none. Name it where the model is"
            f" mapped: `es.vmap(model, axis_name={norm.axis_name!r})(xs)`. For a"
            " whole batch at once make the layer with `axis_name=None`."
        ) from e


def _average(norm: BatchNorm, old: Array, new: Array) -> Array:
    new = jax.lax.stop_gradient(new)
    return norm.momentum * old + (1 - norm.momentum) * new
