"""Equinox modules whose annotations say what their fields are."""

import importlib as _importlib
import sys as _sys
import typing as _t

from . import nn as nn
from ._control_flow import (
    cond as cond,
    fori_loop as fori_loop,
    scan as scan,
    switch as switch,
    while_loop as while_loop,
)
from ._errors import (
    NotInitializedError as NotInitializedError,
    TraceError as TraceError,
)
from ._jit._jit import jit as jit
from ._kinds._axes import Axes as Axes
from ._kinds._fields import field as field
from ._kinds._kinds import (
    BatchStat as BatchStat,
    Buffer as Buffer,
    OptState as OptState,
    Parameter as Parameter,
    Rng as Rng,
    State as State,
    TreePart as TreePart,
)
from ._state._init import init as init, Initializer as Initializer, lazy as lazy
from ._state._module import Module as Module
from ._transforms._grad import grad as grad, value_and_grad as value_and_grad
from ._transforms._mapped_axes import SPLIT as SPLIT
from ._transforms._mutable import mutable as mutable
from ._transforms._remat import checkpoint as checkpoint
from ._transforms._vmap import vmap as vmap
from ._tree._filters import (
    all_of as all_of,
    any_of as any_of,
    inside as inside,
    not_ as not_,
    path_matches as path_matches,
    trainable as trainable,
    under as under,
)
from ._tree._keys import reseed as reseed
from ._tree._modes import (
    eval as eval,
    freeze as freeze,
    train as train,
    unfreeze as unfreeze,
)
from ._tree._parts import Part as Part, parts as parts
from ._tree._rules import spec as spec
from ._tree._select import (
    filter as filter,
    map as map,
    mask as mask,
    partition as partition,
    update as update,
)
from ._tree._surgery import (
    configure as configure,
    map_modules as map_modules,
    modules as modules,
)


if _t.TYPE_CHECKING:
    from ._ema import Ema as Ema
    from ._functional import functional as functional
    from ._inspect._capture import capture as capture
    from ._inspect._nonfinite import (
        find_nonfinite as find_nonfinite,
        nonfinite as nonfinite,
    )
    from ._inspect._tabulate import tabulate as tabulate
    from ._interop import to_equinox as to_equinox
    from ._io._save_load import (
        load as load,
        load_metadata as load_metadata,
        save as save,
    )
    from ._io._state_dict import (
        load_state_dict as load_state_dict,
        state_dict as state_dict,
    )
    from ._io._torch import from_torch as from_torch
    from ._jit._hold import hold as hold
    from ._optimizer._optimizer import Optimizer as Optimizer
    from ._rng_stream import RngStream as RngStream
    from ._sharding import sharding as sharding
    from ._transforms._custom_vjp import custom_vjp as custom_vjp
    from ._transforms._jacobians import (
        hessian as hessian,
        jacfwd as jacfwd,
        jacrev as jacrev,
    )
    from ._transforms._shard_map import shard_map as shard_map
    from ._transforms._vjp import jvp as jvp, linearize as linearize, vjp as vjp
    from ._tree._axis_names import axis_names as axis_names
else:
    # What a first import does not need is imported when it is first looked up. So the
    # import does not wait for optax, which takes longer than all of this package.
    _LATER = {
        "Ema": "._ema",
        "Optimizer": "._optimizer._optimizer",
        "RngStream": "._rng_stream",
        "axis_names": "._tree._axis_names",
        "capture": "._inspect._capture",
        "custom_vjp": "._transforms._custom_vjp",
        "find_nonfinite": "._inspect._nonfinite",
        "from_torch": "._io._torch",
        "functional": "._functional",
        "hessian": "._transforms._jacobians",
        "hold": "._jit._hold",
        "jacfwd": "._transforms._jacobians",
        "jacrev": "._transforms._jacobians",
        "jvp": "._transforms._vjp",
        "linearize": "._transforms._vjp",
        "load": "._io._save_load",
        "load_metadata": "._io._save_load",
        "load_state_dict": "._io._state_dict",
        "nonfinite": "._inspect._nonfinite",
        "save": "._io._save_load",
        "shard_map": "._transforms._shard_map",
        "sharding": "._sharding",
        "state_dict": "._io._state_dict",
        "tabulate": "._inspect._tabulate",
        "to_equinox": "._interop",
        "vjp": "._transforms._vjp",
    }

    def __getattr__(name):
        if name not in _LATER:
            said = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(said, name=name, obj=_sys.modules[__name__])
        module = _importlib.import_module(_LATER[name], __name__)
        value = globals()[name] = getattr(module, name)
        return value

    def __dir__():
        return sorted({*globals(), *_LATER})

    __all__ = [name for name in __dir__() if not name.startswith("_")]
