"""`es.from_torch`: the weights of a PyTorch model in one of Equinox."""

import functools as ft
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._kinds._kinds import Rng
from .._state._fit import holds, is_numeric
from .._tree._children import AlikeKey
from .._tree._keys import is_typed
from .._tree._parts import Part
from .._tree._stacks import paths_of
from .._tree._walk import name_of, walk
from .._typing import KeyPath, PyTree
from ..nn._stateful import Stateful
from ._layers import Named, shape_of, whole_of
from ._rename import Rename, Renaming
from ._state_dict import by_name, complain, differences, place, shown
from ._torch_layers import (
    has_layout,
    Layer,
    may_be_left,
    NO_COUNTERPART,
    Source,
    source_of,
    why_not,
)


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
