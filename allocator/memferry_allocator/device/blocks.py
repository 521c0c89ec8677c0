"""Blocks of a pool's memory, and the ordered set of those that are free."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from ..driver import Stream
from .marks import Mark

Use = tuple[int, int, Mark]
MANY_USES = 32  # of one free block, before some are taken together


class Block:
    """A range of one run.

    Attributes
    ----------
    start, size : int
        Address and bytes.
    run : int
        Neighbours merge if they are of the same run.
    uses : list of (start, end, Mark)
        Who may still be using which part of it, while it is free; exact, so that nobody waits for a neighbour's.
    """

    __slots__ = ("run", "size", "start", "uses")

    def __init__(self, start: int, size: int, run: int, uses: list[Use]) -> None:
        self.start = start
        self.size = size
        self.run = run
        self.uses = uses

    @property
    def end(self) -> int:
        return self.start + self.size

    def opening(self, size: int, stream: Stream) -> int | None:
        """Where in it `size` bytes are that `stream` can be ordered on, at the lowest address."""
        start = self.start
        if self.uses:
            shut = [
                (low, high) for low, high, mark in self.uses if mark.stream is not stream and not mark.reachable
            ]
            for low, high in sorted(shut):
                if low - start >= size:
                    break
                start = max(start, high)
        return start if self.end - start >= size else None

    def marks(self, start: int, end: int) -> list[Mark]:
        """The marks on a part of it: of every stream the last, which covers its others."""
        last: dict[object, Mark] = {}
        for low, high, mark in self.uses:
            if low < end and start < high:
                key = mark if mark.stream is None else mark.stream
                last[key] = _later(last.get(key, mark), mark)
        return list(last.values())


class FreeBlocks:
    """Free blocks by size and by address; neighbours of a run are always merged."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []
        self._starts: dict[int, Block] = {}
        self._ends: dict[int, Block] = {}

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self._starts.values()))

    @property
    def largest(self) -> int:
        """Bytes of the largest block."""
        return self._order[-1][0] if self._order else 0

    def ending_at(self, address: int) -> Block | None:
        return self._ends.get(address)

    def starting_at(self, address: int) -> Block | None:
        return self._starts.get(address)

    def add(self, block: Block) -> None:
        """Add a block, merged with its neighbours."""
        left, right = self._ends.get(block.start), self._starts.get(block.start + block.size)
        if left is not None and left.run == block.run:
            self._remove(left)
            block = _joined(left, block)
        if right is not None and right.run == block.run:
            self._remove(right)
            block = _joined(block, right)
        self._insert(block)

    def fit(self, size: int, stream: Stream) -> tuple[Block, int] | None:
        """The tightest block with `size` bytes that `stream` can be ordered on, and where they are in it."""
        for index in range(bisect.bisect_left(self._order, (size, 0)), len(self._order)):
            block = self._starts[self._order[index][1]]
            start = block.opening(size, stream)
            if start is not None:
                return block, start
        return None

    def cut(self, block: Block, start: int, size: int) -> Block:
        """Take a part out of a free block; what is left of it stays."""
        self._remove(block)
        end = start + size
        for low, high in ((block.start, start), (end, block.end)):
            if low < high:
                uses = [(max(a, low), min(b, high), mark) for a, b, mark in block.uses if a < high and low < b]
                self._insert(Block(low, high - low, block.run, uses))
        return Block(start, size, block.run, [])

    def _insert(self, block: Block) -> None:
        bisect.insort(self._order, (block.size, block.start))
        self._starts[block.start] = self._ends[block.start + block.size] = block

    def _remove(self, block: Block) -> None:
        del self._order[bisect.bisect_left(self._order, (block.size, block.start))]
        del self._starts[block.start], self._ends[block.start + block.size]


def _joined(left: Block, right: Block) -> Block:
    uses = left.uses + right.uses
    if left.uses and right.uses:
        (low, middle, mark), (start, high, other) = left.uses[-1], right.uses[0]
        if mark is other and middle == start:
            uses = [*left.uses[:-1], (low, high, mark), *right.uses[1:]]
    if len(uses) > MANY_USES:
        uses = _together(uses)
    return Block(left.start, left.size + right.size, left.run, uses)


def _together(uses: list[Use]) -> list[Use]:
    """One use a stream, from its first byte to its last and with its last mark: more than was used, never less."""
    last: dict[object, Use] = {}
    for start, end, mark in uses:
        key = mark if mark.stream is None else mark.stream
        if key in last:
            low, high, known = last[key]
            last[key] = (min(low, start), max(high, end), _later(known, mark))
        else:
            last[key] = (start, end, mark)
    return list(last.values())


def _later(one: Mark, other: Mark) -> Mark:
    """Of two marks of a stream the one that covers both; one whose event is still to be recorded does."""
    if one.event is None or other.event is None:
        return one if one.event is None else other
    return one if one.event.sequence >= other.event.sequence else other
