"""`es.from_torch`: load the weights of a PyTorch model into an Equinox model."""

import functools as ft
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._kinds.kinds import Rng
from .._tree.dtypes import converted, fits, is_numeric
from .._tree.keys import is_typed
from .._tree.parts import Part, paths_of
from .._tree.walk import is_numpy, walk
from .._typing import KeyPath, Tree
from ..nn._batch_norm import BatchNorm
from ..nn._stateful import Stateful
from .reading import placed_like, shape_of, whole_of
from .restore import by_name, complain, differences, plain, put, shown
from .state_dict import Rename, renaming


_Shape: TypeAlias = tuple[int, ...]
_Place: TypeAlias = tuple[KeyPath, str]  # the path of a layer, and a local name


def from_torch(
    model: Tree, state_dict: Mapping[str, Any], rename: Rename = None
) -> Tree:
    """`model` with the weights and buffers of a PyTorch module.

    The default PyTorch name of an array is its path with dots, ending in PyTorch's name
    for the array: `layers[0].cell.weight_ih` is `layers.0.cell.weight_ih`, and
    `norm.mean` of an `es.nn.BatchNorm` is `norm.running_mean`. `es.nn.Stateful` does
    not appear in names. The first layer of an `equinox.nn.Sequential` is `layers.0`, or
    just `0`, as in `torch.nn.Sequential`.

    `from_torch` converts layouts that differ: those of convolutions, batch norms, GRU
    and LSTM cells, and multi-head attention. If the dictionary lacks the tensors for an
    array, the array's own name is looked up: `attn.query_proj.weight` if there is no
    `attn.in_proj_weight`. All other arrays have the same layout in both libraries, or
    belong to your own classes, and are copied unchanged. PRNG keys are those of
    `model`. For stacked layers, as from `equinox.filter_vmap`, pass stacked tensors, as
    from `torch.func.stack_module_state`.

    **Arguments:**

    - `model`: a model of Equinox's layers, those of `es.nn`, and your own. It may be
        abstract, as `equinox.filter_eval_shape` returns it. Modes do not change.
    - `state_dict`: the result of `module.state_dict()`, or any dictionary from names to
        tensors or arrays, such as the content of a safetensors file. PyTorch need not
        be installed.
    - `rename`: maps the default name of an array to its name in the dictionary: a
        function, or a dictionary of globs, as in `es.load_state_dict`. Default: use the
        default names.

    **Returns:**

    A new model. Its arrays are copies, with the dtypes of those in `model`.

    **Raises:**

    - `ValueError`: a name is missing or unused, a shape differs, a tensor has a dtype
        that cannot be cast (a float to an integer, for example) or a number that is too
        large for that of the model, or a layer has an
        array that the same layer of the other library lacks. The message lists all
        problems.
    - `ValueError` and `TypeError`: `rename` is wrong, as in `es.load_state_dict`.
    - `TypeError`: `state_dict` is not a dictionary.
    - `es.NotInitializedError`: the model still contains an `es.Initializer`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_state as es
        import jax.random as jr
        import numpy as np

        model = {
            "conv": eqx.nn.Conv2d(1, 2, 3, key=jr.key(0)),
            "norm": es.nn.BatchNorm(2),
        }
        tensors = {  # tensors of PyTorch, or arrays
            "conv.weight": np.ones((2, 1, 3, 3)),
            "conv.bias": np.zeros(2),
            "bn.weight": np.ones(2),
            "bn.bias": np.zeros(2),
            "bn.running_mean": np.full(2, 0.5),
            "bn.running_var": np.ones(2),
            "bn.num_batches_tracked": np.array(7),
        }
        model = es.from_torch(model, tensors, rename={"norm.*": "bn.*"})
        assert model["conv"].bias.shape == (2, 1, 1)
        assert model["norm"].mean[0] == 0.5
        ```
    """
    if not isinstance(state_dict, Mapping):
        given = f"`{type(state_dict).__name__}` was given"
        raise TypeError(f"`es.from_torch` takes `module.state_dict()`, and {given}.")
    named = {k: entry for k, entry in by_name(model).items() if not _is_key(entry[1])}
    nodes = [visit for visit in walk(model) if not visit.is_leaf]
    modules = {path: visit.node for visit in nodes for path in paths_of(visit)}
    sources = {ours: _source(part, modules) for ours, (_, part) in named.items()}
    places = [
        (layer, local)
        for layer, own, source in sources.values()
        for local in (*source.shapes, own)
    ]
    defaults = {place: _default_names(*place, modules) for place in places}
    name_of = _names(state_dict, rename, defaults)
    used: set[str] = set()
    values: dict[str, Any] = {}
    problems: dict[str, list[str]] = {"missing": [], "unused": []}
    for ours, (layer, own, source) in sources.items():
        part, arrays = named[ours][1], []
        leaf = whole_of(part).value
        theirs = {name_of(layer, local) for local in source.shapes}
        if not theirs <= state_dict.keys() and name_of(layer, own) in state_dict:
            source = _Source({own: shape_of(part)})
        for local, shape in source.shapes.items():
            used.add(name := name_of(layer, local))
            label = shown(name) if name == ours else f"{name} (for {shown(ours)})"
            if name not in state_dict:
                problems["missing"].append(label)
                continue
            arrays.append(_as_numpy(state_dict[name]))
            if problem := _why_not(arrays[-1], shape, leaf.dtype):
                problems.setdefault(problem[0], []).append(f"{label}: {problem[1]}")
        if not any(problems.values()):
            made = np.array(source.make(*arrays))
            values[ours] = converted(leaf.dtype, made)
            found = differences(leaf, values[ours], shape_of(part))
            if problem := _too_large(made, leaf.dtype):  # a sum of two, say
                found.append(problem)
            for kind, text in found:
                problems.setdefault(kind, []).append(f"{shown(ours)}: {text}")
    layers = {str(name).rpartition(".")[0] for name in used}
    for name in state_dict.keys() - used:
        layer, _, last = str(name).rpartition(".")
        # With `debias=False`, our norms do not count batches.
        if last != "num_batches_tracked" or layer not in layers:
            shape = tuple(getattr(state_dict[name], "shape", ()))
            problems["unused"].append(f"{name}: {shape}")
    advice = _ADVICE if problems["missing"] or problems["unused"] else ""
    complain(problems, "`es.from_torch`: the state dict", advice)
    return put(model, named, values, placed_like)


