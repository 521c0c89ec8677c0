"""The execution scheduler: for every layer where its weights are read, how its gradient leaves, who updates it.

Nothing here needs a framework or a device.
"""

from .modes import GradientMode, LayerModes, StateMode, WeightMode, format_modes, parse_modes

__all__ = [
    "GradientMode",
    "LayerModes",
    "StateMode",
    "WeightMode",
    "format_modes",
    "parse_modes",
]
