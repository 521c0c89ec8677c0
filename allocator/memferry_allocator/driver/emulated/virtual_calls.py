"""Reserved addresses, pages, and what is between them."""

from __future__ import annotations

from ...errors import DriverError
from ..integers import integer, integers
from ..types import PageKind, PageLocation
from .core import EmulatedCore
from .virtual import GRANULARITY


class VirtualCalls(EmulatedCore):
    """Virtual memory management."""

    def page_granularity(self, location: PageLocation) -> int:
        with self._lock:
            self._alive()
            self._location(location)
            return GRANULARITY

    def reserve_addresses(self, nbytes: int, *, alignment: int = 0) -> int:
        nbytes, alignment = integers("reserve_addresses", nbytes, alignment)
        with self._lock:
            self._alive()
            self._captures.forbid("reserve_addresses")
            return self._memory.virtual.reserve(nbytes, alignment)

    def release_addresses(self, address: int, nbytes: int) -> None:
        address, nbytes = integers("release_addresses", address, nbytes)
        with self._lock:
            self._alive()
            self._captures.forbid("release_addresses")
            self._memory.virtual.release(address, nbytes)

    def create_pages(self, location: PageLocation, nbytes: int) -> int:
        nbytes = integer("create_pages", nbytes)
        with self._lock:
            self._alive()
            self._captures.forbid("create_pages")
            self._location(location)
            return self._memory.virtual.create(location, nbytes)

    def release_pages(self, handle: int) -> None:
        handle = integer("release_pages", handle)
        with self._lock:
            self._alive()
            self._captures.forbid("release_pages")
            self._engine.forget(self._memory.virtual.give_up(handle))

    def map_pages(self, address: int, nbytes: int, handle: int, *, device: int) -> None:
        address, nbytes, handle = integers("map_pages", address, nbytes, handle)
        with self._lock:
            self._device(device)
            self._captures.forbid("map_pages")
            self._memory.virtual.map(address, nbytes, handle, device)

    def unmap_pages(self, address: int, nbytes: int) -> None:
        address, nbytes = integers("unmap_pages", address, nbytes)
        with self._lock:
            self._alive()
            self._captures.forbid("unmap_pages")
            self._engine.settled(self._memory.virtual.mapped(address, nbytes), "unmap_pages")
            self._engine.forget(self._memory.virtual.unmap(address, nbytes))

    def _location(self, location: PageLocation) -> None:
        if location.kind is PageKind.DEVICE:
            self._device(location.ordinal)
        elif location.ordinal != 0:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "pages", f"no NUMA node {location.ordinal} here")
