"""State for Equinox modules: declare what each field is, assign state in the forward
pass, and get a new model back.

## Kinds

- `es.TreePart`: The base class of all kinds.
- `es.Parameter`: Arrays that gradients train: weights, biases.
- `es.Buffer`: Constants: never trained, never written.
- `es.State`: Arrays that a forward pass may write: counters, caches, running values.
- `es.BatchStat`: A running statistic over the batches seen in training.
- `es.Rng`: A PRNG key that a layer draws from and advances.
- `es.OptState`: An optimizer's moments and counts.
- `es.field`: An `equinox.field` that also declares the kind of the field's arrays.
- `es.Axes`: Names the axes of a layer's arrays, in the annotation of the layer's field.

## Modules

- `es.Module`: Base class for models with state.
- `es.lazy`: A placeholder for `cls(*args, key=key, **kwargs)`, a layer that `init`
    creates.
- `es.Initializer`: A placeholder for the value `f(key)`, which `init` draws.
- `es.init`: Initialize a model: draw every placeholder, and run every `module_init`.
- `es.NotInitializedError`: A model contains an `es.Initializer`, or a `module_init`
    that has not run.
- `es.RngStream`: A module that returns a fresh PRNG key on each call.
- `es.reseed`: Replace every PRNG key (every array of kind `es.Rng`) by a new one.
- `es.nn.BatchNorm`: Normalizes each channel over the batch (Ioffe and Szegedy, 2015).
- `es.nn.Dropout`: Sets elements to zero at random in train mode, and scales the others
    up.
- `es.nn.Stacked`: Layers of equal structure that run one after the other: `x =
    layer(x)` for each.
- `es.nn.Stateful`: A stateful Equinox layer, called as `layer(x, state)`, that stores
    its own state.
- `es.to_equinox`: A callable model as Equinox's pair of a stateful layer and its
    `eqx.nn.State`.

## Modes

- `es.train`: `tree` with every module in it in train mode.
- `es.eval`: `tree` with every module in it in eval mode: `es.train(tree, False)`.
- `es.freeze`: `tree` with all of it frozen, or only the nodes that `where` selects.
- `es.unfreeze`: `tree` with all of it, or only the nodes that `where` selects,
    trainable again.

## Writing state

- `es.mutable`: A function like `f` that can write state, and returns `(output,
    new_model)`.
- `es.TraceError`: State was written inside a JAX transform that cannot return it.
- `es.LostStateWarning`: `es.Optimizer.update` was given the model from before a call
    that wrote state.
- `es.functional`: A callable model as a pure function and two dicts of arrays, for
    plain JAX.

## Transforms

- `es.jit`: `equinox.filter_jit` for functions that may write the state of modules.
- `es.vmap`: `jax.vmap` for functions that may write the state of modules.
- `es.SPLIT`: The axis of a PRNG key that is split, so that each lane gets its own key.
- `es.scan`: `jax.lax.scan` that carries state from step to step.
- `es.while_loop`: `jax.lax.while_loop` that carries state from step to step.
- `es.fori_loop`: `jax.lax.fori_loop` that carries state from step to step.
- `es.cond`: `jax.lax.cond` in which both branches may write state.
- `es.switch`: `jax.lax.switch` in which any branch may write state.
- `es.checkpoint`: `jax.checkpoint` (remat) for functions that may write the state of
    modules.
- `es.shard_map`: `jax.shard_map` for functions that may write the state of modules.
- `es.vjp`: `jax.vjp` that also updates the state of modules.
- `es.jvp`: `jax.jvp` that also updates the state of modules.
- `es.linearize`: `jax.linearize` that also updates the state of modules.
- `es.jacfwd`: `jax.jacfwd` that also updates the state of modules.
- `es.jacrev`: `jax.jacrev` that also updates the state of modules.
- `es.hessian`: `jax.hessian` that also updates the state of modules.
- `es.custom_vjp`: `jax.custom_vjp` for functions that may write the state of modules.

## Selecting

- `es.parts`: Every array in `tree`, with its path, name and kind, in the order of
    flattening.
- `es.Part`: One array of a tree, with its path, name and kind.
- `es.filter`: `tree` with every leaf that is not selected replaced by `None`.
- `es.update`: `tree` with leaves replaced by those of the partials; the inverse of
    `es.filter`.
- `es.partition`: One tree for each filter, and one for all other leaves.
- `es.mask`: A tree of bools, `True` where a leaf satisfies all filters.
- `es.spec`: A tree of values chosen by rules: vmap axes, shardings, labels.
- `es.map`: `jax.tree.map` over the leaves that match a filter; other leaves do not
    change.
- `es.modules`: Every `eqx.Module` in `tree` once, with its name; parents first.
- `es.map_modules`: `tree` with every `eqx.Module` replaced by `f(module, name)`,
    children first.
- `es.configure`: `tree` with these attributes set on every module that has them.
- `es.trainable`: The filter for trainable arrays: inexact parameters that are not
    frozen.
- `es.any_of`: The filter that selects the arrays that at least one of `filters`
    selects.
- `es.all_of`: The filter that selects the arrays that all `filters` select.
- `es.not_`: The filter that selects the arrays that `filter` does not select.
- `es.under`: The filter that selects all arrays in a node of the tree.
- `es.inside`: The filter that selects all arrays inside modules of a class, at any
    depth.
- `es.path_matches`: The filter that selects arrays by name, such as
    `layers[0].norm.mean`.

## Training

- `es.value_and_grad`: A function that returns the value of `f`, the new model, and the
    gradients.
- `es.grad`: A function that returns the gradients of `f`, and the new model.
- `es.Optimizer`: An optax optimizer and its state, as one pytree that passes through
    `jit`.
- `es.per_layer`: An optax transformation that runs `tx` on each layer of each stack.
- `es.Ema`: The exponential moving average of a model, as a pytree that `jit` accepts.
- `es.axis_names`: The names that annotations give to the axes of each array.
- `es.sharding`: A `jax.sharding.NamedSharding` for each array, by the names of its
    axes.

## Files

- `es.save`: Write the arrays of `tree` to a safetensors file.
- `es.load`: `like` with the arrays of a safetensors file; the inverse of `es.save`.
- `es.load_metadata`: The metadata of a safetensors file, as passed to `es.save`.
- `es.state_dict`: The arrays in `tree` by name, in a flat dictionary.
- `es.load_state_dict`: `tree` with the arrays of a dictionary; the inverse of
    `es.state_dict`.
- `es.from_torch`: `model` with the weights and buffers of a PyTorch module.

## Looking in

- `es.audit`: What a training step does that is legal and seldom meant.
- `es.Finding`: Something in a training step that is legal and seldom meant.
- `es.tabulate`: A table of the modules in a tree, and of their arrays with kinds and
    sizes.
- `es.capture`: `es.mutable(f)` that also returns values from inside: those that modules
    sow, and the outputs of modules that you select.
- `es.find_nonfinite`: The names of the modules that produce a NaN or an infinity in a
    call of `f`.
- `es.nonfinite`: The names of the arrays in a tree that contain a NaN or an infinity.
"""

