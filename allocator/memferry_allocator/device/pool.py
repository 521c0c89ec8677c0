"""A pool of device memory with a budget: best fit, reuse in stream order, growth from a source."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Mapping

from ..driver import Driver, Event, Stream
from ..errors import CaptureError, ClosedError, InvalidRequestError, OutOfMemory
from ..sizes import align_up, format_size
from .blocks import Block, FreeBlocks
from .marks import Mark
from .requests import (
    MOST,
    block_size,
    captured,
    known_driver,
    recorded_uses,
    refuse_capture,
    refuse_pointer,
    usable_stream,
    whole_number,
)
from .resource import MemoryResource
from .segments import Segments, release_quietly
from .sources import DriverMemory

_NAME = "device pool"


class DevicePool(MemoryResource):
    """Device memory within a budget.

    ``allocate`` gives memory that may be used on the stream named there at once.  ``deallocate`` says on
    which stream the last use was enqueued; a later allocation on the same stream needs no waiting, one on
    another stream is ordered behind that use by an event.  Thread-safe, also for what a garbage collection
    gives back in the middle of a call.

    Parameters
    ----------
    driver : Driver
    device : int
    nbytes : int
        Taken at once, exactly, and kept until `close`; whole granules of a source that joins them.  May be 0
        if `maximum` is given.
    maximum : int, optional
        What the pool may grow to; `nbytes` by default, which makes it one slab that never changes.
    source : MemoryResource, optional
        Where its memory comes from; plain driver memory by default.  `VirtualMemory` lets it grow in one
        piece.  The pool does not close it.

    Notes
    -----
    Freed blocks wait in a list by size for the next request of that size on their stream, which costs two
    dictionary operations.  Those that came back with events of their uses serve any stream, ordered behind these.
    Both merge with their neighbours when a request does not find its size.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        nbytes: int,
        *,
        maximum: int | None = None,
        source: MemoryResource | None = None,
    ) -> None:
        known_driver(driver, _NAME)
        device, nbytes = whole_number(device, f"{_NAME}: device"), whole_number(nbytes, f"{_NAME}: nbytes")
        maximum = nbytes if maximum is None else whole_number(maximum, f"{_NAME}: maximum")
        if nbytes < 0 or maximum <= 0 or maximum < nbytes:
            raise InvalidRequestError(
                f"device pool: {nbytes} is not more than zero bytes, or more than its maximum of {maximum}"
            )
        source = DriverMemory(driver, device) if source is None else source
        if not isinstance(source, MemoryResource):
            raise InvalidRequestError(f"device pool: its source {source!r} is no MemoryResource")
        if source.driver is not driver or source.device != device:
            raise InvalidRequestError("device pool: its source is memory of another device")
        self.driver = driver
        self.device = device
        self.nbytes = align_up(nbytes, source.granularity) if source.joins else nbytes
        self.maximum = max(maximum, self.nbytes)
        self.source = source
        self._lock = threading.RLock()
        self._is_capturing = driver.is_capturing
        self._trimming = threading.RLock()  # taken before the other one
        self._live: dict[int, Block] = {}  # changed in single steps, by whoever gives back without the lock
        self._late: deque[tuple[Block, Stream | None]] = deque()
        self._caches: dict[Stream, dict[int, list[Block]]] = {}
        self._returned: dict[int, list[Block]] = {}  # by size; their marks tell when
        self._open: dict[Stream, Mark] = {}
        self._free = FreeBlocks()
        self._segments = Segments(source)
        self._used = 0
        self._peak = 0
        self._closed = False
        if nbytes:
            self._free.add(self._segments.first(self.nbytes))
        release = functools.partial(release_quietly, source, self._segments.held)
        self._finalizer = weakref.finalize(self, driver.finalise, release)
        self._finalizer.atexit = False

    @property
    def used(self) -> int:
        """Bytes allocated now, alignment included."""
        if self._late:
            self.driver.require_usable()
            with self._lock:
                self._file_late()
        return self._used

    @property
    def peak(self) -> int:
        """Most bytes allocated at once so far."""
        return self._peak

    @property
    def reserved(self) -> int:
        """Bytes taken from the source now."""
        return self._segments.nbytes

    @property
    def reserved_peak(self) -> int:
        """Most bytes taken from the source at once so far."""
        return self._segments.peak

    @property
    def largest_free(self) -> int:
        """Bytes of the largest single block that could be allocated now without growing."""
        self.driver.require_usable()
        with self._lock:
            self._merge()
            return self._free.largest

    # -- allocating -----------------------------------------------------------------------------------
    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        if stream.__class__ is not Stream or stream.device != self.device or stream.driver is not self.driver:
            usable_stream(stream, self.driver, self.device, _NAME)
        if self._is_capturing(stream):  # which also refuses a forked child, and closed streams
            refuse_capture(_NAME)
        size = nbytes + 255 & -256 if nbytes.__class__ is int and 0 < nbytes <= MOST else block_size(nbytes, _NAME)
        lock = self._lock
        lock.acquire()  # a `with` block takes twice as long
        try:
            if self._late:
                self._file_late()
            block = self._caches[stream][size].pop()
            self._live[block.start] = block
            used = self._used = self._used + size
            if used > self._peak:
                self._peak = used
            return block.start
        except (KeyError, IndexError):
            pass
        finally:
            lock.release()
        return self._allocate_slowly(size, stream)

    def _allocate_slowly(self, size: int, stream: Stream) -> int:
        may_make_room = True
        while True:
            with self._lock:
                if self._closed:
                    raise ClosedError("device pool: it was closed")
                if size == 0:
                    return 0
                block = self._reuse(size, stream)
                if block is not None:
                    return block.start
                found = self._find(size, stream)
                if found is not None:
                    return self._take(*found, size, stream)
                if self._late:
                    continue  # given back while the source was asked
                if not (may_make_room and self._could_make_room(size)):
                    raise self._out_of_memory(size)
            self.trim()  # waits for the device, and so not under the lock
            may_make_room = False

    def _reuse(self, size: int, stream: Stream) -> Block | None:
        """A block as it was given back, with events that say when its uses are over."""
        blocks = self._returned.get(size)
        if not blocks:
            return None
        block = blocks.pop()
        try:
            for _, _, mark in block.uses:
                mark.before(stream)
        except BaseException:
            self._returned.setdefault(size, []).append(block)
            raise
        block.uses = []
        self._hold(block)
        return block

    def _find(self, size: int, stream: Stream) -> tuple[Block, int] | None:
        """A free block and where to cut `size` bytes out of it, after all have merged; growth comes last."""
        self._merge()
        return self._free.fit(size, stream) or self._grow(size, stream)

    def _take(self, free: Block, start: int, size: int, stream: Stream) -> int:
        for mark in free.marks(start, start + size):
            mark.before(stream)
        self._hold(self._free.cut(free, start, size))
        return start

    def _hold(self, block: Block) -> None:
        self._live[block.start] = block
        self._used += block.size
        self._peak = max(self._peak, self._used)

    def _grow(self, size: int, stream: Stream) -> tuple[Block, int] | None:
        """What `_find` looks for, with the help of another segment, which continues the last one if it may."""
        tail = self._free.ending_at(self._segments.end) if self.source.joins else None
        lacking = [size]
        if tail is not None and tail.opening(tail.size, stream) is not None:
            lacking.insert(0, size - tail.size)
        for nbytes in lacking:
            block = self._segments.grow(nbytes, self.maximum, stream)
            if block is None:
                continue
            if not self.source.host_ordered:
                block.uses = [(block.start, block.end, self._mark(stream))]
            self._free.add(block)
            found = self._free.fit(size, stream)
            if found is not None:
                return found
        return None

    # -- giving back ----------------------------------------------------------------------------------
    def deallocate(
        self, ptr: int, nbytes: int, *, stream: Stream, uses: Mapping[Stream, Event] | None = None
    ) -> None:
        """Give memory back; its last use was enqueued on `stream`.

        Parameters
        ----------
        uses : mapping of Stream to Event, optional
            Where the last uses were recorded already (perhaps on several streams, perhaps some time ago):
            these events count instead of all that `stream` holds by now.  An empty one says that the host
            has waited for every use.  `stream` may be closed then.

        Raises
        ------
        InvalidRequestError
            Not a live allocation of this size: freed twice, an interior pointer, or of another pool.
        CaptureError
            `stream` is being captured into a graph; nothing was changed.

        Notes
        -----
        Never waits for another thread that is in the pool, so that a finaliser may call it wherever it runs:
        what is given back meanwhile is filed by the next one who takes the lock.
        """
        if stream.__class__ is not Stream or stream.device != self.device or stream.driver is not self.driver:
            usable_stream(stream, self.driver, self.device, _NAME)
        if uses is not None or not stream.owned:
            self._deallocate_marked(ptr, nbytes, stream, uses)
            return
        if self._is_capturing(stream):
            refuse_capture(_NAME)
        size = (nbytes + 255) & -256 if nbytes.__class__ is int else block_size(nbytes, _NAME)
        if ptr.__class__ is not int:
            ptr = whole_number(ptr, f"{_NAME}: pointer")
        block = self._live.pop(ptr, None)
        if block is None or block.size != size:
            self._refuse(ptr, nbytes, block)
            return
        lock = self._lock
        if not lock.acquire(False):
            self._put_off(block, stream)
            return
        try:
            self._used -= size
            self._caches[stream][size].append(block)
        except KeyError:
            self._caches.setdefault(stream, {}).setdefault(size, []).append(block)
        finally:
            lock.release()

    def _deallocate_marked(
        self, ptr: int, nbytes: int, stream: Stream, uses: Mapping[Stream, Event] | None
    ) -> None:
        """Give back what others may have events for, or a stream that may be gone when one is needed."""
        self.driver.require_usable()
        if uses is not None:
            uses = recorded_uses(uses, self.driver, _NAME)
        closed_may_be = uses is not None  # its events tell all
        if captured(self.driver, stream) if closed_may_be else self._is_capturing(stream):
            refuse_capture(_NAME)
        size, ptr = block_size(nbytes, _NAME), whole_number(ptr, f"{_NAME}: pointer")
        marks = self._marks(stream, uses)
        block = self._live.pop(ptr, None)
        if block is None or block.size != size:
            self._refuse(ptr, nbytes, block)
            return
        block.uses = [(block.start, block.end, mark) for mark in marks]
        self._put_off(block, stream if uses is None else None)

    def _put_off(self, block: Block, stream: Stream | None) -> None:
        """File a block as soon as the lock is free: now, or whoever takes it next does."""
        self._late.append((block, stream))
        while self._late and self._lock.acquire(blocking=False):
            try:
                self._file_late()
            finally:
                self._lock.release()

    def _file_late(self) -> None:
        """File what was given back while another thread held the lock."""
        while self._late:
            try:
                block, stream = self._late.popleft()
            except IndexError:  # a finaliser in this thread was quicker
                return
            self._used -= block.size
            if stream is None:
                self._returned.setdefault(block.size, []).append(block)
            else:
                self._caches.setdefault(stream, {}).setdefault(block.size, []).append(block)

    def _marks(self, stream: Stream, uses: Mapping[Stream, Event] | None) -> list[Mark]:
        if uses is None:
            return [Mark(self.driver, stream, stream.record())]
        if uses:
            return [Mark(self.driver, event.recorded[0] or other, event) for other, event in uses.items()]
        token = self.driver.publish()
        return [] if token is None else [Mark(self.driver, None, token=token)]

    def _refuse(self, ptr: int, nbytes: int, block: Block | None) -> None:
        if block is not None:
            self._live[ptr] = block
        elif ptr == 0 and nbytes == 0:
            return
        refuse_pointer(_NAME, ptr, nbytes)

    def trim(self) -> int:
        """Give memory that nobody uses back to the source, except the first `nbytes`; the bytes given back.

        Blocks the calling thread until work on that memory is done.  What was used on a stream that is
        being captured is kept.
        """
        self.driver.require_usable()
        with self._trimming:
            with self._lock:
                self._merge()
                detached = self._segments.detach(self._free)
            for _, marks in detached:
                for mark in marks:
                    mark.settle()
            with self._lock:
                return self._segments.release([segment for segment, _ in detached])

    def close(self) -> None:
        """Give everything back.  All allocations must be back, and their work is waited for.

        A second call does nothing.

        Raises
        ------
        InvalidRequestError
            Allocations are still live.
        CaptureError
            A stream that used the memory last is being captured.
        """
        self.driver.require_usable()
        with self._trimming, self._lock:
            if self._closed:
                return
            self._file_late()
            if self._used:  # of one that is just being given back too
                raise InvalidRequestError(f"device pool: {max(1, len(self._live))} allocations are still live")
            self._merge()
            marks = {mark for block in self._free for _, _, mark in block.uses}
            if not all(mark.reachable for mark in marks):
                raise CaptureError("device pool: a stream that used it is being captured; close it afterwards")
            for mark in marks:
                mark.settle()
            self._segments.release(list(self._segments.held))
            self._finalizer.detach()
            self._closed = True
            self._free = FreeBlocks()
            self._open.clear()

    # -- inside ---------------------------------------------------------------------------------------
    def _merge(self) -> None:
        """Let everything that was given back merge with its neighbours."""
        self._file_late()
        returned, self._returned = self._returned, {}  # exchanged at once: a finaliser may give back meanwhile
        for blocks in returned.values():
            for block in blocks:
                self._free.add(block)
        caches, self._caches = self._caches, {}
        for stream, cache in caches.items():
            mark = self._mark(stream) if stream.owned else None
            for blocks in cache.values():
                for block in blocks:
                    if mark is not None:
                        block.uses = [(block.start, block.start + block.size, mark)]
                    self._free.add(block)
        self._open = {stream: mark for stream, mark in self._open.items() if mark.open}

    def _mark(self, stream: Stream) -> Mark:
        """The mark for what `stream` has done so far."""
        mark = self._open.get(stream)
        if mark is None or not mark.open:
            event = None if stream.owned else stream.record()
            mark = self._open[stream] = Mark(self.driver, stream, event)
        return mark

    def _could_make_room(self, size: int) -> bool:
        """Whether `size` bytes might be had after unused segments went back."""
        unused = sum(segment.nbytes for _, inside in self._segments.unused(self._free) for segment in inside)
        return unused > 0 and self._segments.nbytes - unused + size <= self.maximum

    def _out_of_memory(self, size: int) -> OutOfMemory:
        cause = self._segments.refusal
        error = OutOfMemory(
            f"device pool: asked for {format_size(size)}, {format_size(self._used)} of "
            f"{format_size(self.maximum)} in use, largest free block {format_size(self._free.largest)}, "
            f"{format_size(self._segments.nbytes)} reserved; "
            "release or evict something, or make the pool larger",
            size=size,
            used=self._used,
            limit=self.maximum,
            budget=_NAME,
        )
        error.__cause__ = cause
        return error
