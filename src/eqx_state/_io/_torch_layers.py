"""How PyTorch's layers store what Equinox's hold: names, shapes, layouts.

An array of a layer that is not in `LAYOUTS` has the same name and the same layout in
both: `weight` and `bias` of `Linear`, `LayerNorm`, `GroupNorm`, `Embedding`.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import equinox as eqx
import numpy as np

from ..nn._batch_norm import BatchNorm


Shape: TypeAlias = tuple[int, ...]


class Source(NamedTuple):
    """Where an array comes from: the tensors by name with their shapes, in order."""

    shapes: dict[str, Shape]
    make: Callable[..., Any] = lambda tensor: tensor


class Layer(NamedTuple):
    """A layer whose layout differs. All names are relative to it, with dots."""

    module: Any
    shapes: Mapping[str, Shape]  # of its arrays by name
    has: Callable[[str], bool]  # whether PyTorch's state dict has a name


def _conv(layer: Layer, name: str, shape: Shape) -> Source | None:
    if name == "bias":
        # Ours has an axis for each spatial one, and a stack of them one in front.
        end = max(len(shape) - layer.module.num_spatial_dims, 1)
        return Source({"bias": shape[:end]}, lambda bias: bias.reshape(shape))
    return None


def _conv_transpose(layer: Layer, name: str, shape: Shape) -> Source | None:
    num = len(shape) - layer.module.num_spatial_dims - 2  # the axes of a stack of them
    if name != "weight" or num < 0:
        return _conv(layer, name, shape)
    stack, (out, within, *kernel) = shape[:num], shape[num:]
    groups = layer.module.groups

    def transposed(weight: Any) -> Any:
        # PyTorch's is the kernel of the convolution whose gradient it is. So within
        # each group input and output change places, and each spatial axis runs back.
        weight = weight.reshape(*stack, groups, within, out // groups, *kernel)
        spatial = tuple(range(num + 3, num + 3 + len(kernel)))
        return np.flip(weight.swapaxes(num + 1, num + 2), spatial).reshape(shape)

    source = *stack, groups * within, out // groups, *kernel
    return Source({"weight": source}, transposed)


def _gru(layer: Layer, name: str, shape: Shape) -> Source | None:
    size = layer.module.hidden_size

    def bias(ih: Any, hh: Any) -> Any:
        # That of the hidden state stays apart in the third gate: `reset` scales it.
        both = _sum(ih, hh)
        return np.concatenate([both[: 2 * size], ih[2 * size :]])

    if name == "bias":
        return Source({"bias_ih": shape, "bias_hh": shape}, bias)
    if name == "bias_n":
        return Source({"bias_hh": (3 * size,)}, lambda hh: hh[2 * size :])
    return None


def _lstm(layer: Layer, name: str, shape: Shape) -> Source | None:
    if name == "bias":
        return Source({"bias_ih": shape, "bias_hh": shape}, _sum)
    return None


def _sum(a: Any, b: Any) -> Any:
    # Not in half precision, whatever the tensors are stored in.
    return a.astype(np.promote_types(a.dtype, np.float32)) + b


_PROJECTIONS: Final = ("query", "key", "value")


def _attention(layer: Layer, name: str, shape: Shape) -> Source | None:
    part, _, last = name.partition("_proj.")
    if part == "output":
        return Source({f"out_proj.{last}": shape})
    if part not in _PROJECTIONS or last not in ("weight", "bias"):
        return None
    packed = f"in_proj_{last}"
    if last == "weight" and not layer.has(packed) and layer.has("q_proj_weight"):
        return Source({f"{part[0]}_proj_weight": shape})
    sizes = [layer.shapes.get(f"{p}_proj.weight", (0,))[0] for p in _PROJECTIONS]
    first = sum(sizes[: _PROJECTIONS.index(part)])
    return Source(
        {packed: (sum(sizes), *shape[1:])},
        lambda tensor: tensor[first : first + shape[0]],
    )


def _batch_norm(layer: Layer, name: str, shape: Shape) -> Source | None:
    theirs = {"mean": "running_mean", "var": "running_var"}
    return Source({theirs[name]: shape}) if name in theirs else None


def _equinox_batch_norm(layer: Layer, name: str, shape: Shape) -> Source | None:
    theirs = {"init.0": "running_mean", "init.1": "running_var"}
    momentum = layer.module.momentum

    def biased(average: Any, count: Any) -> Any:
        # Equinox starts at zero and divides by this in eval mode, in float32.
        one = np.float32(1)
        return average * (one - np.float32(momentum) ** np.float32(count) or one)

    index, _, which = name.partition(".")
    match index:
        case "ema_first_time_index":
            return Source({}, lambda: np.array(False))
        case "ema_state_index":
            return Source({theirs[which]: shape})
        case "batch_counter":
            return Source({"num_batches_tracked": shape})
        case "batch_state_index":
            return Source({theirs[which]: shape, "num_batches_tracked": ()}, biased)
    return None


LAYOUTS: Final[dict[type, Callable[[Layer, str, Shape], Source | None]]] = {
    eqx.nn.Conv: _conv,
    eqx.nn.ConvTranspose: _conv_transpose,
    eqx.nn.GRUCell: _gru,
    eqx.nn.LSTMCell: _lstm,
    eqx.nn.MultiheadAttention: _attention,
    eqx.nn.BatchNorm: _equinox_batch_norm,
    BatchNorm: _batch_norm,
}


def _layout(module: Any) -> Callable[[Layer, str, Shape], Source | None] | None:
    return next((LAYOUTS[c] for c in type(module).__mro__ if c in LAYOUTS), None)


def has_layout(module: Any) -> bool:
    """Whether PyTorch stores a module's arrays otherwise than Equinox."""
    return _layout(module) is not None


def source_of(layer: Layer, name: str) -> Source:
    """Where an array of a layer comes from."""
    shape, layout = layer.shapes[name], _layout(layer.module)
    found = None if layout is None else layout(layer, name, shape)
    return Source({name: shape}) if found is None else found


def why_not(layer: Layer) -> str | None:
    """What a layer of ours has that PyTorch's cannot have."""
    if isinstance(layer.module, eqx.nn.MultiheadAttention):
        if len({f"{p}_proj.bias" in layer.shapes for p in _PROJECTIONS}) > 1:
            return _MIXED
    return None


def may_be_left(name: str, used: Collection[str]) -> bool:
    """Whether a tensor without a counterpart may be left over."""
    # A counter that only Equinox's own batch norm has, too.
    before, _, last = name.rpartition(".")
    bases = {other.rpartition(".")[0] for other in used}
    return last == "num_batches_tracked" and before in bases


_MIXED: Final = """in PyTorch query, key and value all have a bias, or none has: make \
`use_query_bias`, `use_key_bias` and `use_value_bias` equal"""

# By the last part of the name.
_IN_NORM: Final = "`es.nn.BatchNorm` and `es.nn.Stateful(layer, state)` hold statistics"
_ADDED: Final = "Equinox has no `add_bias_kv`"
NO_COUNTERPART: Final = {
    "bias_k": _ADDED,
    "bias_v": _ADDED,
    "running_mean": _IN_NORM,
    "running_var": _IN_NORM,
}
