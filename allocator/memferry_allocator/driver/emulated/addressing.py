"""All memories of an emulated machine, and the way from any address to its bytes."""

from __future__ import annotations

from ...errors import DriverError
from ..types import Span
from .memory import DEVICE_BASE, HOST_END, MAPPED_OFFSET, VIRTUAL_BASE, DeviceMemory, HostMemory, Kind, Place
from .virtual import VirtualMemory


class Memory:
    """All memories of the machine, and the way from any address to its bytes."""

    def __init__(self, device_count: int, capacity: int) -> None:
        self.devices = [DeviceMemory(device, capacity) for device in range(device_count)]
        self.host = HostMemory()
        self.virtual = VirtualMemory(self.devices)

    def locate(self, ptr: int, nbytes: int, call: str) -> Place:
        """What is at `ptr`; refused where `nbytes` bytes are not all there."""
        if nbytes < 0:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", call, f"{nbytes} bytes")
        if ptr >= MAPPED_OFFSET:
            address = ptr - MAPPED_OFFSET
            if self.host.find(address, nbytes) is not None:
                return self.host.place(address, nbytes, call)
        elif ptr >= VIRTUAL_BASE:
            place = self.virtual.place(ptr, nbytes)
            if place is not None:
                return place
        elif ptr >= DEVICE_BASE:
            device = ptr // DEVICE_BASE - 1
            real = self.devices[device].real(ptr, nbytes) if device < len(self.devices) else None
            if real is not None:
                return Place(Kind.DEVICE, device, real, (Span(ptr, nbytes),))
        elif 0 < ptr < HOST_END:
            return self.host.place(ptr, nbytes, call)
        raise DriverError("CUDA_ERROR_INVALID_VALUE", call, f"{nbytes} bytes at {ptr:#x} are not known memory")
