"""Virtual memory of an emulated machine: ranges whose pages are of devices, of the host, or missing."""

from __future__ import annotations

import itertools
from functools import reduce

from ...errors import DriverOutOfMemory
from ..addresses import AddressBook, Mapping, Pages, Reservation
from ..types import PageKind, PageLocation, Span
from .mapping import RealPages, RealRange
from .memory import POISON_FREED, POISON_NEW, VIRTUAL_BASE, DeviceMemory, Kind, Place

GRANULARITY = 2 << 20
PAGES_LINE = 1 << 58  # where the checker keeps pages, whatever addresses they are mapped at


class VirtualMemory:
    """See the module.  The driver's lock is held round every call."""

    def __init__(self, devices: list[DeviceMemory]) -> None:
        self.book = AddressBook(GRANULARITY)
        self._devices = devices
        self._next = VIRTUAL_BASE  # an address is never used twice
        self._handles = itertools.count(1)
        self._ranges: dict[Reservation, RealRange] = {}
        self._places: dict[Pages, int] = {}
        self._real: RealPages | None = None

    def device(self, location: PageLocation) -> DeviceMemory | None:
        """Whose capacity pages at `location` take; None for the host's."""
        return self._devices[location.ordinal] if location.kind is PageKind.DEVICE else None

    def reserve(self, nbytes: int, alignment: int) -> int:
        self.book.check_reserve(nbytes, alignment)
        step = max(alignment, GRANULARITY)
        address = -(-self._next // step) * step
        try:
            real = RealRange(nbytes)
        except (OSError, OverflowError):
            raise _no_memory("reserve_addresses", nbytes, 0, nbytes, "addresses") from None
        self._next = address + nbytes + GRANULARITY
        self._ranges[self.book.reserved(address, nbytes)] = real
        return address

    def release(self, address: int, nbytes: int) -> None:
        reservation = self.book.check_release(address, nbytes)
        self.book.forget(reservation)
        del self._ranges[reservation]

    def create(self, location: PageLocation, nbytes: int) -> int:
        self.book.check_create(nbytes)
        device = self.device(location)
        used, limit = (0, nbytes) if device is None else (device.used, device.capacity)
        budget = "host" if device is None else f"emulated:{device.device}"
        if used + nbytes > limit:
            raise _no_memory("create_pages", nbytes, used, limit, budget)
        try:
            if self._real is None:
                self._real = RealPages(GRANULARITY, POISON_FREED)
            place = self._real.take(nbytes, POISON_NEW)
        except (OSError, OverflowError):
            raise _no_memory("create_pages", nbytes, used, limit, budget) from None
        pages = Pages(next(self._handles), location, nbytes)
        self.book.created(pages)
        self._places[pages] = place
        if device is not None:
            device.used += nbytes
        return pages.handle

    def give_up(self, handle: int) -> list[Span]:
        """Give a handle up; what ends with it on the checker's line."""
        pages = self.book.held(handle, "release_pages")
        self.book.given_up(pages)
        return self._drop([pages])

    def map(self, address: int, nbytes: int, handle: int, device: int) -> None:
        reservation, pages = self.book.check_map(address, nbytes, handle)
        self._pages.map(self._real_address(reservation, address), self._places[pages], nbytes)
        self.book.mapped(reservation, Mapping(address, nbytes, pages, device))

    def mapped(self, address: int, nbytes: int) -> list[Span]:
        """Where the pages of whole mappings are on the checker's line; anything else is refused."""
        _, mappings = self.book.check_unmap(address, nbytes)
        return self._lines(mappings, address, nbytes)

    def unmap(self, address: int, nbytes: int) -> list[Span]:
        """Undo mappings; what ends with them on the checker's line."""
        reservation, mappings = self.book.check_unmap(address, nbytes)
        self._pages.map_stale(self._real_address(reservation, address), nbytes)
        self.book.unmapped(reservation, mappings)
        return self._drop([mapping.pages for mapping in mappings])

    def place(self, ptr: int, nbytes: int) -> Place | None:
        """What is at `ptr`; None unless every byte is mapped."""
        reservation = self.book.find(ptr, nbytes)
        mappings = None if reservation is None else reservation.covered(ptr, max(nbytes, 1))
        if reservation is None or not mappings:
            return None
        locations = {mapping.pages.location for mapping in mappings}
        first = mappings[0]
        on_device = len(locations) == 1 and first.pages.location.kind is PageKind.DEVICE
        return Place(
            kind=Kind.DEVICE if on_device else Kind.PAGED,
            device=first.pages.location.ordinal if on_device else first.device,
            real=self._real_address(reservation, ptr),
            lines=tuple(self._lines(mappings, ptr, nbytes)),
            users=reduce(frozenset.intersection, (frozenset([m.device]) for m in mappings)),
            owner=self._ranges[reservation],
        )

    @property
    def _pages(self) -> RealPages:
        assert self._real is not None, "there are no pages before the first are created"
        return self._real

    def _real_address(self, reservation: Reservation, address: int) -> int:
        return self._ranges[reservation].address + address - reservation.address

    def _lines(self, mappings: list[Mapping], address: int, nbytes: int) -> list[Span]:
        lines = []
        for mapping in mappings:
            start, end = max(address, mapping.address), min(address + nbytes, mapping.end)
            line = PAGES_LINE + self._places[mapping.pages] + start - mapping.address
            lines.append(Span(line, end - start))
        return lines

    def _drop(self, candidates: list[Pages]) -> list[Span]:
        ended = []
        for pages in dict.fromkeys(candidates):
            if not pages.gone:
                continue
            place = self._places.pop(pages)
            self._pages.give_back(place, pages.nbytes)
            device = self.device(pages.location)
            if device is not None:
                device.used -= pages.nbytes
            ended.append(Span(PAGES_LINE + place, pages.nbytes))
        return ended


def _no_memory(call: str, nbytes: int, used: int, limit: int, budget: str) -> DriverOutOfMemory:
    code = "CUDA_ERROR_OUT_OF_MEMORY"
    return DriverOutOfMemory(code, call, size=nbytes, used=used, limit=limit, budget=budget)