import importlib as _importlib
import typing as _t

from . import nn as nn
from ._errors import (
    LostStateWarning as LostStateWarning,
    no_attribute as _no_attribute,
    NotInitializedError as NotInitializedError,
    TraceError as TraceError,
)
from ._jit.jit import jit as jit
from ._kinds.fields import field as field
from ._kinds.kinds import (
    Axes as Axes,
    BatchStat as BatchStat,
    Buffer as Buffer,
    OptState as OptState,
    Parameter as Parameter,
    Rng as Rng,
    State as State,
    TreePart as TreePart,
)
from ._state.init import init as init
from ._state.lazy import Initializer as Initializer, lazy as lazy
from ._state.module import Module as Module
from ._transforms.axes import SPLIT as SPLIT
from ._transforms.branches import cond as cond, switch as switch
from ._transforms.checkpoint import checkpoint as checkpoint
from ._transforms.grad import grad as grad, value_and_grad as value_and_grad
from ._transforms.loops import (
    fori_loop as fori_loop,
    scan as scan,
    while_loop as while_loop,
)
from ._transforms.mutable import mutable as mutable
from ._transforms.vmap import vmap as vmap
from ._tree.combinators import (
    all_of as all_of,
    any_of as any_of,
    inside as inside,
    not_ as not_,
    path_matches as path_matches,
    trainable as trainable,
    under as under,
)
from ._tree.keys import reseed as reseed
from ._tree.modes import (
    eval as eval,
    freeze as freeze,
    train as train,
    unfreeze as unfreeze,
)
from ._tree.modules import (
    configure as configure,
    map_modules as map_modules,
    modules as modules,
)
from ._tree.parts import Part as Part, parts as parts
from ._tree.rules import spec as spec
from ._tree.select import (
    filter as filter,
    map as map,
    mask as mask,
    partition as partition,
    update as update,
)


