"""The virtual clock: when work would have run, from links given as plain data."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from .memory import Kind, Place
from .options import EmulatedOptions, LinkModel


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


class Links:
    """The links of a machine: each device to and from the host, each device in itself, and between peers."""

    def __init__(self, options: EmulatedOptions) -> None:
        devices = range(options.device_count)
        self._h2d = [Link(options.host_to_device) for _ in devices]
        self._d2h = [Link(options.device_to_host) for _ in devices]
        self._local = [Link(options.on_device) for _ in devices]
        self._peer = {(a, b): Link(options.peer) for a in devices for b in devices if a != b}
        self._all = (*self._h2d, *self._d2h, *self._local, *self._peer.values())

    def between(self, source: Place, target: Place) -> Link | None:
        """The link that a copy takes; None for one that stays in host memory, which takes no time.

        What lies partly on the host goes at the pace of the host's link.
        """
        if source.kind is Kind.DEVICE and target.kind is Kind.DEVICE:
            if source.device == target.device:
                return self._local[source.device]
            return self._peer[source.device, target.device]
        if target.kind is Kind.DEVICE or (target.kind is Kind.PAGED and source.kind is not Kind.DEVICE):
            return self._h2d[target.device]
        return self._d2h[source.device] if source.kind in (Kind.DEVICE, Kind.PAGED) else None

    def filling(self, device: int, target: Place) -> Link:
        """The link by which `device` sets bytes of `target`."""
        if target.kind is not Kind.DEVICE:
            return self._d2h[device]
        return self._local[device] if target.device == device else self._peer[device, target.device]

    def settle(self, now: float) -> None:
        for link in self._all:
            link.settle(now)


class VirtualClock:
    """The host's time, which moves when the host waits for a device."""

    def __init__(self) -> None:
        self.now = 0.0

    def ready(self, ends: Iterable[float]) -> float:
        return max(self.now, *ends, 0.0)

    def reach(self, time: float) -> None:
        self.now = max(self.now, time)
