"""The virtual clock: when work would have run, from links given as plain data."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from .options import LinkModel


class Link:
    """One direction of a link: one transfer at a time, each in the first gap that holds it."""

    def __init__(self, model: LinkModel) -> None:
        self.model = model
        self._busy: list[tuple[float, float]] = []

    def reserve(self, ready: float, nbytes: int) -> float:
        """The time at which a transfer that could start at `ready` is done."""
        seconds = self.model.seconds(nbytes)
        start = ready
        for begin, end in self._busy:
            if start + seconds <= begin:
                break
            start = max(start, end)
        bisect.insort(self._busy, (start, start + seconds))
        return start + seconds

    def settle(self, now: float) -> None:
        """Forget transfers that ended before `now`: nothing can start in the past."""
        self._busy = [span for span in self._busy if span[1] > now]


class VirtualClock:
    """The host's time, which moves when the host waits for a device."""

    def __init__(self) -> None:
        self.now = 0.0

    def ready(self, ends: Iterable[float]) -> float:
        return max(self.now, *ends, 0.0)

    def reach(self, time: float) -> None:
        self.now = max(self.now, time)