_ADVICE: Final = """These are PyTorch's default names. If the dictionary uses \
different names, pass `rename={"layers.*": "blocks.*"}`. Leave out tensors that the \
model does not need: `{name: x for name, x in state_dict.items() if name != \
"head.weight"}`. Running statistics need `es.nn.BatchNorm` or `es.nn.Stateful(layer, \
state)`; with `debias=False`, the former does not need `num_batches_tracked`. If \
query, key and value are separate tensors, rename our arrays: \
`rename={"*.query_proj.*": "*.query.*"}`."""


def _is_key(part: Part) -> bool:
    is_rng = part.kind is not None and issubclass(part.kind, Rng)
    return is_rng or is_typed(whole_of(part).value)


def _as_numpy(value: Any) -> Any:
    """A copy of a tensor or an array as a NumPy array; anything else unchanged."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # NumPy lacks bfloat16, which float32 represents exactly.
        value = value.float() if "bfloat16" in str(value.dtype) else value
    return np.array(value) if hasattr(value, "shape") else value


def _why_not(array: Any, shape: _Shape, dtype: Any) -> tuple[str, str] | None:
    """Why an array does not fit: the kind of problem, and a text."""
    if not (is_numpy(array) and is_numeric(array.dtype)):
        return "not an array", f"`{type(array).__name__}`"
    if array.shape != shape:
        return "wrong shape", f"{array.shape} instead of {shape}"
    # A cast must not go back in the order bool, integer, float, complex: it may lose
    # precision, but nothing else.
    given, wanted = (
        [jnp.issubdtype(each, kind) for kind in _NUMBERS]
        for each in (array.dtype, dtype)
    )
    if not any(wanted) or given.index(True) > wanted.index(True):
        return "wrong dtype", _NO_CAST.format(array.dtype, dtype)
    return _too_large(array, dtype)


def _too_large(array: Any, dtype: Any) -> tuple[str, str] | None:
    if fits(dtype, array):
        return None
    return "wrong dtype", f"too large: {_NO_CAST.format(array.dtype, dtype)}"


_NO_CAST: Final = "{} cannot be cast to {}"


_NUMBERS: Final = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


# --- Names ----------------------------------------------------------------------------


def _names(
    given: Mapping[str, Any], rename: Rename, defaults: Mapping[_Place, list[str]]
) -> Callable[[KeyPath, str], str]:
    """A function from a default tensor name to the name in `given`, after `rename`."""
    every = dict.fromkeys(name for names in defaults.values() for name in names)
    theirs = renaming(rename, "es.from_torch", every)

    def find(layer: KeyPath, local: str) -> str:
        first, second = defaults[layer, local]
        is_second = theirs(first) not in given and theirs(second) in given
        return theirs(second if is_second else first)

    return find


def _default_names(
    layer: KeyPath, local: str, modules: Mapping[KeyPath, Any]
) -> list[str]:
    """The two possible names of a tensor in PyTorch, which may be equal."""
    found = []
    for left_out in _LEFT_OUT:
        keys = [
            key
            for i, key in enumerate(layer)
            if not isinstance(modules.get(layer[:i]), left_out.get(key, ()))
        ]
        found.append(".".join(text for text in (_dotted(keys), local) if text))
    return found


# Fields that PyTorch's names lack: `layer` of `Stateful`; and, for names in a
# `torch.nn.Sequential`, also `layers` of `Sequential`.
_WRAPPED: Final[dict[Any, Any]] = {jtu.GetAttrKey("layer"): Stateful}
_LEFT_OUT: Final = (_WRAPPED, _WRAPPED | {jtu.GetAttrKey("layers"): eqx.nn.Sequential})


def _dotted(path: Iterable[Any]) -> str:
    return jtu.keystr(plain(path), simple=True, separator=".")


# --- Layers ---------------------------------------------------------------------------


class _Source(NamedTuple):
    """The tensors that an array is computed from: shapes by name in the layer."""

    shapes: dict[str, _Shape]
    make: Callable[..., Any] = lambda tensor: tensor


def _source(part: Part, modules: Mapping[Any, Any]) -> tuple[KeyPath, str, _Source]:
    """The path of an array's layer, its name there, and its source."""
    path, shape = part.path, shape_of(part)
    for i in range(len(path)):
        module = modules.get(path[:i])
        for cls in type(module).__mro__:
            if cls in _LAYOUTS:
                name = _dotted(path[i:])
                found = _LAYOUTS[cls].get(name, name)
                if isinstance(found, str):
                    return path[:i], name, _Source({found: shape})
                return path[:i], name, found(module, shape)
    return path, "", _Source({"": shape})  # in none of the layers of `_LAYOUTS`


