"""One contiguous device range whose pages are part device memory and part host memory.

An unmodified kernel runs over a tensor that is only partly resident: it reads and writes the host pages in
place, over the link.  Remapping costs about as much as copying, so residency is for static placement.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterable

from ..driver import Driver, PageKind, PageLocation, Span, Stream
from ..driver.integers import integer
from ..errors import AllocatorError, ClosedError, DriverError, DriverOutOfMemory, InvalidRequestError
from ..host.limits import require_memory
from ..sizes import align_up
from ..transaction import Transaction
from .gate import StreamGate, over
from .hazards import Hazards
from .ranges import LARGEST
from .residency import Piece, Resident, plan, resident_ranges, runs


class HybridBuffer:
    """Memory at one device address, with each page on the device or on the host.

    Parameters
    ----------
    driver : Driver
    device : int
        Whose kernels use it.
    nbytes : int
        Whole pages (2 MiB on current devices) are taken for it; 0 takes nothing.
    resident : float or sequence of Span
        What is on the device: a share from the start on (0 to 1, rounded to pages), or byte ranges (offset,
        size), widened to pages.  The rest is on the host.
    numa_node : int, optional
        Where the host pages lie; the device's own node by default.

    Whoever enqueues work on the buffer records it with `record_use`: moving pages and closing wait for
    recorded uses only.  Contents are undefined at first.  Thread-safe, but for using the bytes while they move.

    Raises
    ------
    UnsupportedError
        The driver or device has no virtual memory management, or no host pages in it.
    OutOfMemory
        A location has not enough pages; nothing was taken.
    InvalidRequestError
        `nbytes` is negative, or `resident` does not fit it.
    """

    def __init__(
        self, driver: Driver, device: int, nbytes: int, *, resident: Resident, numa_node: int | None = None
    ) -> None:
        if not isinstance(driver, Driver):
            raise InvalidRequestError(f"hybrid buffer: {driver!r} is no Driver; make one with open_driver()")
        nbytes, device = integer("hybrid buffer", nbytes), integer("hybrid buffer", device)
        if not 0 <= nbytes <= LARGEST:
            raise InvalidRequestError(f"hybrid buffer: {nbytes} bytes are less than nothing, or than all there is")
        numa_node = None if numa_node is None else integer("hybrid buffer", numa_node)
        info = driver.device_info(device)
        node = (info.numa_node or 0) if numa_node is None else numa_node
        self.driver = driver
        self.device = device
        self.nbytes = nbytes
        self._on_device = PageLocation(PageKind.DEVICE, device)
        self._on_host = PageLocation(PageKind.HOST, node)
        self._page = max(driver.page_granularity(where) for where in (self._on_device, self._on_host))
        self._lock = threading.RLock()
        self._hazards = Hazards()
        self._gate = StreamGate(driver, device)
        self._range = _Range(driver, device)
        pieces = self._plan(resident)
        if nbytes:
            with driver.beside_captures():
                self._range.build(align_up(nbytes, self._page), pieces)
        self._finalizer = weakref.finalize(
            self, driver.finalise, functools.partial(_dismantle_quietly, self._range)
        )
        self._finalizer.atexit = False

    @property
    def ptr(self) -> int:
        """The device pointer of its first byte, the same for life; 0 of an empty buffer."""
        return self._range.base

    @property
    def residency(self) -> tuple[Span, ...]:
        """The byte ranges (offset, size) that are on the device, in order, none touching another."""
        return resident_ranges(self._range.pages, self.nbytes)

    @property
    def device_nbytes(self) -> int:
        """Bytes of device memory taken, whole pages."""
        return sum(piece.nbytes for piece in self._range.pages if piece.location.kind is PageKind.DEVICE)

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory taken, whole pages."""
        return sum(piece.nbytes for piece in self._range.pages if piece.location.kind is PageKind.HOST)

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return not self._finalizer.alive

    def record_use(self, stream: Stream) -> None:
        """Note that work on the buffer is enqueued on `stream` until now.

        Raises
        ------
        InvalidRequestError
            `stream` is of another device or driver.
        CaptureError
            It is being captured into a graph, where nobody can wait for the work.
        """
        self.driver.require_usable()
        stream = self._gate.admit(stream)
        with self._lock:
            self._require_open()
            self._hazards.has_read(stream, stream.record())

    def repartition(self, resident: Resident, *, stream: Stream) -> None:
        """Move pages until `resident` is on the device, and keep the bytes.

        Parameters
        ----------
        resident : float or sequence of Span
            As for a new buffer.
        stream : Stream
            Where the bytes are copied, after recorded uses and what is enqueued there.

        Blocks until the bytes have moved; for a moment both copies of what moves take memory.

        Raises
        ------
        OutOfMemory
            No room for the pages that move.
        CaptureError
            `stream` is being captured.
        InvalidRequestError, DriverError, RaceError
            Refused.  After any error here the buffer is as it was, bytes and all.
        """
        self.driver.require_usable()
        stream = self._gate.admit(stream)
        with self._lock:
            self._require_open()
            wanted = self._plan(resident)
            if set(wanted) == self._range.pages.keys():
                return
            with self.driver.beside_captures():
                self._hazards.before(stream, writes=True)
                self._range.rebuild(wanted, stream)
                self._hazards = Hazards()  # all of them have been waited for

    def close(self) -> None:
        """Wait for recorded uses and give everything back; a second call does nothing."""
        self.driver.require_usable()
        with self._lock:
            if self.closed:
                return
            with self.driver.beside_captures():
                try:
                    self._hazards.host_before_write()
                    self._range.dismantle()
                except DriverError as error:
                    if not over(error):
                        raise
                    self._range.abandon()
            self._finalizer.detach()

    def __enter__(self) -> HybridBuffer:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with contextlib.suppress(*(() if error is None else (AllocatorError,))):
            self.close()

    def _plan(self, resident: Resident) -> list[Piece]:
        """The pieces that are wanted; refused before they are listed if no machine of this size has them."""
        on_device = runs(resident, self.nbytes, self._page)
        nbytes = sum(end - start for start, end in on_device) * self._page
        capacity = self.driver.device_info(self.device).capacity
        if nbytes > capacity:
            raise DriverOutOfMemory(
                "CUDA_ERROR_OUT_OF_MEMORY",
                "hybrid buffer",
                size=nbytes,
                used=0,
                limit=capacity,
                budget=f"{self.driver.name}:{self.device}",
            )
        require_memory(align_up(self.nbytes, self._page) - nbytes - self.host_nbytes, "hybrid buffer")
        return plan(on_device, self.nbytes, self._page, self._on_device, self._on_host)

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedError("hybrid buffer: it was closed")


