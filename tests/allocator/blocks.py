"""Blocks of a resource under test, with patterns at head and tail that are looked at before they go back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from memferry_allocator import Driver, MemoryResource, Stream

from .machine import address

EDGE = 64


@dataclass
class Held:
    """A block, and the byte at its edges."""

    ptr: int
    nbytes: int
    value: int


class Blocks:
    """Takes and gives blocks of one resource; every block is written when taken and read when given back."""

    def __init__(self, resource: MemoryResource) -> None:
        self.resource = resource
        self.driver: Driver = resource.driver
        self.held: list[Held] = []
        self._values = itertools.cycle(range(1, 251))

    def take(self, nbytes: int, stream: Stream) -> Held:
        ptr = self.resource.allocate(nbytes, stream=stream)
        block = Held(ptr, nbytes, next(self._values))
        self.held.append(block)
        for start, size in _edges(nbytes):
            self.driver.fill(ptr + start, block.value, size, stream=stream)
        return block

    def check(self, block: Held, stream: Stream) -> None:
        """Nobody else has written to its edges, seen in `stream`'s order."""
        for start, size in _edges(block.nbytes):
            out = np.zeros(size, np.uint8)
            self.driver.copy(address(out), block.ptr + start, size, stream=stream)
            stream.synchronize()
            assert set(out.tolist()) == {block.value}

    def give(self, block: Held, stream: Stream) -> None:
        self.check(block, stream)
        self.held.remove(block)
        self.resource.deallocate(block.ptr, block.nbytes, stream=stream)

    def give_all(self, stream: Stream) -> None:
        while self.held:
            self.give(self.held[-1], stream)

    def disjoint(self) -> bool:
        """Whether no two blocks share a byte."""
        spans = sorted((block.ptr, block.ptr + block.nbytes) for block in self.held)
        return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def _edges(nbytes: int) -> list[tuple[int, int]]:
    """Start and size of head and tail."""
    if nbytes <= 2 * EDGE:
        return [(0, nbytes)]
    return [(0, EDGE), (nbytes - EDGE, EDGE)]
