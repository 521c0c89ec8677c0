"""A device pool with a byte budget: one slab, best fit, reuse in stream order."""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..driver import Driver, Event, Stream, require_stream
from ..errors import AllocatorError, ClosedError, InvalidRequestError, OutOfMemory
from ..sizes import align_up, format_size

ALIGNMENT = 256


class _Use(NamedTuple):
    """Until when a stream may still be using a part of a free range."""

    start: int
    end: int
    stream: Stream
    event: Event


@dataclass(eq=False)
class _Block:
    """A free range.  Its uses stay exact when ranges merge and split, so nobody waits for a neighbour's."""

    start: int
    nbytes: int
    uses: list[_Use] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def last_events(self, end: int) -> dict[Stream, Event]:
        """The last event of every stream that may still be using something before `end`."""
        last: dict[Stream, Event] = {}
        for use in self.uses:
            if use.start < end:
                known = last.get(use.stream)
                if known is None or known.sequence < use.event.sequence:
                    last[use.stream] = use.event
        return last


class DevicePool:
    """Device memory of a fixed budget, reserved at once.

    ``allocate`` gives memory that may be used on the stream named there at once.  ``deallocate`` says on
    which stream the last use was enqueued; a later allocation on the same stream needs no waiting, one on
    another stream is ordered behind that use by an event.  Blocks are 256-byte aligned; free neighbours
    merge.  Thread-safe.

    Parameters
    ----------
    driver : Driver
    device : int
    nbytes : int
        The budget: exactly this much device memory is taken.
    """

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        if nbytes <= 0:
            raise InvalidRequestError(f"device pool: {nbytes} is not more than zero bytes")
        self.driver = driver
        self.device = device
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._base = driver.malloc(device, nbytes)
        self._free: list[_Block] = [_Block(self._base, nbytes)]
        self._live: dict[int, int] = {}
        self._used = 0
        self._peak = 0
        self._closed = False
        self._finalizer = weakref.finalize(
            self, driver.finalise, functools.partial(_free_quietly, driver, device, self._base)
        )
        self._finalizer.atexit = False

    @property
    def used(self) -> int:
        """Bytes allocated now, alignment included."""
        return self._used

    @property
    def peak(self) -> int:
        """Most bytes allocated at once so far."""
        return self._peak

    @property
    def largest_free(self) -> int:
        """Bytes of the largest single block that could be allocated now."""
        with self._lock:
            return self._largest()

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """A device pointer to ``nbytes`` bytes, usable in `stream`'s order from now on.

        Raises
        ------
        OutOfMemory
            No free block is large enough; nothing was changed.
        """
        require_stream(stream, self.device)
        if nbytes <= 0:
            raise InvalidRequestError(f"device pool: cannot allocate {nbytes} bytes")
        size = align_up(nbytes, ALIGNMENT)
        with self._lock:
            if self._closed:
                raise ClosedError("device pool: it was closed")
            block = min(
                (block for block in self._free if block.nbytes >= size),
                key=lambda block: block.nbytes,
                default=None,
            )
            if block is None:
                raise self._out_of_memory(size)
            for event in block.last_events(block.start + size).values():
                stream.wait(event)
            self._take(block, size)
            self._live[block.start] = size
            self._used += size
            self._peak = max(self._peak, self._used)
            return block.start

    def deallocate(
        self, ptr: int, nbytes: int, *, stream: Stream, uses: Mapping[Stream, Event] | None = None
    ) -> None:
        """Give memory back; its last use was enqueued on `stream`.

        Parameters
        ----------
        uses : mapping of Stream to Event, optional
            Where the last uses were recorded already (perhaps on several streams, perhaps some time ago):
            these events count instead of all that `stream` holds by now.  An empty one says that the host
            has waited for every use.

        Raises
        ------
        InvalidRequestError
            Not a live allocation of this size: freed twice, an interior pointer, or of another pool.
        """
        require_stream(stream, self.device)
        size = align_up(nbytes, ALIGNMENT)
        with self._lock:
            if self._live.get(ptr) != size:
                raise InvalidRequestError(
                    f"device pool: {ptr:#x} with {nbytes} bytes is not a live allocation here; it was freed "
                    "twice, or pointer and size do not belong together"
                )
            last = {stream: stream.record()} if uses is None else uses
            del self._live[ptr]
            self._used -= size
            self._give(_Block(ptr, size, [_Use(ptr, ptr + size, *use) for use in last.items()]))

    def close(self) -> None:
        """Free the slab.  All allocations must be back and their work done; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            if self._live:
                raise InvalidRequestError(f"device pool: {len(self._live)} allocations are still live")
            for block in self._free:
                for event in block.last_events(block.end).values():
                    event.synchronize()
            self.driver.free(self.device, self._base)
            self._finalizer.detach()
            self._closed = True

    def _largest(self) -> int:
        return max((block.nbytes for block in self._free), default=0)

    def _take(self, block: _Block, size: int) -> None:
        index = bisect.bisect_left(self._free, block.start, key=lambda other: other.start)
        if block.nbytes == size:
            del self._free[index]
        else:
            start = block.start + size
            uses = [use._replace(start=max(use.start, start)) for use in block.uses if use.end > start]
            self._free[index] = _Block(start, block.nbytes - size, uses)

    def _give(self, block: _Block) -> None:
        index = bisect.bisect_left(self._free, block.start, key=lambda other: other.start)
        for neighbour in (index, index - 1):
            if 0 <= neighbour < len(self._free) and _touches(self._free[neighbour], block):
                block = _merge(self._free.pop(neighbour), block)
        bisect.insort(self._free, block, key=lambda other: other.start)

    def _out_of_memory(self, size: int) -> OutOfMemory:
        largest = self._largest()
        return OutOfMemory(
            f"device pool: asked for {format_size(size)}, {format_size(self._used)} of "
            f"{format_size(self.nbytes)} in use, largest free block {format_size(largest)}; "
            "release or evict something, or make the pool larger",
            size=size,
            used=self._used,
            limit=self.nbytes,
            budget="device pool",
        )


def _free_quietly(driver: Driver, device: int, base: int) -> None:
    """Free the slab of a pool that nobody closed, once its work is done; a finaliser has nobody to tell."""
    with contextlib.suppress(AllocatorError):
        driver.synchronize_all()
        driver.free(device, base)


def _touches(one: _Block, other: _Block) -> bool:
    return one.end == other.start or other.end == one.start


def _merge(one: _Block, other: _Block) -> _Block:
    return _Block(min(one.start, other.start), one.nbytes + other.nbytes, one.uses + other.uses)
