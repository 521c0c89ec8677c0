"""What is reserved, created and mapped: the books of virtual memory, kept alike by every driver.

A driver asks here first, so that misuse gets the same typed answer everywhere and never reaches a call
that would take an unknown handle on trust.  Not thread-safe: each driver has its own lock round it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from ..errors import DriverError
from .api import PageLocation


@dataclass(eq=False)
class Pages:
    """Physical pages: alive while their handle is held or something is mapped to them."""

    handle: int
    location: PageLocation
    nbytes: int
    mappings: int = 0
    released: bool = False

    @property
    def gone(self) -> bool:
        return self.released and self.mappings == 0


@dataclass(eq=False)
class Mapping:
    """Pages at an address, reached by the kernels of one device."""

    address: int
    nbytes: int
    pages: Pages
    device: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


@dataclass(eq=False)
class Reservation:
    """A range of addresses, and what is mapped in it, in order."""

    address: int
    nbytes: int
    mappings: list[Mapping] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    def inside(self, address: int, nbytes: int) -> list[Mapping]:
        """The mappings that overlap a range."""
        low = bisect.bisect_right(self.mappings, address, key=lambda mapping: mapping.end)
        high = bisect.bisect_left(self.mappings, address + nbytes, key=lambda mapping: mapping.address)
        return self.mappings[low:high]

    def covered(self, address: int, nbytes: int) -> list[Mapping] | None:
        """The mappings that overlap a range, if they leave no gap in it."""
        found = self.inside(address, nbytes)
        position = address
        for mapping in found:
            if mapping.address > position:
                return None
            position = mapping.end
        return found if position >= address + nbytes else None


class AddressBook:
    """Reservations and pages of one driver; every method checks first, and changes nothing if it refuses."""

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self._starts: list[int] = []
        self._reservations: list[Reservation] = []
        self._pages: dict[int, Pages] = {}

    # -- reservations ---------------------------------------------------------------------------------
    def check_reserve(self, nbytes: int, alignment: int) -> None:
        self._whole("reserve_addresses", nbytes)
        if alignment < 0 or alignment & (alignment - 1):
            raise _invalid("reserve_addresses", f"alignment {alignment} is not a power of two")

    def reserved(self, address: int, nbytes: int) -> Reservation:
        """Enter a new reservation."""
        index = bisect.bisect_left(self._starts, address)
        self._starts.insert(index, address)
        self._reservations.insert(index, Reservation(address, nbytes))
        return self._reservations[index]

    def find(self, address: int, nbytes: int) -> Reservation | None:
        """The reservation that holds the whole range."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        found = self._reservations[index]
        return found if address + nbytes <= found.end else None

    def check_release(self, address: int, nbytes: int) -> Reservation:
        found = self.find(address, nbytes) if nbytes > 0 else None
        if found is None or (found.address, found.nbytes) != (address, nbytes):
            raise _invalid("release_addresses", f"{nbytes} bytes at {address:#x} are not one whole reservation")
        if found.mappings:
            raise _invalid("release_addresses", f"{len(found.mappings)} mapping(s) are left at {address:#x}")
        return found

    def forget(self, reservation: Reservation) -> None:
        index = bisect.bisect_left(self._starts, reservation.address)
        del self._starts[index]
        del self._reservations[index]

    # -- pages ----------------------------------------------------------------------------------------
    def check_create(self, nbytes: int) -> None:
        self._whole("create_pages", nbytes)

    def created(self, pages: Pages) -> None:
        self._pages[pages.handle] = pages

    def held(self, handle: int, call: str) -> Pages:
        """The pages of a handle that was not given up."""
        pages = self._pages.get(handle)
        if pages is None:
            raise _invalid(call, f"no pages have the handle {handle}; it was released, or never given")
        return pages

    def given_up(self, pages: Pages) -> None:
        pages.released = True
        del self._pages[pages.handle]

    def check_access(self, call: str, ptr: int, nbytes: int) -> None:
        """Refuse a range that begins in a reservation and is not all mapped; other memory is not known here."""
        reservation = self.find(ptr, 1)
        if reservation is not None and reservation.covered(ptr, nbytes) is None:
            raise _invalid(call, f"{nbytes} bytes at {ptr:#x} are not all mapped")

    # -- mappings -------------------------------------------------------------------------------------
    def check_map(self, address: int, nbytes: int, handle: int) -> tuple[Reservation, Pages]:
        self._whole("map_pages", nbytes)
        pages, reservation = self.held(handle, "map_pages"), self.find(address, nbytes)
        if reservation is None:
            raise _invalid("map_pages", f"{nbytes} bytes at {address:#x} are not inside one reservation")
        if (address - reservation.address) % self.granularity:
            raise _invalid("map_pages", f"{address:#x} is not at a multiple of {self.granularity} bytes")
        if nbytes != pages.nbytes:
            raise _invalid("map_pages", f"the pages have {pages.nbytes} bytes, asked to map {nbytes}")
        if reservation.inside(address, nbytes):
            raise _invalid("map_pages", f"something is mapped between {address:#x} and {address + nbytes:#x}")
        return reservation, pages

    def mapped(self, reservation: Reservation, mapping: Mapping) -> None:
        bisect.insort(reservation.mappings, mapping, key=lambda other: other.address)
        mapping.pages.mappings += 1

    def check_unmap(self, address: int, nbytes: int) -> tuple[Reservation, list[Mapping]]:
        reservation = self.find(address, nbytes) if nbytes > 0 else None
        found = None if reservation is None else reservation.covered(address, nbytes)
        if reservation is None or not found or found[0].address != address or found[-1].end != address + nbytes:
            raise _invalid("unmap_pages", f"{nbytes} bytes at {address:#x} are not whole mappings")
        return reservation, found

    def unmapped(self, reservation: Reservation, mappings: list[Mapping]) -> None:
        index = reservation.mappings.index(mappings[0])
        del reservation.mappings[index : index + len(mappings)]
        for mapping in mappings:
            mapping.pages.mappings -= 1

    def _whole(self, call: str, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % self.granularity:
            raise _invalid(call, f"{nbytes} bytes are not a positive multiple of {self.granularity}")


def _invalid(call: str, detail: str) -> DriverError:
    return DriverError("CUDA_ERROR_INVALID_VALUE", call, detail)