__version__: str

if _t.TYPE_CHECKING:
    from ._ema import Ema as Ema
    from ._functional import functional as functional
    from ._inspect.audit import audit as audit, Finding as Finding
    from ._inspect.capture import capture as capture
    from ._inspect.nonfinite import (
        find_nonfinite as find_nonfinite,
        nonfinite as nonfinite,
    )
    from ._inspect.tabulate import tabulate as tabulate
    from ._interop import to_equinox as to_equinox
    from ._io.files import load as load, load_metadata as load_metadata, save as save
    from ._io.state_dict import (
        load_state_dict as load_state_dict,
        state_dict as state_dict,
    )
    from ._io.torch import from_torch as from_torch
    from ._optimizer.layers import per_layer as per_layer
    from ._optimizer.optimizer import Optimizer as Optimizer
    from ._rng_stream import RngStream as RngStream
    from ._sharding import axis_names as axis_names, sharding as sharding
    from ._transforms.custom_vjp import custom_vjp as custom_vjp
    from ._transforms.derivatives import jvp as jvp, linearize as linearize, vjp as vjp
    from ._transforms.jacobians import (
        hessian as hessian,
        jacfwd as jacfwd,
        jacrev as jacrev,
    )
    from ._transforms.shard_map import shard_map as shard_map
else:
    # Import these on first use: importing optax takes longer than importing the rest of
    # this package.
    _MODULES = {
        "._ema": "Ema",
        "._functional": "functional",
        "._inspect.audit": "audit Finding",
        "._inspect.capture": "capture",
        "._inspect.nonfinite": "find_nonfinite nonfinite",
        "._inspect.tabulate": "tabulate",
        "._interop": "to_equinox",
        "._io.files": "load load_metadata save",
        "._io.state_dict": "load_state_dict state_dict",
        "._io.torch": "from_torch",
        "._optimizer.layers": "per_layer",
        "._optimizer.optimizer": "Optimizer",
        "._rng_stream": "RngStream",
        "._sharding": "axis_names sharding",
        "._transforms.custom_vjp": "custom_vjp",
        "._transforms.derivatives": "jvp linearize vjp",
        "._transforms.jacobians": "hessian jacfwd jacrev",
        "._transforms.shard_map": "shard_map",
    }
    _LATER = {name: module for module in _MODULES for name in _MODULES[module].split()}

    def __getattr__(name):
        if name == "__version__":  # finding the metadata takes milliseconds
            value = _importlib.import_module("importlib.metadata").version(__name__)
        elif name in _LATER:
            module = _importlib.import_module(_LATER[name], __name__)
            value = getattr(module, name)
        else:
            raise _no_attribute(__name__, name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *_LATER, "__version__"})

    __all__ = [name for name in __dir__() if not name.startswith("_")]
