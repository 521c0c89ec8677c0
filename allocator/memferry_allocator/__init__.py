"""MemFerry's allocator: host pages, device pools, and one shadow address space over both.

Stands alone: it knows no framework and loads no CUDA library until a device is opened.
"""

from .device import DevicePool
from .driver import (
    Driver,
    EmulatedDriver,
    EmulatedOptions,
    Event,
    Span,
    Stream,
    open_device,
    open_driver,
)
from .errors import (
    AllocatorError,
    ClosedError,
    DriverError,
    DriverNotFoundError,
    DriverOutOfMemory,
    InvalidRequestError,
    MemFerryError,
    OutOfMemory,
    RaceError,
)
from .host import ArenaOptions, HostArena, RegistrationMap, registrations
from .shadow import Copier, DirectCopier, Direction, Mode, Partition, Place, ShadowBuffer, ShadowSpace, View
from .sizes import format_size, parse_size

__all__ = [
    "AllocatorError",
    "ArenaOptions",
    "ClosedError",
    "Copier",
    "DevicePool",
    "DirectCopier",
    "Direction",
    "Driver",
    "DriverError",
    "DriverNotFoundError",
    "DriverOutOfMemory",
    "EmulatedDriver",
    "EmulatedOptions",
    "Event",
    "HostArena",
    "InvalidRequestError",
    "MemFerryError",
    "Mode",
    "OutOfMemory",
    "Partition",
    "Place",
    "RaceError",
    "RegistrationMap",
    "ShadowBuffer",
    "ShadowSpace",
    "Span",
    "Stream",
    "View",
    "format_size",
    "open_device",
    "open_driver",
    "parse_size",
    "registrations",
]
