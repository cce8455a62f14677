"""Layers that Equinox lacks: layers with state, and stacks of layers."""

import typing as _t

from .._errors import no_attribute as _no_attribute
from ._batch_norm import BatchNorm as BatchNorm
from ._dropout import Dropout as Dropout
from ._stacked import Stacked as Stacked
from ._stateful import Stateful as Stateful


if not _t.TYPE_CHECKING:

    def __getattr__(name):
        raise _no_attribute(__name__, name)
