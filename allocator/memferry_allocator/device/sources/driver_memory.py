"""Plain device memory: one driver allocation a block."""

from __future__ import annotations

from typing import ClassVar

from ...driver import Stream
from .base import Source


class DriverMemory(Source):
    """`Driver.malloc` and `Driver.free`.

    Giving back blocks the calling thread until the stream's work is done, as the driver's own free would.
    Slow (tens of microseconds to milliseconds a call): put a pool on it.

    Parameters
    ----------
    driver : Driver
    device : int
    """

    name: ClassVar[str] = "driver memory"
    host_ordered = True

    def _take(self, nbytes: int, stream: Stream) -> int:
        return self.driver.malloc(self.device, nbytes)

    def _give(self, ptr: int, stream: Stream) -> None:
        if not stream.query():  # a pool's own stream never has work
            stream.synchronize()
        self.driver.free(self.device, ptr)
