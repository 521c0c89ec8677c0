"""The virtual clock: when work would have run, from links given as plain data."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Protocol

from .memory import Kind, Place
from .options import EmulatedOptions, LinkModel, Route


class Carrier(Protocol):
    """Whatever a copy is carried by."""

    def reserve(self, ready: float, nbytes: int) -> float:
        """The time at which a transfer that could start at `ready` is done."""


class Line:
    """Something that is busy at times."""

    def __init__(self) -> None:
        self._busy: list[tuple[float, float]] = []

    def settle(self, now: float) -> None:
        """Forget what ended before `now`: nothing can start in the past."""
        self._busy = [span for span in self._busy if span[1] > now]


class Shared(Line):
    """What several links share, at so many bytes per second together."""

    def __init__(self, bytes_per_second: float) -> None:
        super().__init__()
        self.bytes_per_second = bytes_per_second

    def reserve(self, ready: float, nbytes: int) -> float:
        """The time at which it has carried a transfer that could start at `ready`, in all gaps from then on."""
        left, at = nbytes / self.bytes_per_second, ready
        taken = []
        for begin, end in self._busy:
            if begin > at:
                if begin - at >= left:
                    break
                taken.append((at, begin))
                left -= begin - at
            at = max(at, end)
        taken.append((at, at + left))
        self._busy = _merged([*self._busy, *taken])
        return at + left


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


class Link(Line):
    """One direction of a link: one transfer at a time, each in the first gap that holds it.

    A transfer takes its time on the link, and its time on each thing that the link shares with others, from
    its own start on; it is done when all of them are done with it.  So a transfer alone runs at the rate of
    the slowest of them, nothing ever carries more than it can, and nothing idles while it is waited for.
    What was enqueued first has the first claim on what is shared; what comes later takes what that leaves,
    where a real one would divide itself between them.  Slices enqueued in turn come out as if it did.
    """

    def __init__(self, model: LinkModel, shared: Sequence[Shared] = ()) -> None:
        super().__init__()
        self.model = model
        self._shared = tuple(shared)

    def reserve(self, ready: float, nbytes: int) -> float:
        """The time at which a transfer that could start at `ready` is done."""
        seconds = self.model.seconds(nbytes)
        start = ready
        # Spans are disjoint, and so their ends are in order too: those that are over by `ready` do not matter.
        first = bisect.bisect_right(self._busy, ready, key=lambda span: span[1])
        for begin, end in self._busy[first:]:
            if start + seconds <= begin:
                break
            start = max(start, end)
        bisect.insort(self._busy, (start, start + seconds))
        flowing = start + self.model.latency_s
        return max(start + seconds, *(each.reserve(flowing, nbytes) for each in self._shared), 0.0)


class Staged:
    """Two links, one after the other: how a driver copies between devices without a link, by way of the host."""

    def __init__(self, first: Link, second: Link) -> None:
        self._first, self._second = first, second

    def reserve(self, ready: float, nbytes: int) -> float:
        return self._second.reserve(self._first.reserve(ready, nbytes), nbytes)


class Across:
    """Links that a kernel reads and writes by at the same time: as fast as the slowest, after all their starts."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = tuple(links)

    def reserve(self, ready: float, nbytes: int) -> float:
        starts = sum(link.model.latency_s for link in self._links)
        return max(link.reserve(ready, nbytes) + starts - link.model.latency_s for link in self._links)


class Links:
    """The links of a machine: each device to and from the host, each device in itself, and between peers."""

    def __init__(self, options: EmulatedOptions) -> None:
        wiring = options.wired()
        shared = {name: Shared(rate) for name, rate in wiring.shared.items()}

        def link(route: Route) -> Link:
            return Link(route.link, [shared[name] for name in route.shared])

        self._h2d = [link(route) for route in wiring.host_to_device]
        self._d2h = [link(route) for route in wiring.device_to_host]
        self._local = [Link(options.on_device) for _ in range(options.device_count)]
        self._peer = {pair: link(route) for pair, route in wiring.peer.items()}
        self._all: tuple[Line, ...] = (
            *self._h2d,
            *self._d2h,
            *self._local,
            *self._peer.values(),
            *shared.values(),
        )

    def connected(self, device: int, peer: int) -> bool:
        """Whether two devices have a link of their own."""
        return (device, peer) in self._peer

    def between(self, source: Place, target: Place) -> Carrier | None:
        """The link that a copy takes; None for one that stays in host memory, which takes no time.

        What lies partly on the host goes at the pace of the host's link.
        """
        if source.kind is Kind.DEVICE and target.kind is Kind.DEVICE:
            if source.device == target.device:
                return self._local[source.device]
            return self._between_devices(source.device, target.device)
        if target.kind is Kind.DEVICE or (target.kind is Kind.PAGED and source.kind is not Kind.DEVICE):
            return self._h2d[target.device]
        return self._d2h[source.device] if source.kind in (Kind.DEVICE, Kind.PAGED) else None

    def across(self, device: int, source: Place, target: Place) -> Carrier:
        """The links by which a kernel of `device` copies: its own, whoever's memory it is."""
        links: list[Link] = []
        for place, host, peer in (
            (source, self._h2d[device], (source.device, device)),
            (target, self._d2h[device], (device, target.device)),
        ):
            if place.kind is not Kind.DEVICE:
                links.append(host)
            elif place.device != device:
                links.append(self._peer[peer])
        return Across(links or [self._local[device]])

    def filling(self, device: int, target: Place) -> Carrier:
        """The link by which `device` sets bytes of `target`."""
        if target.kind is not Kind.DEVICE:
            return self._d2h[device]
        return self._local[device] if target.device == device else self._between_devices(device, target.device)

    def _between_devices(self, source: int, target: int) -> Carrier:
        known = self._peer.get((source, target))
        return Staged(self._d2h[source], self._h2d[target]) if known is None else known

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
