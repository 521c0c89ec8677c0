"""Which weights come when, and what must have ended before there is room for them.

Belady's rule over an order of uses that is known: what is needed latest goes first.  Time plays no part; a load
may begin as soon as the last uses of what it displaces are over: how far loads run ahead follows from the order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """A layer's weights are needed in device memory.

    Attributes
    ----------
    layer : int
    nbytes : int
    last : bool
        Whether its copy is worth nothing afterwards.
    """

    layer: int
    nbytes: int
    last: bool = False


@dataclass(frozen=True)
class Loads:
    """What comes and goes.

    Attributes
    ----------
    loads : dict of int to int
        For every use that needs a load: the position of the last use that must be over before there is room for
        it; -1 if there is from the beginning.
    released : frozenset of int
        The uses after which their layer's memory is given up.
    """

    loads: dict[int, int]
    released: frozenset[int]


class _Room:
    """Free bytes, each piece with the use after which it is free."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pieces = [(-1, nbytes)]

    def give(self, after: int, nbytes: int) -> None:
        self.nbytes += nbytes
        heapq.heappush(self._pieces, (after, nbytes))

    def take(self, nbytes: int) -> int:
        """The use after which so many are free, those that are free earliest."""
        self.nbytes -= nbytes
        after = -1
        while nbytes > 0:
            after, size = heapq.heappop(self._pieces)
            if size > nbytes:
                heapq.heappush(self._pieces, (after, size - nbytes))
            nbytes -= size
        return after


def plan_loads(uses: Sequence[Use], capacity: int) -> Loads:
    """The loads that a sequence of uses needs, beginning with nothing in device memory.

    Parameters
    ----------
    uses : sequence of Use
    capacity : int
        Bytes for all slabs together; no single one needs more.
    """
    following = _next_uses(uses)
    room, loads, released = _Room(capacity), dict[int, int](), set[int]()
    here: dict[int, int] = {}  # the layers that are there: their last use so far
    for position, use in enumerate(uses):
        if use.layer not in here:
            while room.nbytes < use.nbytes:
                victim = max(here, key=lambda each: following[here[each]])
                last = here.pop(victim)
                released.add(last)
                room.give(last, uses[last].nbytes)
            loads[position] = room.take(use.nbytes)
        here[use.layer] = position
        if use.last:
            del here[use.layer]
            released.add(position)
            room.give(position, use.nbytes)
    return Loads(loads, frozenset(released))


def _next_uses(uses: Sequence[Use]) -> list[int]:
    """For each use the position of the same layer's next; beyond the end if there is none."""
    following, seen = [len(uses)] * len(uses), dict[int, int]()
    for position in range(len(uses) - 1, -1, -1):
        layer = uses[position].layer
        following[position] = seen.get(layer, len(uses))
        seen[layer] = position
    return following
