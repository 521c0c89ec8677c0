"""Shares that follow what the ways were seen to take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from memferry_allocator import Direction

from .paths import Path
from .runs import PathShare

TOLERANCE = 0.05
MOST_SHIFTED = 0.25  # of a transfer's slices
REMEMBERED = 8
PARTS = 64  # of a transfer without slices: each way's share is right to a thirty-second then
SETTLED = 3  # looks in a row that moved nothing: from then on only ...
SAMPLED = 8  # ... every so many-th transfer is timed
ENOUGH = 4  # slices that a way must carry before its rate says anything


class Situation(NamedTuple):
    """Transfers that are alike: the same ways, and sizes within a factor of two.

    Attributes
    ----------
    step : int
        Bytes that are moved from one way to another at a time.
    """

    direction: Direction
    paths: tuple[Path, ...]
    magnitude: int
    step: int


def situation(direction: Direction, paths: Sequence[Path], nbytes: int, slice_bytes: int) -> Situation:
    """Where a way carries slices these are what is moved; where none does, a small part of the transfer."""
    step = slice_bytes
    if all(path.direct or path.by_kernel for path in paths):
        step = max(1, min(slice_bytes, (1 << max(nbytes, 1).bit_length() - 1) // PARTS))
    return Situation(direction, tuple(paths), (nbytes // step).bit_length(), step)


def next_shift(
    shifts: Sequence[int], slices: Sequence[float], seconds: Sequence[float], tolerance: float = TOLERANCE
) -> list[int]:
    """`shifts` with one slice moved from the way that ended last to the one that ended first, if that helps.

    A way that carried nothing is given nothing: what it would have taken is not known.

    Parameters
    ----------
    shifts : sequence of int
        Slices moved to each way so far.
    slices, seconds : sequence of float
        What each way carried, in slices, and what it took.
    """
    last = max(range(len(seconds)), key=seconds.__getitem__)
    first = min((way for way in range(len(seconds)) if slices[way]), key=seconds.__getitem__, default=last)
    moved = list(shifts)
    if seconds[last] - seconds[first] <= tolerance * seconds[last]:
        return moved
    one_more = seconds[first] * (1 + 1 / slices[first])
    room = max(1.0, MOST_SHIFTED * sum(slices))
    if one_more < seconds[last] and slices[last] >= 1 and moved[first] < room and -moved[last] < room:
        moved[first] += 1
        moved[last] -= 1
    return moved


class Adaptive:
    """Learns from transfers that are done, without ever waiting for one.  The engine's lock is held round calls.

    Parameters
    ----------
    slice_bytes : int
    """

    def __init__(self, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._shifts: dict[Situation, tuple[int, ...]] = {}
        self._asked: dict[Situation, int] = {}
        self._unmoved: dict[Situation, int] = {}  # looks in a row after which nothing was moved
        self._watched: deque[tuple[Situation, tuple[PathShare, ...]]] = deque(maxlen=REMEMBERED)

    def shifts(self, key: Situation) -> tuple[int, ...]:
        """Slices to move to each way of `key`; they add up to zero.  The same object until that changes."""
        return self._shifts.get(key) or self._shifts.setdefault(key, (0,) * len(key.paths))

    def wants(self, key: Situation) -> bool:
        """Whether to take the times of the next transfer of `key`: of each until its shares have settled, then of
        some."""
        count = self._asked[key] = self._asked.get(key, -1) + 1
        return self._unmoved.get(key, 0) < SETTLED or count % SAMPLED == 0

    def watch(self, key: Situation, shares: tuple[PathShare, ...]) -> None:
        """Look at a transfer later on."""
        self._watched.append((key, shares))

    def learn(self) -> list[tuple[Path, float]]:
        """Take in what is done by now; bytes per second of each way seen."""
        if not self._watched:
            return []
        seen: list[tuple[Path, float]] = []
        waiting = list(self._watched)
        self._watched.clear()
        learnt: set[Situation] = set()
        for key, shares in waiting:
            seconds = [share.measured_s if share.nbytes else 0.0 for share in shares]
            if any(took is None for took in seconds):
                self._watched.append((key, shares))
                continue
            times = [took or 0.0 for took in seconds]
            for share, took in zip(shares, times, strict=True):
                if took > 0 and share.nbytes >= ENOUGH * self._slice_bytes:
                    seen.append((share.path, share.nbytes / took))
            if key not in learnt and tuple(share.path for share in shares) == key.paths:
                learnt.add(key)  # one step: the others were shared out before it, too
                counts = [share.nbytes / key.step for share in shares]
                before = self.shifts(key)
                after = tuple(next_shift(before, counts, times))
                if after != before:
                    self._shifts[key] = after
                self._unmoved[key] = self._unmoved.get(key, 0) + 1 if after == before else 0
        return seen
