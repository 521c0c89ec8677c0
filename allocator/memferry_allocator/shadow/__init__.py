"""The unified shadow address space."""

from .buffer import ShadowBuffer
from .copier import Completion, Copier, DirectCopier, Direction
from .eviction import EvictionPolicy, LeastRecentlyUsed, PlannedOrder
from .hybrid import HybridBuffer
from .partition import Partition
from .space import ShadowSpace
from .typed import ElementType, TypedView
from .view import Mode, Place, View

__all__ = [
    "Completion",
    "Copier",
    "DirectCopier",
    "Direction",
    "ElementType",
    "EvictionPolicy",
    "HybridBuffer",
    "LeastRecentlyUsed",
    "Mode",
    "Partition",
    "Place",
    "PlannedOrder",
    "ShadowBuffer",
    "ShadowSpace",
    "TypedView",
    "View",
]
