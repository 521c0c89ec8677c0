"""What a pool has taken from its source."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from ..driver import Stream
from ..errors import AllocatorError, OutOfMemory
from ..sizes import align_up
from .blocks import Block, FreeBlocks
from .growth import segment_size
from .marks import Mark
from .resource import MemoryResource


class Segment(NamedTuple):
    """One allocation of the source; a `fixed` one is kept until the pool is closed."""

    start: int
    nbytes: int
    fixed: bool

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class Segments:
    """The segments of one pool, in the order of their addresses; not thread-safe."""

    def __init__(self, source: MemoryResource) -> None:
        self.source = source
        self.held: list[Segment] = []
        self.nbytes = 0
        self.peak = 0
        self.refusal: OutOfMemory | None = None

    @property
    def end(self) -> int:
        """The address behind the last segment."""
        return self.held[-1].end if self.held else 0

    def first(self, nbytes: int) -> Block:
        """What the pool has from the beginning, usable on every stream."""
        with _stream_of_its_own(self.source) as stream:
            start = self.source.allocate(nbytes, stream=stream)
        return self._hold(Segment(start, nbytes, True))

    def grow(self, lacking: int, maximum: int, stream: Stream) -> Block | None:
        """Another segment of at least `lacking` bytes, usable on `stream`; None if there is none to be had."""
        self.refusal = None
        granularity = self.source.granularity
        least = align_up(lacking, granularity)
        room = (maximum - self.nbytes) // granularity * granularity
        if least > room:
            return None
        wanted = min(segment_size(lacking, granularity, joins=self.source.joins), room)
        for nbytes in dict.fromkeys((wanted, least)):
            try:
                start = self.source.allocate(nbytes, stream=stream)
            except OutOfMemory as error:
                self.refusal = error
            else:
                return self._hold(Segment(start, nbytes, False))
        return None

    def unused(self, free: FreeBlocks) -> list[tuple[Block, list[Segment]]]:
        """Free blocks, and the segments that lie wholly in them and need not be kept."""
        found = []
        for block in free:
            index = bisect.bisect_left(self.held, (block.start,))
            inside = []
            while index < len(self.held) and self.held[index].end <= block.end:
                if not self.held[index].fixed:
                    inside.append(self.held[index])
                index += 1
            if inside:
                found.append((block, inside))
        return found

    def detach(self, free: FreeBlocks) -> list[tuple[Segment, list[Mark]]]:
        """Take unused segments out of the free blocks, with the marks to wait for before they are given back."""
        detached = []
        for block, inside in self.unused(free):
            rest: Block | None = block
            for segment in inside:
                assert rest is not None
                marks = rest.marks(segment.start, segment.end)
                if all(mark.reachable for mark in marks):
                    free.cut(rest, segment.start, segment.nbytes)
                    detached.append((segment, marks))
                    rest = free.starting_at(segment.end)
        return detached

    def release(self, segments: list[Segment]) -> int:
        """Give segments back on which all work is done; the bytes given back."""
        released = 0
        with _stream_of_its_own(self.source) as stream:
            for segment in segments:
                self.source.deallocate(segment.start, segment.nbytes, stream=stream)
                self.held.remove(segment)
                self.nbytes -= segment.nbytes
                released += segment.nbytes
        return released

    def _hold(self, segment: Segment) -> Block:
        bisect.insort(self.held, segment)
        self.nbytes += segment.nbytes
        self.peak = max(self.peak, self.nbytes)
        return Block(segment.start, segment.nbytes, 0 if self.source.joins else segment.start, [])


def release_quietly(source: MemoryResource, held: list[Segment]) -> None:
    """Give back the segments of a pool that nobody closed, once all work is done.

    A finaliser has nobody to tell; what is still in use then is lost rather than given to somebody else.
    """
    with contextlib.suppress(AllocatorError):
        source.driver.require_usable()
        source.driver.synchronize_all()
        with _stream_of_its_own(source) as stream:
            for segment in held:
                source.deallocate(segment.start, segment.nbytes, stream=stream)


@contextlib.contextmanager
def _stream_of_its_own(source: MemoryResource) -> Iterator[Stream]:
    """A stream without work, for calls to the source that follow no stream of a user."""
    driver = source.driver
    with driver.beside_captures():
        stream = driver.create_stream(source.device)
        try:
            yield stream
        finally:
            stream.close()
