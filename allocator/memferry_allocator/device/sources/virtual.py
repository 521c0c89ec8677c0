"""Device memory at addresses that were reserved beforehand, so that it can grow where it is."""

from __future__ import annotations

import bisect
import contextlib
import functools
import weakref
from typing import Any, ClassVar, NamedTuple

from ...driver import Driver, PageKind, PageLocation, Stream
from ...errors import AllocatorError, ClosedError, InvalidRequestError, OutOfMemory
from ...sizes import align_up, format_size
from ..requests import whole_number
from ..returns import ReturnsLock
from .base import Source


class _Mapped(NamedTuple):
    """Addresses with physical pages behind them."""

    start: int
    end: int
    handle: int


class VirtualMemory(Source):
    """One reservation of addresses; pages are mapped at its end, and where something was given back.

    Blocks that lie side by side may be used as one, so a pool on it grows and shrinks without seams.
    Memory is taken in whole granules (2 MiB on current devices).  Giving back blocks the calling thread
    until the stream's work is done.

    Parameters
    ----------
    driver : Driver
    device : int
    nbytes : int
        Addresses to reserve, rounded up to whole granules.  They cost next to nothing: several times the
        device's memory leaves room to grow even when much has been given back in between.

    Raises
    ------
    UnsupportedError
        The driver or device has no virtual memory management.
    """

    name: ClassVar[str] = "virtual memory"
    joins = True
    host_ordered = True

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        super().__init__(driver, device)
        nbytes = whole_number(nbytes, "virtual memory: bytes of addresses")
        if nbytes <= 0:
            raise InvalidRequestError(f"virtual memory: {nbytes} is not more than zero bytes of addresses")
        self._location = PageLocation(PageKind.DEVICE, self.device)
        with driver.beside_captures():
            self.granularity = driver.page_granularity(self._location)
            self.nbytes = align_up(nbytes, self.granularity)
            self.base = driver.reserve_addresses(self.nbytes)
        self._mapping = ReturnsLock()
        self._mapped: list[_Mapped] = []
        self._closed = False
        release = functools.partial(_release_quietly, driver, self.base, self.nbytes, self._mapped)
        self._finalizer = weakref.finalize(self, driver.finalise, release)
        self._finalizer.atexit = False

    @property
    def reserved(self) -> int:
        """Bytes of physical memory behind the addresses now."""
        self.driver.require_usable()
        with self._mapping:
            return sum(mapped.end - mapped.start for mapped in self._mapped)

    @property
    def end(self) -> int:
        """The first address behind everything that is mapped."""
        self.driver.require_usable()
        with self._mapping:
            return self._end()

    def close(self) -> None:
        """Give the addresses back; see `MemoryResource.close`."""
        self.driver.require_usable()
        with self._mapping, self.driver.beside_captures():
            if self._closed:
                return
            if self._mapped:
                raise InvalidRequestError(f"virtual memory: {len(self._mapped)} allocations are still live")
            self.driver.release_addresses(self.base, self.nbytes)
            self._finalizer.detach()
            self._closed = True

    def _take(self, nbytes: int, stream: Stream) -> int:
        size = align_up(nbytes, self.granularity)
        driver = self.driver
        with self._mapping, contextlib.ExitStack() as undo:
            if self._closed:
                raise ClosedError("virtual memory: it was closed")
            start = self._place(size)
            handle = driver.create_pages(self._location, size)
            undo.callback(driver.release_pages, handle)
            driver.map_pages(start, size, handle, device=self.device)
            bisect.insort(self._mapped, _Mapped(start, start + size, handle))
            undo.pop_all()
            return start

    def _give(self, ptr: int, stream: Stream) -> None:
        if not stream.query():  # a pool's own stream never has work
            stream.synchronize()
        failures: list[BaseException] = []
        self._mapping.finalise(functools.partial(self._unmap, ptr, self.driver.publish(), failures))
        if failures:
            raise failures[0]

    def _unmap(self, ptr: int, token: Any, failures: list[BaseException]) -> None:
        """Done at once, or by whoever holds the lock; what fails then stays mapped until the end."""
        try:
            self.driver.observe(token)  # another thread may have waited for the work
            with self.driver.beside_captures():
                index = bisect.bisect_left(self._mapped, (ptr,))
                mapped = self._mapped[index]
                self.driver.unmap_pages(mapped.start, mapped.end - mapped.start)
                del self._mapped[index]  # it has no address any more, whatever becomes of the handle
                self.driver.release_pages(mapped.handle)
        except BaseException as error:
            failures.append(error)

    def _end(self) -> int:
        return self._mapped[-1].end if self._mapped else self.base

    def _place(self, size: int) -> int:
        """Where `size` bytes go: at the end, or in the first hole that holds them."""
        if self._end() + size <= self.base + self.nbytes:
            return self._end()
        start = self.base
        for mapped in self._mapped:
            if mapped.start - start >= size:
                return start
            start = mapped.end
        used = sum(mapped.end - mapped.start for mapped in self._mapped)
        raise OutOfMemory(
            f"virtual memory: asked for {format_size(size)}, {format_size(used)} of {format_size(self.nbytes)} of "
            "addresses in use, no gap is large enough; reserve more addresses",
            size=size,
            used=used,
            limit=self.nbytes,
            budget="virtual memory",
        )


def _release_quietly(driver: Driver, base: int, nbytes: int, mapped: list[_Mapped]) -> None:
    """Give everything back for a source that nobody closed; a finaliser has nobody to tell."""
    with contextlib.suppress(AllocatorError):
        driver.require_usable()
        driver.synchronize_all()
        for start, end, handle in mapped:
            driver.unmap_pages(start, end - start)
            driver.release_pages(handle)
        driver.release_addresses(base, nbytes)
