"""Where device memory comes from: one file a source."""

from .driver_memory import DriverMemory
from .driver_pool import DriverPoolMemory
from .virtual import VirtualMemory

__all__ = ["DriverMemory", "DriverPoolMemory", "VirtualMemory"]
