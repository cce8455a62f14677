"""Layers that Equinox lacks: those with state."""

from ._batch_norm import BatchNorm as BatchNorm
from ._dropout import Dropout as Dropout
from ._stateful import Stateful as Stateful
