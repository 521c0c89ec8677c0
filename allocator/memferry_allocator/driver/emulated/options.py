"""What an emulated machine is made of."""

from __future__ import annotations

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


_KINDS: dict[str, tuple[type, str]] = {
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "LinkModel": (LinkModel, "a LinkModel"),
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
    """

    device_count: int = 1
    device_memory: int = 64 << 30
    seed: int = 0
    eagerness: float = 0.25
    host_to_device: LinkModel = field(default=LinkModel(10e-6, 55.4e9))
    device_to_host: LinkModel = field(default=LinkModel(10e-6, 55.2e9))
    on_device: LinkModel = field(default=LinkModel(3e-6, 2.1e12))
    peer: LinkModel = field(default=LinkModel(10e-6, 391e9))

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