class _Range:
    """A reservation and the pages in it; what a buffer leaves to its finaliser."""

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.base = 0
        self.nbytes = 0
        self.pages: dict[Piece, int] = {}

    def build(self, nbytes: int, pieces: list[Piece]) -> None:
        with Transaction() as undo:
            base = self.driver.reserve_addresses(nbytes)
            undo.push(self.driver.release_addresses, base, nbytes)
            pages = self._create(pieces, undo)
            for piece, handle in pages.items():
                self._map(base + piece.offset, piece, handle, undo)
        self.base, self.nbytes, self.pages = base, nbytes, pages

    def rebuild(self, pieces: list[Piece], stream: Stream) -> None:
        wanted = set(pieces)
        leaving = {piece: handle for piece, handle in self.pages.items() if piece not in wanted}
        with Transaction() as undo:
            coming = self._create([piece for piece in pieces if piece not in self.pages], undo)
            self._copy(leaving, coming, stream, undo)
            for piece, handle in leaving.items():
                self.driver.unmap_pages(self.base + piece.offset, piece.nbytes)
                undo.push(self._map, self.base + piece.offset, piece, handle)
            for piece, handle in coming.items():
                self._map(self.base + piece.offset, piece, handle, undo)
        self.pages = {piece: coming[piece] if piece in coming else self.pages[piece] for piece in pieces}
        for handle in leaving.values():
            self.driver.release_pages(handle)

    def dismantle(self) -> None:
        """Give everything back; what fails can be tried again."""
        for piece in list(self.pages):
            self.driver.unmap_pages(self.base + piece.offset, piece.nbytes)
            self.driver.release_pages(self.pages.pop(piece))
        if self.nbytes:
            self.driver.release_addresses(self.base, self.nbytes)
            self.base = self.nbytes = 0

    def abandon(self) -> None:
        """Give back what can be, of a device that is gone, and forget the rest."""
        with contextlib.suppress(AllocatorError):
            self.dismantle()
        self.pages.clear()
        self.base = self.nbytes = 0

    def _create(self, pieces: list[Piece], undo: Transaction) -> dict[Piece, int]:
        pages = {}
        for piece in pieces:
            pages[piece] = self.driver.create_pages(piece.location, piece.nbytes)
            undo.push(self.driver.release_pages, pages[piece])
        return pages

    def _map(self, address: int, piece: Piece, handle: int, undo: Transaction | None = None) -> None:
        self.driver.map_pages(address, piece.nbytes, handle, device=self.device)
        if undo is not None:
            undo.push(self.driver.unmap_pages, address, piece.nbytes)

    def _copy(
        self, leaving: dict[Piece, int], coming: dict[Piece, int], stream: Stream, undo: Transaction
    ) -> None:
        """Copy to new pages, which are mapped elsewhere meanwhile; done when this returns."""
        nbytes = sum(piece.nbytes for piece in coming)
        start = place = self.driver.reserve_addresses(nbytes)
        steps = [undo.push(self.driver.release_addresses, start, nbytes)]
        for piece, handle in coming.items():
            self.driver.map_pages(place, piece.nbytes, handle, device=self.device)
            steps.append(undo.push(self.driver.unmap_pages, place, piece.nbytes))
            place += piece.nbytes
        try:
            place = start
            for piece in coming:
                self._fetch(piece, place, leaving, stream)
                place += piece.nbytes
        finally:
            stream.synchronize()
        for piece, step in zip(reversed(coming), reversed(steps[1:]), strict=True):
            place -= piece.nbytes
            self.driver.unmap_pages(place, piece.nbytes)
            undo.forget(step)
        self.driver.release_addresses(start, nbytes)
        undo.forget(steps[0])

    def _fetch(self, piece: Piece, place: int, sources: Iterable[Piece], stream: Stream) -> None:
        """Copy what belongs in `piece` to `place`; no copy spans two pieces, whose memory may be of two kinds."""
        for source in sources:
            start = max(piece.offset, source.offset)
            end = min(piece.offset + piece.nbytes, source.offset + source.nbytes)
            if start < end:
                target = place + start - piece.offset
                self.driver.copy(target, self.base + start, end - start, stream=stream)


def _dismantle_quietly(range_: _Range) -> None:
    """Give a range back that nobody closed, once its work is done; a finaliser has nobody to tell."""
    with contextlib.suppress(AllocatorError):
        range_.driver.synchronize_all()
        range_.dismantle()
