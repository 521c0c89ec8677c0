"""A driver that gives out addresses and counts bytes, with nothing behind them."""

from __future__ import annotations

import bisect
from typing import ClassVar

from ..driver import EmulatedDriver, EmulatedOptions, MemoryInfo, PageLocation
from ..errors import DriverError, DriverOutOfMemory, InvalidRequestError
from .requests import whole_number

GRANULARITY = 2 << 20


class SizeOnlyDriver(EmulatedDriver):
    """Streams and events of the emulated device, and as much memory as one likes.

    For replaying a log of any size on any machine: nothing can be read, written or copied.  Its one rule is
    the capacity.

    Parameters
    ----------
    capacity : int
        Bytes of its only device.
    """

    name: ClassVar[str] = "size-only"

    def __init__(self, capacity: int) -> None:
        capacity = whole_number(capacity, "size-only driver: capacity")
        if capacity <= 0:
            raise InvalidRequestError(f"size-only driver: {capacity} is not more than zero bytes of memory")
        super().__init__(EmulatedOptions(device_memory=capacity))
        self._capacity = capacity
        self._next = 1 << 50
        self._taken: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        self._mapped: list[tuple[int, int]] = []

    def memory_info(self, device: int) -> MemoryInfo:
        with self._lock:
            return MemoryInfo(self._capacity - self._used(), self._capacity)

    def malloc(self, device: int, nbytes: int) -> int:
        with self._lock:
            self._require_room("malloc", nbytes)
            ptr = self._addresses(nbytes)
            self._taken[ptr] = nbytes
            return ptr

    def free(self, device: int, ptr: int) -> None:
        with self._lock:
            if ptr and self._taken.pop(ptr, None) is None:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "free", f"no allocation starts at {ptr:#x}")

    def page_granularity(self, location: PageLocation) -> int:
        return GRANULARITY

    def reserve_addresses(self, nbytes: int, *, alignment: int = 0) -> int:
        with self._lock:
            return self._addresses(nbytes)

    def release_addresses(self, address: int, nbytes: int) -> None:
        return

    def create_pages(self, location: PageLocation, nbytes: int) -> int:
        with self._lock:
            self._require_room("create_pages", nbytes)
            handle = self._addresses(1)
            self._pages[handle] = nbytes
            return handle

    def release_pages(self, handle: int) -> None:
        with self._lock:
            if self._pages.pop(handle, None) is None:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "release_pages", f"no pages {handle}")

    def map_pages(self, address: int, nbytes: int, handle: int, *, device: int) -> None:
        with self._lock:
            index = bisect.bisect_left(self._mapped, (address,))
            before, after = self._mapped[max(index - 1, 0) : index], self._mapped[index : index + 1]
            if any(end > address for _, end in before) or any(start < address + nbytes for start, _ in after):
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "map_pages", f"{address:#x} is mapped already")
            self._mapped.insert(index, (address, address + nbytes))

    def unmap_pages(self, address: int, nbytes: int) -> None:
        with self._lock:
            try:
                self._mapped.remove((address, address + nbytes))
            except ValueError:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "unmap_pages", f"{address:#x}") from None

    def _used(self) -> int:
        return sum(self._taken.values()) + sum(self._pages.values())

    def _require_room(self, call: str, nbytes: int) -> None:
        if nbytes <= 0:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", call, f"nbytes={nbytes}")
        if self._used() + nbytes > self._capacity:
            raise DriverOutOfMemory(
                "CUDA_ERROR_OUT_OF_MEMORY",
                call,
                size=nbytes,
                used=self._used(),
                limit=self._capacity,
                budget="size-only",
            )

    def _addresses(self, nbytes: int) -> int:
        address = self._next
        self._next += -(-nbytes // GRANULARITY) * GRANULARITY + GRANULARITY
        return address
