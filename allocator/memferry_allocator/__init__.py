"""MemFerry's allocator: host pages, device pools, and one shadow address space over both.

Stands alone: it knows no framework and loads no CUDA library until a device is opened.
"""

from .device import DevicePool
from .driver import (
    CaptureMode,
    Driver,
    EmulatedDriver,
    EmulatedOptions,
    Event,
    PageKind,
    PageLocation,
    Span,
    Stream,
    open_device,
    open_driver,
)
from .errors import (
    AllocatorError,
    CaptureError,
    ClosedError,
    DeviceLostError,
    DriverError,
    DriverNotFoundError,
    DriverOutOfMemory,
    ForkedError,
    InvalidRequestError,
    MemFerryError,
    OutOfMemory,
    RaceError,
    UnsupportedError,
)
from .host import ArenaOptions, HostArena, RegistrationMap, registrations
from .shadow import Copier, DirectCopier, Direction, Mode, Partition, Place, ShadowBuffer, ShadowSpace, View
from .sizes import format_size, parse_size

__all__ = [
    "AllocatorError",
    "ArenaOptions",
    "CaptureError",
    "CaptureMode",
    "ClosedError",
    "Copier",
    "DeviceLostError",
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
    "ForkedError",
    "HostArena",
    "InvalidRequestError",
    "MemFerryError",
    "Mode",
    "OutOfMemory",
    "PageKind",
    "PageLocation",
    "Partition",
    "Place",
    "RaceError",
    "RegistrationMap",
    "ShadowBuffer",
    "ShadowSpace",
    "Span",
    "Stream",
    "UnsupportedError",
    "View",
    "format_size",
    "open_device",
    "open_driver",
    "parse_size",
    "registrations",
]
