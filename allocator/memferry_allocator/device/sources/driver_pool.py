"""The driver's own stream-ordered pool."""

from __future__ import annotations

from typing import ClassVar

from ...driver import Driver, Stream
from .base import Source


class DriverPoolMemory(Source):
    """`Driver.malloc_async` and `Driver.free_async`: the driver keeps the order, nothing blocks.

    Parameters
    ----------
    driver : Driver
    device : int

    Raises
    ------
    UnsupportedError
        The driver or device has no such pools.
    """

    name: ClassVar[str] = "driver pool"

    def __init__(self, driver: Driver, device: int) -> None:
        super().__init__(driver, device)
        self._probe()

    def trim(self, keep: int = 0) -> None:
        """Let the driver give unused memory beyond `keep` bytes back to the device."""
        self.driver.require_usable()
        with self.driver.beside_captures():
            self.driver.trim_pool(self.device, keep)

    def _probe(self) -> None:
        """Ask for a little memory once, so that a driver without pools is refused now and not in the middle."""
        with self.driver.beside_captures():
            stream = self.driver.create_stream(self.device)
            try:
                ptr = self.driver.malloc_async(self.device, 256, stream=stream)
                self.driver.free_async(self.device, ptr, stream=stream)
            finally:
                stream.close()

    def _take(self, nbytes: int, stream: Stream) -> int:
        return self.driver.malloc_async(self.device, nbytes, stream=stream)

    def _give(self, ptr: int, stream: Stream) -> None:
        self.driver.free_async(self.device, ptr, stream=stream)
