"""Stateful Equinox modules for JAX: annotate fields, and update state in place."""

import importlib as _importlib
import typing as _t

from . import nn as nn
from ._errors import (
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
from ._tree.filters import (
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
from ._tree.parts import Part as Part, parts as parts
from ._tree.rules import spec as spec
from ._tree.select import (
    configure as configure,
    filter as filter,
    map as map,
    map_modules as map_modules,
    mask as mask,
    modules as modules,
    partition as partition,
    update as update,
)


__version__: str

if _t.TYPE_CHECKING:
    from ._ema import Ema as Ema
    from ._functional import functional as functional
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
    from ._optimizer.optimizer import Optimizer as Optimizer
    from ._rng_stream import RngStream as RngStream
    from ._sharding.axis_names import axis_names as axis_names
    from ._sharding.sharding import sharding as sharding
    from ._transforms.custom_vjp import custom_vjp as custom_vjp
    from ._transforms.derivatives import (
        hessian as hessian,
        jacfwd as jacfwd,
        jacrev as jacrev,
        jvp as jvp,
        linearize as linearize,
        vjp as vjp,
    )
    from ._transforms.shard_map import shard_map as shard_map
else:
    # Import these on first use: importing optax takes longer than importing the rest of
    # this package.
    _MODULES = {
        "._ema": "Ema",
        "._functional": "functional",
        "._inspect.capture": "capture",
        "._inspect.nonfinite": "find_nonfinite nonfinite",
        "._inspect.tabulate": "tabulate",
        "._interop": "to_equinox",
        "._io.files": "load load_metadata save",
        "._io.state_dict": "load_state_dict state_dict",
        "._io.torch": "from_torch",
        "._optimizer.optimizer": "Optimizer",
        "._rng_stream": "RngStream",
        "._sharding.axis_names": "axis_names",
        "._sharding.sharding": "sharding",
        "._transforms.custom_vjp": "custom_vjp",
        "._transforms.derivatives": "hessian jacfwd jacrev jvp linearize vjp",
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
