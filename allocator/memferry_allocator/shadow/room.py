"""The device memory of a space: its budget, and who makes room when it is full."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..device import DevicePool
from ..device.resource import MemoryResource
from ..driver import Event, Span, Stream
from ..errors import DriverError, InvalidRequestError, OutOfMemory
from ..sizes import format_size
from .copies import DeviceCopy
from .eviction import EvictionPolicy
from .gate import over

if TYPE_CHECKING:
    from .copies import Copies
    from .partition import Partition


class Room:
    """Where device copies lie, and which of them are idle: not in use, not pinned, free to go.

    Used under the space's lock.

    Parameters
    ----------
    pool : DevicePool or MemoryResource
    budget : int
        Most bytes that are taken of it, the pool's alignment included.
    policy : EvictionPolicy
    whole : bool
        The pool is a `DevicePool` of exactly the budget; others may take of it too.
    """

    def __init__(
        self, pool: DevicePool | MemoryResource, budget: int, policy: EvictionPolicy, *, whole: bool
    ) -> None:
        self.pool: Any = pool
        self._whole = whole
        self.budget = budget
        self.taken = 0
        self.gone = False  # the device is lost, or its driver closed; the pool still counts what went with it
        self.idle: OrderedDict[Copies, int] = OrderedDict()  # the least recently used first; bytes of each
        self.idle_bytes = 0
        self._owners: dict[int, Copies] = {}
        self.policy = policy

    @property
    def policy(self) -> EvictionPolicy:
        return self._policy

    @policy.setter
    def policy(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self.used: Callable[[Partition], None] | None = getattr(policy, "used", None)

    def rest(self, partition: Copies) -> None:
        """A copy is idle from now on, as the most recently used."""
        self.idle[partition] = partition.reserved
        self.idle_bytes += partition.reserved

    def wake(self, partition: Copies) -> None:
        """A copy is not idle, if it was."""
        self.idle_bytes -= self.idle.pop(partition, 0)

    def allocate(self, partition: Copies, stream: Stream) -> DeviceCopy:
        """Memory for a partition's copy, usable in `stream`'s order; idle copies make room if they must.

        Raises
        ------
        OutOfMemory
            Even without the idle copies there is not enough (nothing was evicted then), or not in one piece.
        """
        nbytes = partition.reserved
        while True:
            refusal = None
            used = self.pool.used if self._whole else self.taken
            free = self.budget - used
            if free >= nbytes:
                try:
                    return self._take(partition, stream)
                except OutOfMemory as error:  # not in one piece, or the resource has less than the budget
                    refusal = error
            # Without the idle copies there would be enough bytes, in one piece or not; or nothing is evicted.
            favourite = self._choose(self.idle) if free + self.idle_bytes >= nbytes else None
            if favourite is None:
                if partition.space.reap():
                    continue
                raise refusal or self._out_of_memory(partition, used)
            if favourite.reserved == nbytes:
                copy = favourite._hand_over(stream)
                self._owners[copy.span.ptr] = partition
                if copy.span.nbytes != partition.nbytes:
                    copy.span = Span(copy.span.ptr, partition.nbytes)
                return copy
            self._make_room(nbytes, favourite)

    def deallocate(
        self, copy: DeviceCopy, partition: Copies, *, stream: Stream, uses: Mapping[Stream, Event]
    ) -> None:
        """Give memory back whose last uses were recorded in `uses`; `stream` may be made to wait for them."""
        ptr = copy.span.ptr
        try:
            if isinstance(self.pool, DevicePool):
                self.pool.deallocate(ptr, partition.reserved, stream=stream, uses=uses)
            else:
                for event in uses.values():
                    stream.wait(event)
                self.pool.deallocate(ptr, partition.reserved, stream=stream)
        except DriverError as error:  # the memory went with its device
            if not over(error):
                raise
            self.gone = True
        del self._owners[ptr]
        self.taken -= partition.reserved

    def abandon(self, copy: DeviceCopy, partition: Copies, stream: Stream) -> dict[Stream, Event]:
        """Give memory back that was allocated for `stream` a moment ago, and whose use failed; its last uses."""
        try:
            uses = {stream: stream.record()}
        except DriverError:  # a closed stream has no work any more
            uses = {}
        self.deallocate(copy, partition, stream=stream, uses=uses)
        return uses

    def _take(self, partition: Copies, stream: Stream) -> DeviceCopy:
        ptr = int(self.pool.allocate(partition.reserved, stream=stream))  # whole blocks may change hands
        self._owners[ptr] = partition
        self.taken += partition.reserved
        return DeviceCopy(Span(ptr, partition.nbytes))

    def _out_of_memory(self, partition: Copies, used: int) -> OutOfMemory:
        return OutOfMemory(
            f"device budget: {partition.name} needs {format_size(partition.reserved)}; of "
            f"{format_size(self.budget)}, {format_size(used)} are in use and {format_size(self.idle_bytes)} "
            "could be evicted; release or unpin something, or raise device_budget",
            size=partition.reserved,
            used=used,
            limit=self.budget,
            budget="device budget",
        )

    def _make_room(self, nbytes: int, favourite: Copies) -> None:
        """Evict what lets `nbytes` come free in one piece, or at least the favourite."""
        enough = favourite.reserved >= nbytes
        for victim in [favourite] if enough else self._neighbours(nbytes) or [favourite]:
            victim._give_up()

    def _neighbours(self, nbytes: int) -> list[Copies]:
        """Idle copies side by side that make room together.

        The policy's favourites are collected until some of them do; no other copy goes.  What lies between
        copies is taken to be free: where it is not, the request fails again, and more copies go.
        """
        remaining, chosen = self.idle.copy(), set[Any]()
        places = sorted(self._owners)
        while remaining:
            victim = self._choose(remaining)
            if victim is None:
                break
            del remaining[victim]
            chosen.add(victim)
            found = self._smallest_run(places, bisect_left(places, victim.copy_address), chosen, nbytes)
            if found:
                return found
        return []

    def _smallest_run(self, places: list[int], middle: int, chosen: set[Any], nbytes: int) -> list[Copies]:
        """Of the runs of chosen copies round the one in the middle that make room, that with the fewest bytes."""
        owners = [self._owners[place] for place in places]
        first, fewest = middle, -1
        best: list[Copies] = []
        while first > 0 and owners[first - 1] in chosen:
            first -= 1
        last = middle
        for start in range(first, middle + 1):
            while self._freed(places, start, last) < nbytes:
                last += 1
                if last == len(places) or owners[last] not in chosen:
                    return best
            size = sum(owner.reserved for owner in owners[start : last + 1])
            if fewest < 0 or size < fewest:
                best, fewest = owners[start : last + 1], size
        return best

    def _freed(self, places: list[int], start: int, last: int) -> int:
        """Bytes in one piece when the copies from `start` to `last` are gone."""
        low, high = places[start], places[last] + self._owners[places[last]].reserved
        if start > 0:
            low = places[start - 1] + self._owners[places[start - 1]].reserved
        if last + 1 < len(places):
            high = places[last + 1]
        return high - low

    def _choose(self, candidates: OrderedDict[Copies, int]) -> Copies | None:
        victim = self._policy.victim(candidates.keys())  # type: ignore[arg-type]  # every `Copies` is a `Partition`
        if victim is not None and victim not in candidates:
            raise InvalidRequestError(
                f"eviction policy {type(self._policy).__name__}: it chose {victim!r}, which is none of the "
                f"{len(candidates)} candidates; return one of them, or None"
            )
        return victim
