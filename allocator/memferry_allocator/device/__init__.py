"""Device memory: where it comes from, pools of it, and what can be put on top."""

from .adaptors import (
    Adaptor,
    Allocation,
    CountedMemory,
    Counts,
    LimitedMemory,
    LoggedMemory,
    RetryingMemory,
    TrackedMemory,
)
from .log import Action, LogEntry, LogWriter, read_log
from .pool import DevicePool
from .replay import ReplayReport, replay
from .requests import ALIGNMENT
from .resource import MemoryResource
from .size_only import SizeOnlyDriver
from .sources import DriverMemory, DriverPoolMemory, VirtualMemory

__all__ = [
    "ALIGNMENT",
    "Action",
    "Adaptor",
    "Allocation",
    "CountedMemory",
    "Counts",
    "DevicePool",
    "DriverMemory",
    "DriverPoolMemory",
    "LimitedMemory",
    "LogEntry",
    "LogWriter",
    "LoggedMemory",
    "MemoryResource",
    "ReplayReport",
    "RetryingMemory",
    "SizeOnlyDriver",
    "TrackedMemory",
    "VirtualMemory",
    "read_log",
    "replay",
]