def _conv_bias(conv: Any, shape: _Shape) -> _Source:
    # Equinox's bias ends with an axis of size 1 for each spatial axis. PyTorch's does
    # not.
    flat = shape[: len(shape) - conv.num_spatial_dims]
    return _Source({"bias": flat}, lambda bias: bias.reshape(shape))


def _conv_transpose_weight(conv: Any, shape: _Shape) -> _Source:
    num = len(shape) - conv.num_spatial_dims - 2  # the first axes of a stack
    stack, (out, within, *kernel), groups = shape[:num], shape[num:], conv.groups

    def make(weight: Any) -> Any:
        # PyTorch stores the kernel of the forward convolution that this layer
        # transposes: swap the input and output channels within each group, and flip the
        # spatial axes.
        weight = weight.reshape(*stack, groups, within, out // groups, *kernel)
        spatial = tuple(range(num + 3, num + 3 + len(kernel)))
        return np.flip(weight.swapaxes(num + 1, num + 2), spatial).reshape(shape)

    return _Source({"weight": (*stack, groups * within, out // groups, *kernel)}, make)


def _gru_bias(cell: Any, shape: _Shape) -> _Source:
    # In the third gate, Equinox stores the hidden bias separately (`bias_n`), because
    # the reset gate scales it.
    two = 2 * cell.hidden_size
    return _Source(
        {"bias_ih": shape, "bias_hh": shape},
        lambda ih, hh: np.concatenate([_sum(ih, hh)[..., :two], ih[..., two:]], -1),
    )


def _gru_bias_n(cell: Any, shape: _Shape) -> _Source:
    size = cell.hidden_size
    shapes = {"bias_hh": (*shape[:-1], 3 * size)}
    return _Source(shapes, lambda hh: hh[..., 2 * size :])


def _sum(a: Any, b: Any) -> Any:
    # Add in float32 or wider, even if the tensors are in half precision.
    return a.astype(np.promote_types(a.dtype, np.float32)) + b


def _projection(which: int, last: str, attention: Any, shape: _Shape) -> _Source:
    """The weight or the bias of query, key or value."""
    a, axis = attention, -2 if last == "weight" else -1
    arrays = [getattr(x, last) for x in (a.query_proj, a.key_proj, a.value_proj)]
    if last == "weight" and len({x.shape[-1] for x in arrays}) > 1:
        return _Source({f"{'qkv'[which]}_proj_weight": shape})
    # The three are rows of one tensor, `in_proj`. In PyTorch either all three have a
    # bias or none, so if a bias is missing here, the tensor has the wrong size.
    rows = [0 if x is None else x.shape[axis] for x in arrays]
    start, end = sum(rows[:which]), sum(rows[: which + 1])
    packed = (*shape[:axis], sum(rows), *shape[len(shape) + axis + 1 :])
    make = ft.partial(np.take, indices=range(start, end), axis=axis)
    return _Source({f"in_proj_{last}": packed}, make)


def _biased(statistic: str, norm: Any, shape: _Shape) -> _Source:
    def make(average: Any, count: Any) -> Any:
        # Equinox's averages start at zero, and eval mode divides them by `scale`, in
        # float32.
        scale = 1 - np.float32(norm.momentum) ** count.astype(np.float32)
        return average * np.where(count > 0, scale, np.float32(1))[..., None]

    return _Source({statistic: shape, "num_batches_tracked": shape[:-1]}, make)


def _count(norm: Any, shape: _Shape) -> _Source:
    counter = {"num_batches_tracked": shape[:-1]}
    return _Source(counter, lambda count: np.broadcast_to(count[..., None], shape))


# PyTorch's names for the arrays of a layer, or functions that compute them. Layers that
# are not listed have the same names and layouts in both libraries: `Linear`,
# `LayerNorm`, `GroupNorm`, `Embedding`.
_LAYOUTS: Final[dict[type, dict[str, Any]]] = {
    eqx.nn.Conv: {"bias": _conv_bias},
    eqx.nn.ConvTranspose: {"bias": _conv_bias, "weight": _conv_transpose_weight},
    eqx.nn.GRUCell: {"bias": _gru_bias, "bias_n": _gru_bias_n},
    eqx.nn.LSTMCell: {
        "bias": lambda _, shape: _Source({"bias_ih": shape, "bias_hh": shape}, _sum)
    },
    eqx.nn.MultiheadAttention: {
        "output_proj.weight": "out_proj.weight",
        "output_proj.bias": "out_proj.bias",
        **{
            f"{name}_proj.{last}": ft.partial(_projection, which, last)
            for which, name in enumerate(("query", "key", "value"))
            for last in ("weight", "bias")
        },
    },
    BatchNorm: {"mean": "running_mean", "var": "running_var", "count": _count},
    eqx.nn.BatchNorm: {
        "ema_first_time_index.init": lambda _, shape: _Source(
            {}, lambda: np.zeros(shape, bool)
        ),
        "ema_state_index.init.0": "running_mean",
        "ema_state_index.init.1": "running_var",
        "batch_counter.init": "num_batches_tracked",
        "batch_state_index.init.0": ft.partial(_biased, "running_mean"),
        "batch_state_index.init.1": ft.partial(_biased, "running_var"),
    },
}
