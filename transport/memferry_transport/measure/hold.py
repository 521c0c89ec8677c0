"""Keeping streams back until all their work is enqueued, so that what enqueuing costs is not measured."""

from __future__ import annotations

from collections.abc import Sequence

from memferry_allocator import Driver, Event, Stream

from .buffers import Buffers
from .errors import NotRunError

PLUG_BYTES = 256 << 20  # of a fill: far longer than it takes to enqueue one, whatever the size that is measured
_MOST_FILLS = 1024


def has_virtual_clock(driver: Driver) -> bool:
    """Whether a driver's times are computed from its links: they stand still while work is enqueued."""
    return driver.name == "emulated"


class Plug:
    """A stream with so many fills of device memory on it that everything else is enqueued meanwhile.

    Every measured stream waits for the last fill.  A fill takes no link between host and device, ends by itself,
    and needs no kernel; unlike a kernel that spins until the host releases it, it cannot lock up a device whose
    queue is full.  Whether it was long enough is asked afterwards, with `held`.

    Parameters
    ----------
    driver : Driver
    device : int
        Whose memory is filled; streams of other devices may wait for it too.
    buffers : Buffers
    """

    def __init__(self, driver: Driver, device: int, buffers: Buffers) -> None:
        self._virtual = has_virtual_clock(driver)
        self._driver = driver
        self._nbytes = min(PLUG_BYTES, buffers.nbytes) if self._virtual else PLUG_BYTES
        self._ptr = buffers.device(device, "plug", self._nbytes)
        self._stream = buffers.stream(device, "plug")
        self._fills = 1 if self._virtual else 16
        self._last: Event | None = None

    def hold(self, streams: Sequence[Stream]) -> None:
        """Keep `streams` back from now on, for a while."""
        for _ in range(self._fills):
            self._driver.fill(self._ptr, 0, self._nbytes, stream=self._stream)
        self._last = self._stream.record()
        for stream in streams:
            stream.wait(self._last)

    def held(self) -> bool:
        """Whether the streams are still kept back; if not, the next `hold` is four times as long.

        Raises
        ------
        NotRunError
            It cannot be longer: more does not fit in a device's queue.
        """
        if self._virtual:
            return True
        if self._last is None or not self._last.query():
            return True
        if self._fills >= _MOST_FILLS:
            raise NotRunError("it began before all of it was enqueued: something in it waits for the device")
        self._fills *= 4
        return False
