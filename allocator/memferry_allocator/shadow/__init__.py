"""The unified shadow address space."""

from .copier import Completion, Copier, DirectCopier, Direction
from .hybrid import HybridBuffer
from .partition import Partition
from .space import ShadowBuffer, ShadowSpace
from .view import Mode, Place, View

__all__ = [
    "Completion",
    "Copier",
    "DirectCopier",
    "Direction",
    "HybridBuffer",
    "Mode",
    "Partition",
    "Place",
    "ShadowBuffer",
    "ShadowSpace",
    "View",
]
