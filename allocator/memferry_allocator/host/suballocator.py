"""Parts of one host range: best fit, neighbours merged, each with the work that still uses it."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..driver import Event, Span, Stream
from ..sizes import align_up


class Use(NamedTuple):
    """Until when a stream may still be using a part of a free range."""

    start: int
    end: int
    stream: Stream
    event: Event


@dataclass(eq=False)
class _Block:
    """A free range.  Its uses stay exact when ranges merge and split, so nobody waits for a neighbour's."""

    start: int
    end: int
    uses: list[Use] = field(default_factory=list)

    def within(self, start: int, end: int) -> list[Use]:
        return [
            use._replace(start=max(use.start, start), end=min(use.end, end))
            for use in self.uses
            if use.start < end and use.end > start
        ]


class Taken(NamedTuple):
    """A part that was taken, and the uses that must be over before it is touched."""

    span: Span
    uses: list[Use]


class SubAllocator:
    """Which parts of a range are free.  Not thread-safe."""

    def __init__(self, start: int, nbytes: int) -> None:
        self._blocks = [_Block(start, start + nbytes)]
        self._end = start + nbytes

    @property
    def free(self) -> int:
        """Bytes that are free."""
        return sum(block.end - block.start for block in self._blocks)

    @property
    def largest(self) -> int:
        """Bytes of the largest free block."""
        return max((block.end - block.start for block in self._blocks), default=0)

    @property
    def tail(self) -> int:
        """Bytes that are free at the end of the range."""
        last = self._blocks[-1] if self._blocks else None
        return last.end - last.start if last is not None and last.end == self._end else 0

    def take(self, nbytes: int, alignment: int) -> Taken | None:
        """`nbytes` bytes of the smallest free block that has them; None if none has."""
        fitting = [block for block in self._blocks if align_up(block.start, alignment) + nbytes <= block.end]
        if not fitting:
            return None
        block = min(fitting, key=lambda block: block.end - block.start)
        return self._carve(block, align_up(block.start, alignment), nbytes)

    def take_next(self, nbytes: int, alignment: int) -> Taken | None:
        """The first `nbytes` aligned bytes of the tail; what alignment leaves out goes with them."""
        if not self.tail:
            return None
        block = self._blocks[-1]
        start = align_up(block.start, alignment)
        if start + nbytes > block.end:
            return None
        whole = self._carve(block, block.start, start + nbytes - block.start)
        return Taken(Span(start, nbytes), whole.uses)

    def give(self, span: Span, uses: list[Use]) -> None:
        """Free a part; it is in use until those events."""
        block = _Block(span.ptr, span.ptr + span.nbytes, uses)
        index = bisect.bisect_left(self._blocks, block.start, key=lambda other: other.start)
        for neighbour in (index, index - 1):
            if 0 <= neighbour < len(self._blocks) and _touch(self._blocks[neighbour], block):
                other = self._blocks.pop(neighbour)
                block = _Block(
                    min(block.start, other.start), max(block.end, other.end), [*other.uses, *block.uses]
                )
        bisect.insort(self._blocks, block, key=lambda other: other.start)

    def _carve(self, block: _Block, start: int, nbytes: int) -> Taken:
        end = start + nbytes
        index = bisect.bisect_left(self._blocks, block.start, key=lambda other: other.start)
        rest = [
            _Block(low, high, block.within(low, high))
            for low, high in ((block.start, start), (end, block.end))
            if low < high
        ]
        self._blocks[index : index + 1] = rest
        return Taken(Span(start, nbytes), block.within(start, end))


def uses_of(span: Span, events: Mapping[Stream, Event]) -> list[Use]:
    """`events` as the uses of a whole range."""
    return [Use(span.ptr, span.ptr + span.nbytes, *item) for item in events.items()]


def _touch(one: _Block, other: _Block) -> bool:
    return one.end == other.start or other.end == one.start
