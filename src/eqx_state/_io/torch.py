"""`es.from_torch`: the weights of a PyTorch model in one of Equinox."""

import functools as ft
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._kinds.kinds import Rng
from .._tree.context import AlikeKey
from .._tree.dtypes import holds, is_numeric
from .._tree.keys import is_typed
from .._tree.parts import Part, paths_of
from .._tree.walk import name_of, walk
from .._typing import KeyPath, PyTree
from ..nn._batch_norm import BatchNorm
from ..nn._stateful import Stateful
from .state_dict import by_name, complain, differences, place, Rename, Renaming, shown
from .stored import Named, shape_of, whole_of


# --- How PyTorch's layers store what Equinox's hold: names, shapes, layouts.
#
# An array of a layer that is not in `LAYOUTS` has the same name and the same layout in
# both: `weight` and `bias` of `Linear`, `LayerNorm`, `GroupNorm`, `Embedding`.


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


_Tree = TypeVar("_Tree")


def from_torch(
    model: _Tree, state_dict: Mapping[str, Any], rename: Rename = None
) -> _Tree:
    """`model` with the weights and buffers of a PyTorch module in it.

    PyTorch's default name of an array is its path here with dots, and with PyTorch's
    name for it in its layer: `layers[0].cell.weight_ih` is `layers.0.cell.weight_ih`,
    and `norm.mean` of an `es.nn.BatchNorm` is `norm.running_mean`. `es.nn.Stateful`
    adds nothing to a name. Nor need `equinox.nn.Sequential`: its first layer is
    `layers.0`, or just `0`, as in `torch.nn.Sequential`.

    Where the layouts differ, they are converted: those of convolutions, batch norms,
    GRU and LSTM cells, and multi-head attention. All other arrays have one layout in
    both libraries, or belong to your own classes, and are taken as they are. PRNG keys
    stay those of `model`.

    **Arguments:**

    - `model`: a model of Equinox's layers, those of `es.nn`, and your own. It may be
        abstract, as `equinox.filter_eval_shape` returns it. Modes stay as they are.
    - `state_dict`: what `module.state_dict()` returns, or any dictionary from names to
        tensors or arrays, such as a safetensors file has. PyTorch need not be there.
    - `rename`: what the dictionary calls an array: a function from the default name to
        the name there, or a dictionary from globs to globs, as in `es.load_state_dict`.
        Default: the default names.

    **Returns:**

    A new model, whose arrays are copies and have the dtypes of those in `model`.

    **Raises:**

    - `ValueError`: a name is missing or unused, a shape differs, a tensor has a dtype
        that cannot be cast (a float to an integer, for example), a number is too large
        for the model's dtype, or a layer of one library has what that of the other
        lacks. The message lists all of it.
    - `ValueError` and `TypeError`: `rename` is wrong, as in `es.load_state_dict`.
    - `TypeError`: `state_dict` is not a dictionary.
    - `es.NotInitializedError`: the model still holds an `es.Initializer`.

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
        tensors = {  # of PyTorch, or arrays
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
        raise TypeError(_NO_DICTIONARY.format(type(state_dict).__name__))
    named = by_name(model)
    wanted = {k: entry for k, entry in named.items() if not _is_key(entry[1])}
    parts = {name: part for name, (_, part) in wanted.items()}
    tensors = _Tensors(model, state_dict, Renaming(rename, "es.from_torch"))
    values = {}
    for path, names in _by_layer(wanted, tensors.modules).items():
        layer = Layer(
            module=tensors.modules.get(path),
            shapes={local: shape_of(parts[name]) for local, name in names.items()},
            has=ft.partial(tensors.has, path),
        )
        if (reason := why_not(layer)) is not None:
            tensors.report("not in PyTorch", shown(name_of(path)), reason)
        for local, name in names.items():
            source = source_of(layer, local)
            values[name] = tensors.read(path, source, name, parts[name])
    tensors.renaming.check_used()
    tensors.report_unused()
    problems = tensors.problems
    advice = _ADVICE if problems["missing"] or problems["unused"] else ""
    complain(problems, "`es.from_torch`: the state dict", advice)
    return place(model, wanted, values)


def _is_key(part: Part) -> bool:
    is_rng = part.kind is not None and issubclass(part.kind, Rng)
    return is_rng or is_typed(whole_of(part).value)


def _by_layer(
    wanted: Named, modules: Mapping[KeyPath, Any]
) -> dict[KeyPath, dict[str, str]]:
    """For the path of each layer with a layout of its own: local names, and ours.

    An array outside these layers is alone, and has no local name.
    """
    layers: dict[KeyPath, dict[str, str]] = {}
    for name, (_, part) in wanted.items():
        path = part.path
        inside = (i for i in range(len(path)) if has_layout(modules.get(path[:i])))
        end = next(inside, len(path))
        layers.setdefault(path[:end], {})[_dotted(path[end:])] = name
    return layers


class _Tensors:
    """The tensors of a state dict by their places in a model, and what is wrong."""

    def __init__(self, tree: PyTree, given: Mapping[str, Any], renaming: Renaming):
        self.given, self.renaming = given, renaming
        modules = [visit for visit in walk(tree) if not visit.is_leaf]
        self.modules = {path: v.node for v in modules for path in paths_of(v)}
        self.used: set[str] = set()
        self.problems: dict[str, list[str]] = {"missing": [], "unused": []}
        # Fields that do not occur in PyTorch's names, or need not.
        self.wrapped = self.fields(Stateful, "layer")
        self.sequences = self.fields(eqx.nn.Sequential, "layers")

    def fields(self, cls: type, name: str) -> set[KeyPath]:
        found = [path for path, x in self.modules.items() if isinstance(x, cls)]
        return {(*path, jtu.GetAttrKey(name)) for path in found}

    def default_names(self, path: KeyPath, local: str) -> Iterator[str]:
        """What PyTorch calls a tensor of the layer at a path."""
        for left_out in (self.wrapped, self.wrapped | self.sequences):
            keys = [key for i, key in enumerate(path) if path[: i + 1] not in left_out]
            yield ".".join(text for text in (_dotted(keys), local) if text)

    def find(self, path: KeyPath, local: str) -> str:
        """The name in the state dict, or what it would be."""
        found = []
        for name in self.default_names(path, local):
            found.append(self.renaming(name))
            if found[-1] in self.given:
                return found[-1]
        return found[0]

    def has(self, path: KeyPath, local: str) -> bool:
        return self.find(path, local) in self.given

    def read(self, path: KeyPath, source: Source, ours: str, part: Part) -> Any:
        """The value of an array, as the source makes it; `None` after a problem."""
        leaf, arrays = whole_of(part).value, []
        for local, shape in source.shapes.items():
            name = self.find(path, local)
            self.used.add(name)
            label = shown(name) if name == ours else f"{name} (for {shown(ours)})"
            if name not in self.given:
                self.report("missing", label)
            elif (array := _as_numpy(self.given[name])) is None:
                text = f"a `{type(self.given[name]).__name__}`"
                self.report("not an array", label, text)
            elif array.shape != shape:
                self.report("wrong shape", label, f"{array.shape} instead of {shape}")
            elif not _can_cast(array, leaf.dtype):
                text = f"{array.dtype} cannot be cast to {leaf.dtype}"
                self.report("wrong dtype", label, text)
            elif not _stays_finite(array, leaf.dtype):
                text = f"a number is too large for {leaf.dtype}"
                self.report("wrong dtype", label, text)
            else:
                arrays.append(array)
        if len(arrays) < len(source.shapes):
            return None
        value = np.array(source.make(*arrays)).astype(leaf.dtype)
        for problem, text in differences(leaf, value, shape_of(part)):
            self.report(problem, shown(ours), text)
        return value

    def report(self, problem: str, *texts: str) -> None:
        self.problems.setdefault(problem, []).append(": ".join(texts))

    def report_unused(self) -> None:
        for name in self.given.keys() - self.used:
            if not may_be_left(str(name), self.used):
                why = NO_COUNTERPART.get(str(name).rpartition(".")[2])
                texts = [str(name), _described(self.given[name]), why]
                self.report("unused", *[text for text in texts if text])


def _dotted(path: Iterable[Any]) -> str:
    keys = tuple(k.key if isinstance(k, AlikeKey) else k for k in path)
    return jtu.keystr(keys, simple=True, separator=".")


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a `{type(value).__name__}`" if shape is None else str(tuple(shape))


def _as_numpy(value: Any) -> np.ndarray | None:
    """A copy of a tensor or an array; `None` if NumPy cannot have one."""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            try:
                value = value.numpy()
            except TypeError:  # NumPy has no bfloat16; each is a float32, too
                value = value.float().numpy()
        if not hasattr(value, "shape"):
            return None
        array = np.array(value)
    except Exception:  # for a reason of its library
        return None
    return array if is_numeric(array.dtype) else None


_KINDS: Final = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _can_cast(array: np.ndarray, dtype: Any) -> bool:
    """Whether nothing but precision can get lost."""
    from_, to = ([jnp.issubdtype(d, k) for k in _KINDS] for d in (array.dtype, dtype))
    return any(to) and from_.index(True) <= to.index(True) and holds(dtype, array)


def _stays_finite(array: np.ndarray, dtype: Any) -> bool:
    """Whether no number becomes infinite."""
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    return np.array_equal(np.isfinite(array), np.isfinite(cast))


_NO_DICTIONARY: Final = """`es.from_torch(model, state_dict)` takes a dictionary from \
names to tensors, as `module.state_dict()` returns it, and was given a `{}`."""

_ADVICE: Final = """Names are PyTorch's. `rename=` says what they are there: \
`rename={"layers.*": "blocks.*"}`. Leave out what the model does not need: \
`{name: x for name, x in state_dict.items() if name != "head.weight"}`."""
