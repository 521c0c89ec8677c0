"""Device memory and registered host memory."""

from __future__ import annotations

import ctypes

from ...errors import DriverError
from ..integers import integer, integers
from ..types import Span
from .core import EmulatedCore
from .memory import MAPPED_OFFSET, Kind


class MemoryCalls(EmulatedCore):
    """Taking memory, giving it back, and looking at it."""

    def malloc(self, device: int, nbytes: int) -> int:
        nbytes = integer("malloc", nbytes)
        with self._lock:
            memory = self._memory.devices[self._device(device)]
            self._captures.forbid("malloc")
            return memory.malloc(nbytes)

    def free(self, device: int, ptr: int) -> None:
        ptr = integer("free", ptr)
        with self._lock:
            memory = self._memory.devices[self._device(device)]
            if ptr != 0:
                self._captures.forbid("free")
                lines = (Span(ptr, memory.extent(ptr)),)
                self._engine.settled(lines, "free")
                self._engine.forget(lines)
                memory.free(ptr)

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        address, nbytes = integers("host_register", address, nbytes)
        with self._lock:
            self._alive()
            self._captures.forbid("host_register")
            self._memory.host.register(address, nbytes, read_only=read_only)

    def host_unregister(self, address: int) -> None:
        address = integer("host_unregister", address)
        with self._lock:
            self._alive()
            self._captures.forbid("host_unregister")
            lines = (Span(address, self._memory.host.extent(address)),)
            self._engine.settled(lines, "host_unregister")
            self._engine.forget(lines)
            self._memory.host.unregister(address)

    def host_registration(self, address: int) -> Span | None:
        address = integer("host_registration", address)
        with self._lock:
            self._alive()
            found = self._memory.host.find(address, 1)
            return None if found is None else Span(found.start, found.nbytes)

    def host_device_pointer(self, address: int, device: int) -> int:
        address = integer("host_device_pointer", address)
        with self._lock:
            self._device(device)
            if self._memory.host.find(address, 1) is None:
                raise DriverError(
                    "CUDA_ERROR_INVALID_VALUE", "host_device_pointer", f"{address:#x} is not registered"
                )
            return address + MAPPED_OFFSET

    def device_of(self, ptr: int) -> int | None:
        ptr = integer("device_of", ptr)
        with self._lock:
            self._alive()
            for device, memory in enumerate(self._memory.devices):
                if memory.real(ptr, 1) is not None:
                    return device
            return None

    def host_bytes(self, ptr: int, nbytes: int) -> memoryview | None:
        ptr, nbytes = integers("host_bytes", ptr, nbytes)
        with self._lock:
            place = self._locate(ptr, nbytes, "host_bytes")
            if place.kind is Kind.PAGEABLE:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "host_bytes", f"{ptr:#x} is not registered")
            if place.kind is Kind.DEVICE and place.owner is None:
                data = self._memory.devices[place.device].data(ptr, nbytes)
                assert data is not None
                return memoryview(data)  # type: ignore[arg-type]  # arrays are buffers; stubs say so from 3.12
            view = (ctypes.c_uint8 * nbytes).from_address(place.real)
            view.owner = place.owner  # type: ignore[attr-defined]  # its addresses live as long as it
            return memoryview(view).cast("B")
