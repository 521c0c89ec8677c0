"""Replaying an allocation log against any resource."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ..driver import Stream
from ..errors import InvalidRequestError, OutOfMemory
from ..sizes import align_up, format_size
from .log import Action, LogEntry
from .requests import ALIGNMENT
from .resource import MemoryResource


class Reserving(Protocol):
    """What can tell how much memory it took, such as a `DevicePool`."""

    @property
    def reserved_peak(self) -> int: ...


@dataclass(frozen=True)
class ReplayReport:
    """What a replay came to.

    Attributes
    ----------
    operations : int
        Allocations and frees.
    refused : int
        Allocations for which there was no memory; their frees are left out.
    live_peak : int
        Most bytes live at once, each allocation a multiple of 256.
    reserved_peak : int or None
        Most bytes that the resource held at once, if it could tell.
    seconds : float
        Wall time of the calls.
    """

    operations: int
    refused: int
    live_peak: int
    reserved_peak: int | None
    seconds: float

    @property
    def fragmentation(self) -> float | None:
        """Bytes held beyond the live peak, as a part of it."""
        if self.reserved_peak is None or self.live_peak == 0:
            return None
        return (self.reserved_peak - self.live_peak) / self.live_peak

    @property
    def operations_per_second(self) -> float:
        return self.operations / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        text = f"{self.operations} operations, {self.operations_per_second:,.0f}/s, {self.refused} refused, "
        text += f"live peak {format_size(self.live_peak)}"
        if self.reserved_peak is not None and self.fragmentation is not None:
            text += f", reserved peak {format_size(self.reserved_peak)}, {self.fragmentation:.1%} fragmentation"
        return text


def replay(
    log: Iterable[LogEntry],
    resource: MemoryResource,
    *,
    scale: float = 1.0,
    reserving: Reserving | None = None,
) -> ReplayReport:
    """Do what a log says, on one thread, with a stream of its own for every one in the log.

    Parameters
    ----------
    log : iterable of LogEntry
        For instance `read_log(path)`.  What it refused is asked for neither.
    resource : MemoryResource
        On any driver; `SizeOnlyDriver` replays logs that are larger than this machine.
    scale : float
        Sizes are multiplied by it.
    reserving : Reserving, optional
        Who tells what was reserved; `resource` itself by default, if it can.

    Notes
    -----
    What is live at the end of the log is given back.

    Raises
    ------
    InvalidRequestError
        `scale` is not a finite number above zero, or the log frees what it did not allocate or
        allocates a number twice.
    """
    if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
        raise InvalidRequestError(f"replay: a scale of {scale!r} is not more than zero and finite")
    steps = [entry for entry in log if entry.action is not Action.REFUSE]
    streams: dict[int, Stream] = {}
    for entry in steps:
        if entry.stream not in streams:
            streams[entry.stream] = resource.driver.create_stream(resource.device)
    try:
        return _Replay(resource, streams, scale).run(steps, reserving)
    finally:
        for stream in streams.values():
            stream.close()


class _Replay:
    def __init__(self, resource: MemoryResource, streams: dict[int, Stream], scale: float) -> None:
        self._resource = resource
        self._streams = streams
        self._scale = scale
        self._live: dict[int, tuple[int, int, Stream]] = {}
        self._refused: set[int] = set()
        self._used = 0
        self._peak = 0
        self._operations = 0

    def run(self, steps: list[LogEntry], reserving: Reserving | None) -> ReplayReport:
        refused = 0
        start = time.perf_counter()
        try:
            for entry in steps:
                if entry.action is Action.ALLOCATE:
                    refused += not self._allocate(entry)
                else:
                    self._free(entry)
            seconds = time.perf_counter() - start
        finally:
            for ptr, nbytes, stream in self._live.values():
                self._resource.deallocate(ptr, nbytes, stream=stream)
        teller = self._resource if reserving is None else reserving
        reserved = getattr(teller, "reserved_peak", None)
        return ReplayReport(self._operations, refused, self._peak, reserved, seconds)

    def _allocate(self, entry: LogEntry) -> bool:
        if entry.id in self._live or entry.id in self._refused:
            raise InvalidRequestError(f"replay: the log allocates number {entry.id} twice")
        nbytes = max(1, round(entry.nbytes * self._scale))
        stream = self._streams[entry.stream]
        try:
            ptr = self._resource.allocate(nbytes, stream=stream)
        except OutOfMemory:
            self._refused.add(entry.id)
            return False
        self._live[entry.id] = (ptr, nbytes, stream)
        self._operations += 1
        self._used += align_up(nbytes, ALIGNMENT)
        self._peak = max(self._peak, self._used)
        return True

    def _free(self, entry: LogEntry) -> None:
        if entry.id in self._refused:
            self._refused.remove(entry.id)
            return
        found = self._live.pop(entry.id, None)
        if found is None:
            raise InvalidRequestError(f"replay: the log frees number {entry.id}, which is not live")
        ptr, nbytes, _ = found
        self._resource.deallocate(ptr, nbytes, stream=self._streams[entry.stream])
        self._operations += 1
        self._used -= align_up(nbytes, ALIGNMENT)
