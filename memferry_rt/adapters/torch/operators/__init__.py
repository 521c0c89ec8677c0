"""What layers compute on host memory: functions on plain tensors that know nothing of models or plans.

They are called without autograd.  Tensors over mapped host memory are tensors of the device; on the emulated
device all are the CPU's.  The caller declares what is touched with `Driver.launch`.
"""

from .embedding import (
    accumulate_rows,
    clear_rows,
    embedding_forward,
    embedding_gradient_rows,
    gradient_of_rows,
    unique_rows,
    write_rows,
)
from .exact import ExactModes, LinearShape, exact_modes, same_bytes
from .linear import bias_gradient, linear_forward, linear_input_gradient
from .outbox import DirectOutbox, LaneOutbox, Outbox
from .weight import weight_gradient

__all__ = [
    "DirectOutbox",
    "ExactModes",
    "LaneOutbox",
    "LinearShape",
    "Outbox",
    "accumulate_rows",
    "bias_gradient",
    "clear_rows",
    "embedding_forward",
    "embedding_gradient_rows",
    "exact_modes",
    "gradient_of_rows",
    "linear_forward",
    "linear_input_gradient",
    "same_bytes",
    "unique_rows",
    "weight_gradient",
    "write_rows",
]
