"""Device memory: where it comes from, pools of it, and what can be put on top."""

from .pool import DevicePool
from .requests import ALIGNMENT
from .resource import MemoryResource
from .sources import DriverMemory, DriverPoolMemory, VirtualMemory

__all__ = ["ALIGNMENT", "DevicePool", "DriverMemory", "DriverPoolMemory", "MemoryResource", "VirtualMemory"]
