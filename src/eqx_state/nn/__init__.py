"""What Equinox lacks: layers with state, and stacks of layers."""

from ._batch_norm import BatchNorm as BatchNorm
from ._dropout import Dropout as Dropout
from ._stacked import Stacked as Stacked
from ._stateful import Stateful as Stateful
