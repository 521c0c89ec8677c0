"""Registered ranges as the driver has them, and who needs each of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..driver import Span
from .mapping import Witness


@dataclass(eq=False)
class Hold:
    """What one registration keeps: its chunks, in order of address, and what their pages depend on."""

    name: str
    owner: object | None
    chunks: list[Chunk] = field(default_factory=list)


@dataclass(eq=False)
class Chunk:
    """One range that went to the driver in one call, or that somebody else has registered (`borrowed`).

    `owner` is what its pages depend on by the word of who registered it first: kept until it is unregistered.
    """

    start: int
    nbytes: int
    read_only: bool
    borrowed: bool
    since: float
    witness: Witness
    owner: object | None
    holders: list[Hold] = field(default_factory=list)
    gone: bool = False

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def span(self) -> Span:
        return Span(self.start, self.nbytes)


class ChunkTable:
    """Disjoint chunks in order of address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._chunks: list[Chunk] = []

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def insert(self, chunk: Chunk) -> None:
        index = bisect.bisect_left(self._starts, chunk.start)
        self._starts.insert(index, chunk.start)
        self._chunks.insert(index, chunk)

    def remove(self, chunk: Chunk) -> None:
        index = bisect.bisect_left(self._starts, chunk.start)
        del self._starts[index]
        del self._chunks[index]

    def overlapping(self, address: int, nbytes: int) -> list[Chunk]:
        """The chunks that have a byte of the range."""
        if nbytes <= 0:
            return []
        first = max(bisect.bisect_right(self._starts, address) - 1, 0)
        last = bisect.bisect_left(self._starts, address + nbytes)
        return [chunk for chunk in self._chunks[first:last] if chunk.end > address]

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether one chunk has all of it, as nearly always."""
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and address + nbytes <= self._chunks[index].end

    def gaps(self, address: int, nbytes: int) -> list[Span]:
        """What of the range lies in no chunk."""
        if self.holds(address, nbytes):
            return []
        found = []
        position = address
        for chunk in self.overlapping(address, nbytes):
            if chunk.start > position:
                found.append(Span(position, chunk.start - position))
            position = chunk.end
        if position < address + nbytes:
            found.append(Span(position, address + nbytes - position))
        return found

    def split(self, address: int, nbytes: int) -> list[Span]:
        """The range, cut at every edge of a chunk inside it."""
        pieces = []
        position, end = address, address + nbytes
        if nbytes > 0 and self.holds(address, nbytes):
            return [Span(address, nbytes)]
        for chunk in self.overlapping(address, nbytes):
            for edge in (chunk.start, chunk.end):
                if position < edge < end:
                    pieces.append(Span(position, edge - position))
                    position = edge
        if position < end:
            pieces.append(Span(position, end - position))
        return pieces
