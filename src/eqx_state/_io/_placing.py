"""Values put where the arrays of a tree are: on their devices, in their shards."""

from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._compat import is_in_trace
from .._tree._walk import is_numpy
from ._stored import Stored


def placed_as(leaf: Any, value: Any) -> Any:
    """`value` as a NumPy or JAX array, whichever the leaf is, on its devices."""
    if isinstance(value, Stored):
        if not (is_numpy(leaf) or is_in_trace()):
            sharding = _sharding_of(leaf)
            if sharding is not None:
                return value.placed(sharding, leaf.dtype)
        value = value.whole()
    if any(isinstance(x, jax.core.Tracer) for x in (leaf, value)):
        return value
    if is_numpy(leaf):
        array = np.asarray(value, dtype=leaf.dtype)
        return array if isinstance(leaf, np.ndarray) else array[()]
    sharding = _sharding_of(leaf)
    # Straight there, through no other device.
    return jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)


def why_not_split(leaf: Any) -> str | None:
    """Why the shards that an abstract leaf says cannot be made; `None` if they can."""
    if not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is None:
        return None
    sharding = leaf.sharding
    how = getattr(sharding, "spec", sharding)
    if not is_in_trace():  # where nothing is put anywhere
        try:
            sharding = _sharding_of(leaf)
        except ValueError:
            return f"the mesh that is set lacks an axis of {how}"
        if sharding is None and not leaf.sharding.mesh.empty:
            return _NO_MESH_SET.format(how)
    try:
        (sharding or leaf.sharding).shard_shape(leaf.shape)
    except ValueError:
        return f"{leaf.shape} is not split into equal parts by {how}"
    return None


def _sharding_of(leaf: Any) -> jax.sharding.Sharding | None:
    """The sharding that a leaf says, if it says any."""
    # An abstract leaf may lack one, and an array that is not committed lies on the
    # default device only by chance.
    if leaf.sharding is None or not getattr(leaf, "committed", True):
        return None
    if isinstance(getattr(leaf.sharding, "mesh", None), jax.sharding.AbstractMesh):
        # It only says how to shard. Where to is up to the mesh that is set.
        if jax.sharding.get_abstract_mesh().empty:
            return None
        whole = jax.device_put(np.zeros(()), jax.sharding.PartitionSpec())
        return jax.sharding.NamedSharding(whole.sharding.mesh, leaf.sharding.spec)
    return leaf.sharding


_NO_MESH_SET: Final = """{} is on an abstract mesh, which has no devices, and no mesh \
is set: `with jax.set_mesh(mesh):`"""
