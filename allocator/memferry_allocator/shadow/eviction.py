"""Whose device copy goes when there is no room: policies of a shadow space."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .partition import Partition


class EvictionPolicy(Protocol):
    """Chooses victims.  A policy that also has ``used(partition)`` is told of every DEVICE acquire.

    Both are called under the space's lock, by whichever thread needs the room.
    """

    def victim(self, candidates: Collection[Partition]) -> Partition | None:
        """One of `candidates`, or None to let the request fail.

        Candidates have a device copy, no open view and no pin; the least recently used comes first.
        """


class LeastRecentlyUsed:
    """The copy whose last use, in whatever place, is longest ago.  Takes the same time for any number."""

    def victim(self, candidates: Collection[Partition]) -> Partition | None:
        return next(iter(candidates), None)


class _NextUse(dict["Partition", float]):
    """Where in the plan a partition is used next; never, if the plan does not know it."""

    def __missing__(self, partition: Partition) -> float:
        return math.inf


class PlannedOrder:
    """The copy that a known plan needs furthest in the future (Bélády's rule).

    The plan moves on with the acquires in DEVICE.  An acquire stands for the partition's next planned use if
    that is near: closer than the plan has partitions.  What lies before it counts as skipped.  Other acquires
    are outside the plan and move nothing.  Partitions that the plan does not need any more go first, the least
    recently used among them before the others.

    A choice looks at every candidate once; an acquire costs the same for any plan.

    Parameters
    ----------
    sequence : iterable of Partition
        The DEVICE acquires to come, in order; all of one space.
    cyclic : bool
        Whether the plan starts again at its end, as training iterations do.
    """

    def __init__(self, sequence: Iterable[Partition], *, cyclic: bool = False) -> None:
        self.sequence = tuple(sequence)
        self.cyclic = cyclic
        self._next = _NextUse()
        self._gaps = [math.inf] * len(self.sequence)
        self._position = 0
        if cyclic:
            for index, partition in reversed(list(enumerate(self.sequence))):
                self._next[partition] = index + len(self.sequence)
        for index, partition in reversed(list(enumerate(self.sequence))):
            self._gaps[index] = self._next[partition] - index
            self._next[partition] = index

    @property
    def position(self) -> int:
        """How many planned uses are over."""
        return self._position

    def used(self, partition: Partition) -> None:
        """Move the plan on."""
        found = self._next[partition]
        if found - self._position >= len(self._next):
            return
        for position in range(self._position, int(found) + 1):
            index = position % len(self.sequence)
            self._next[self.sequence[index]] = position + self._gaps[index]
        self._position = int(found) + 1

    def victim(self, candidates: Collection[Partition]) -> Partition | None:
        return max(candidates, key=self._next.__getitem__, default=None)
