"""A driver as somebody else's package would have it: the emulated one under another name, with less, or broken."""

from __future__ import annotations

from typing import Any

from memferry_allocator import (
    Driver,
    DriverOutOfMemory,
    EmulatedDriver,
    EmulatedOptions,
    Stream,
    UnsupportedError,
)
from memferry_allocator.driver import PageLocation


class Plain(EmulatedDriver):
    """Without virtual memory and graphs."""

    name = "plain"

    def malloc(self, device: int, nbytes: int) -> int:
        try:
            return super().malloc(device, nbytes)
        except DriverOutOfMemory as error:
            error.budget = f"{self.name}:{device}"
            raise

    def page_granularity(self, location: PageLocation) -> int:
        raise self._unsupported("virtual memory management")

    def begin_capture(self, *_: Any, **__: Any) -> None:
        raise self._unsupported("graph capture")


class Broken(Plain):
    """Whose fills write something else."""

    name = "broken"

    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        super().fill(ptr, value ^ 1, nbytes, stream=stream)


class Unwilling(Plain):
    """That refuses what no driver may."""

    name = "unwilling"

    def malloc(self, device: int, nbytes: int) -> int:
        raise UnsupportedError("malloc: not here")


def _open(kind: type[EmulatedDriver]) -> Driver:
    return kind(EmulatedOptions(device_count=2, device_memory=1 << 30, eagerness=0.3))


def open_plain() -> Driver:
    return _open(Plain)


def open_broken() -> Driver:
    return _open(Broken)


def open_unwilling() -> Driver:
    return _open(Unwilling)
