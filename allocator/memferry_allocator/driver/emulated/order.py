"""Who touched which bytes, and whether anything orders it: vector clocks over byte ranges.

An actor is a stream or a host thread.  A clock maps an actor to how much of its history is known.
Two overlapping accesses, one of them a write, are a race unless the later one's clock knows the earlier
(Lamport's happens-before, kept as FastTrack keeps it: the last write and the reads since, per range).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...errors import RaceError

Clock = dict[int, int]


def join(into: Clock, other: Clock) -> None:
    """Take over everything that `other` knows."""
    for actor, time in other.items():
        if into.get(actor, 0) < time:
            into[actor] = time


@dataclass(frozen=True)
class Access:
    """One access: who, at which of its own times, and what to call it in an error."""

    actor: int
    time: int
    label: str


@dataclass
class _Segment:
    start: int
    end: int
    writer: Access | None = None
    readers: dict[int, Access] = field(default_factory=dict)


@dataclass(eq=False)
class OpenAccess:
    """An access that is still going on: nobody else may conflict with it, whatever they know."""

    start: int
    end: int
    write: bool
    actor: int
    label: str


class AccessLog:
    """The last accesses of every byte range, on one line of addresses for all memories."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: list[_Segment] = []
        self._open: list[OpenAccess] = []
        self._gone: set[int] = set()

    def check(self, start: int, end: int, *, write: bool, actor: int, clock: Clock, label: str) -> None:
        """Raise `RaceError` if an access that `clock` does not know conflicts with this one."""
        for held in self._open:
            if (
                held.actor != actor
                and held.actor not in self._gone
                and held.start < end
                and start < held.end
                and (write or held.write)
            ):
                raise _race(start, end, write, label, held.write, held.label, "still going on")
        low, high = self._first(start), bisect.bisect_left(self._starts, end)
        for segment in self._segments[low:high]:
            last = segment.writer
            if last is not None and last.actor != actor and clock.get(last.actor, 0) < last.time:
                raise _race(start, end, write, label, True, last.label, "not ordered before it")
            if write:
                for read in segment.readers.values():
                    if read.actor != actor and clock.get(read.actor, 0) < read.time:
                        raise _race(start, end, write, label, False, read.label, "not ordered before it")

    def record(self, start: int, end: int, *, write: bool, access: Access) -> None:
        """Remember an access that `check` has passed."""
        if access.actor in self._gone:
            return
        self._split(start)
        self._split(end)
        low, high = self._first(start), self._first(end)
        if write:
            fresh = [_Segment(start, end, writer=access)]
        else:
            fresh = []
            position = start
            for segment in self._segments[low:high]:
                if position < segment.start:
                    fresh.append(_Segment(position, segment.start, readers={access.actor: access}))
                segment.readers[access.actor] = access
                fresh.append(segment)
                position = segment.end
            if position < end:
                fresh.append(_Segment(position, end, readers={access.actor: access}))
        self._segments[low:high] = fresh
        self._starts[low:high] = [segment.start for segment in fresh]

    def lose(self, actors: Iterable[int]) -> None:
        """Streams of a device that is lost touch nothing any more: nobody has to come after what they did."""
        self._gone.update(actors)
        for segment in self._segments:
            if segment.writer is not None and segment.writer.actor in self._gone:
                segment.writer = None
            segment.readers = {a: read for a, read in segment.readers.items() if a not in self._gone}

    def begin(self, access: OpenAccess) -> None:
        self._open.append(access)

    def finish(self, access: OpenAccess) -> None:
        self._open.remove(access)

    def forget(self, start: int, end: int) -> None:
        """Drop a range that no longer exists."""
        self._split(start)
        self._split(end)
        low, high = self._first(start), self._first(end)
        del self._segments[low:high]
        del self._starts[low:high]

    def _first(self, address: int) -> int:
        """Index of the first segment that ends after `address`."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or self._segments[index].end <= address:
            index += 1
        return index

    def _split(self, address: int) -> None:
        index = self._first(address)
        if index == len(self._segments) or self._segments[index].start >= address:
            return
        left = self._segments[index]
        right = _Segment(address, left.end, left.writer, dict(left.readers))
        left.end = address
        self._segments.insert(index + 1, right)
        self._starts.insert(index + 1, address)


def _race(start: int, end: int, write: bool, label: str, other_write: bool, other: str, how: str) -> RaceError:
    kinds = {True: "write", False: "read"}
    return RaceError(
        f"{kinds[write]} of {end - start} bytes at {start:#x} by {label!r} races with a {kinds[other_write]} "
        f"by {other!r}, which is {how}; order them with stream.wait(event) or a synchronisation"
    )
