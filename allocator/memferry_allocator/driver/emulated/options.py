"""What an emulated machine is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from ...errors import InvalidRequestError


@dataclass(frozen=True)
class LinkModel:
    """A link as plain data: a transfer of n bytes takes ``latency_s + n / bytes_per_second``."""

    latency_s: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not isinstance(self.latency_s, Real) or not isinstance(self.bytes_per_second, Real):
            raise InvalidRequestError(f"link: {self} has no two numbers; give seconds, and bytes per second")
        if not self.latency_s >= 0 or not self.bytes_per_second > 0:
            raise InvalidRequestError(f"link: {self} would take no time, or move backwards")

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class Route:
    """What a copy takes: a link of its own, and what it shares with others, by name."""

    link: LinkModel
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wiring:
    """The links of a machine whose devices are not all connected alike.

    Attributes
    ----------
    host_to_device, device_to_host : tuple of Route
        By device.
    peer : mapping of (int, int) to Route
        By source and target; two devices without an entry either way have no peer access.
    shared : mapping of str to float
        Bytes per second that all routes which name it have together.  A switch above several devices is one
        for each direction; a link that is slower both ways at once is one that both directions name.
    """

    host_to_device: tuple[Route, ...]
    device_to_host: tuple[Route, ...]
    peer: Mapping[tuple[int, int], Route] = field(default_factory=dict)
    shared: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, rate in self.shared.items():
            if not isinstance(rate, Real) or not rate > 0:
                raise InvalidRequestError(f"wiring: shared {name!r} has {rate!r} bytes per second")
        for route in (*self.host_to_device, *self.device_to_host, *self.peer.values()):
            if not isinstance(route, Route) or not isinstance(route.link, LinkModel):
                raise InvalidRequestError(f"wiring: {route!r} is not a Route over a LinkModel")
            for name in route.shared:
                if name not in self.shared:
                    raise InvalidRequestError(f"wiring: {name!r} is not in shared; say how much it carries")

    def check(self, device_count: int) -> None:
        """Refuse a wiring of another number of devices."""
        if not len(self.host_to_device) == len(self.device_to_host) == device_count:
            raise InvalidRequestError(
                f"wiring: {len(self.host_to_device)} and {len(self.device_to_host)} routes to and from the host "
                f"for {device_count} devices"
            )
        for source, target in self.peer:
            if not (0 <= source < device_count and 0 <= target < device_count) or source == target:
                raise InvalidRequestError(f"wiring: no peers {source} and {target} among {device_count} devices")
            if (target, source) not in self.peer:
                raise InvalidRequestError(f"wiring: devices {source} and {target} are connected one way only")


_KINDS: dict[str, tuple[Any, str]] = {
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "LinkModel": (LinkModel, "a LinkModel"),
    "Wiring | None": ((Wiring, type(None)), "a Wiring"),
}


@dataclass(frozen=True)
class EmulatedOptions:
    """An emulated machine.

    Attributes
    ----------
    device_count : int
        1 to 8.
    device_memory : int
        Capacity of each device in bytes; host memory is only taken for what is allocated.
    seed : int
        Decides which queued work runs earlier than it must.
    eagerness : float
        Probability, at each opportunity, that the next piece of queued work runs although nothing
        waits for it; 0 runs everything as late as the program allows.  Asking whether work is done waits
        for nothing, but only so often.
    host_to_device, device_to_host, on_device, peer : LinkModel
        Links of the virtual clock; one copy at a time and direction.  The defaults are an H200's.
    wiring : Wiring, optional
        Links device by device, in place of all of the above but `on_device`.
    """

    device_count: int = 1
    device_memory: int = 64 << 30
    seed: int = 0
    eagerness: float = 0.25
    host_to_device: LinkModel = field(default=LinkModel(10e-6, 55.4e9))
    device_to_host: LinkModel = field(default=LinkModel(10e-6, 55.2e9))
    on_device: LinkModel = field(default=LinkModel(3e-6, 2.1e12))
    peer: LinkModel = field(default=LinkModel(10e-6, 391e9))
    wiring: Wiring | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value: Any = getattr(self, entry.name)
            kind, what = _KINDS[str(entry.type)]
            if not isinstance(value, kind):
                raise InvalidRequestError(f"{entry.name}: {value!r} is not {what}")
            if kind is Integral:
                object.__setattr__(self, entry.name, int(getattr(self, entry.name)))  # NumPy's integers wrap round
        if not 1 <= self.device_count <= 8:
            raise InvalidRequestError(f"device_count: {self.device_count} is not 1 to 8")
        if self.device_memory <= 0:
            raise InvalidRequestError(f"device_memory: {self.device_memory} is not more than zero bytes")
        if not 0 <= self.eagerness <= 1:
            raise InvalidRequestError(f"eagerness: {self.eagerness} is not a probability")
        if self.wiring is not None:
            self.wiring.check(self.device_count)

    def wired(self) -> Wiring:
        """The links device by device: as given, or all alike."""
        if self.wiring is not None:
            return self.wiring
        devices = range(self.device_count)
        return Wiring(
            host_to_device=(Route(self.host_to_device),) * self.device_count,
            device_to_host=(Route(self.device_to_host),) * self.device_count,
            peer={(a, b): Route(self.peer) for a in devices for b in devices if a != b},
        )
