"""The execution scheduler: for every layer where its weights are read, how its gradient leaves, who updates it.

Nothing here needs a framework or a device.
"""

from .modes import GradientMode, LayerModes, StateMode, WeightMode, format_modes, parse_modes
from .profile import (
    Copy,
    CopySample,
    GradientPlace,
    LayerKind,
    LayerProfile,
    Phase,
    Profile,
    Timing,
    WeightPlace,
    load_profile,
    save_profile,
)

__all__ = [
    "Copy",
    "CopySample",
    "GradientMode",
    "GradientPlace",
    "LayerKind",
    "LayerModes",
    "LayerProfile",
    "Phase",
    "Profile",
    "StateMode",
    "Timing",
    "WeightMode",
    "WeightPlace",
    "format_modes",
    "load_profile",
    "parse_modes",
    "save_profile",
]
