"""Reserved addresses, pages, and what is between them."""

from __future__ import annotations

from cuda.bindings import driver as cu

from ...errors import DriverError, DriverOutOfMemory
from ..addresses import AddressBook, Mapping, Pages
from ..integers import integer, integers
from ..types import PageKind, PageLocation
from .errors import OUT_OF_MEMORY
from .memory_calls import MemoryCalls

_MINIMUM = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
_KINDS = {
    PageKind.DEVICE: cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE,
    PageKind.HOST: cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA,
}
_NO_HOST_PAGES = frozenset({"CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_DEVICE"})


class VirtualCalls(MemoryCalls):
    """Virtual memory management."""

    def page_granularity(self, location: PageLocation) -> int:
        return max(self._granularity(location), self._book().granularity)

    def reserve_addresses(self, nbytes: int, *, alignment: int = 0) -> int:
        nbytes, alignment = integers("reserve_addresses", nbytes, alignment)
        book = self._book()
        with self._lock, self._on_any():
            book.check_reserve(nbytes, alignment)
            result = cu.cuMemAddressReserve(nbytes, alignment, 0, 0)
            address = int(self._check(self._some(), "reserve_addresses", result, f"{nbytes} bytes"))
            book.reserved(address, nbytes)
            return address

    def release_addresses(self, address: int, nbytes: int) -> None:
        address, nbytes = integers("release_addresses", address, nbytes)
        book = self._book()
        with self._lock, self._on_any():
            reservation = book.check_release(address, nbytes)
            result = cu.cuMemAddressFree(address, nbytes)
            self._check(self._some(), "release_addresses", result, f"{address:#x}")
            book.forget(reservation)

    def create_pages(self, location: PageLocation, nbytes: int) -> int:
        nbytes = integer("create_pages", nbytes)
        book = self._book()
        book.check_create(nbytes)
        self._granularity(location)
        device = location.ordinal if location.kind is PageKind.DEVICE else self._some()
        with self._lock, self._on(device):
            result = cu.cuMemCreate(nbytes, _properties(location), 0)
            if int(result[0]) == OUT_OF_MEMORY:
                raise self._no_pages(location, nbytes)
            handle = int(self._check(device, "create_pages", result, f"{nbytes} bytes at {location}"))
            book.created(Pages(handle, location, nbytes))
            return handle

    def release_pages(self, handle: int) -> None:
        book = self._book()
        with self._lock, self._on_any():
            pages = book.held(handle, "release_pages")
            self._check(self._some(), "release_pages", cu.cuMemRelease(handle))
            book.given_up(pages)

    def map_pages(self, address: int, nbytes: int, handle: int, *, device: int) -> None:
        address, nbytes, handle = integers("map_pages", address, nbytes, handle)
        book = self._book()
        with self._lock, self._on(device):
            reservation, pages = book.check_map(address, nbytes, handle)
            self._check(device, "map_pages", cu.cuMemMap(address, nbytes, 0, handle, 0), f"{address:#x}")
            access = cu.CUmemAccessDesc()
            access.location = _location(PageLocation(PageKind.DEVICE, device))
            access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            result = cu.cuMemSetAccess(address, nbytes, [access], 1)
            try:
                self._check(device, "map_pages", result, f"access of device {device} to {address:#x}")
            except DriverError:
                cu.cuMemUnmap(address, nbytes)
                raise
            book.mapped(reservation, Mapping(address, nbytes, pages, device))

    def unmap_pages(self, address: int, nbytes: int) -> None:
        address, nbytes = integers("unmap_pages", address, nbytes)
        book = self._book()
        with self._lock, self._on_any():
            reservation, mappings = book.check_unmap(address, nbytes)
            for mapping in mappings:
                result = cu.cuMemUnmap(mapping.address, mapping.nbytes)
                self._check(self._some(), "unmap_pages", result, f"{mapping.address:#x}")
                book.unmapped(reservation, [mapping])

    # -- inside -------------------------------------------------------------------------------------
    def _book(self) -> AddressBook:
        """The books, opened with the first call; refused where a device lacks virtual memory management."""
        self._known(0)
        book = self._addresses
        if book is None:
            devices = [PageLocation(PageKind.DEVICE, device) for device in range(self._count)]
            granularity = max(self._granularity(location) for location in devices)
            with self._lock:
                book = self._addresses = self._addresses or AddressBook(granularity)
        return book

    def _granularity(self, location: PageLocation) -> int:
        """What the driver says; no context is needed, and none is made."""
        device = location.ordinal if location.kind is PageKind.DEVICE else 0
        if not self.device_info(device).capabilities["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"]:
            raise self._unsupported("virtual memory management")
        result = cu.cuMemGetAllocationGranularity(_properties(location), _MINIMUM)
        if location.kind is PageKind.HOST and f"{result[0].name}" in _NO_HOST_PAGES:
            raise self._unsupported(f"pages on NUMA node {location.ordinal} of the host")
        return int(self._check(device, "page_granularity", result, f"{location}"))

    def _no_pages(self, location: PageLocation, nbytes: int) -> DriverOutOfMemory:
        if location.kind is PageKind.DEVICE:
            return self._out_of_memory(location.ordinal, "create_pages", nbytes)
        code, budget = "CUDA_ERROR_OUT_OF_MEMORY", f"NUMA node {location.ordinal}"
        return DriverOutOfMemory(code, "create_pages", size=nbytes, used=0, limit=0, budget=budget)


def _location(location: PageLocation) -> cu.CUmemLocation:
    made = cu.CUmemLocation()
    made.type = _KINDS[location.kind]
    made.id = location.ordinal
    return made


def _properties(location: PageLocation) -> cu.CUmemAllocationProp:
    made = cu.CUmemAllocationProp()
    made.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location = _location(location)
    return made
