"""What the calls of a driver take and give: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Span(NamedTuple):
    """``nbytes`` bytes from address ``ptr``, a host address or a device pointer."""

    ptr: int
    nbytes: int


@dataclass(frozen=True)
class DeviceInfo:
    """What a device is; nothing in it changes while the process lives."""

    ordinal: int
    name: str
    uuid: str
    capacity: int
    pci_address: str | None
    numa_node: int | None
    compute_capability: tuple[int, int] | None
    capabilities: dict[str, int] = field(default_factory=dict)


class MemoryInfo(NamedTuple):
    """Bytes free and in total on a device."""

    free: int
    total: int


class PageKind(Enum):
    """Where physical pages of a virtual range lie."""

    DEVICE = "device"
    HOST = "host"  # on a NUMA node of the host, reached by the device over its link


@dataclass(frozen=True)
class PageLocation:
    """A place for physical pages: a device by its ordinal, or a NUMA node of the host."""

    kind: PageKind
    ordinal: int = 0


class CaptureMode(Enum):
    """Which calls a capture forbids meanwhile, as in CUDA: to everybody, to the capturing thread, to nobody."""

    GLOBAL = "global"
    THREAD_LOCAL = "thread-local"
    RELAXED = "relaxed"
