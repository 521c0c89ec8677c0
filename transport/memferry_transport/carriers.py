"""What bytes go over: a device's own link, a helper's kernel, or staging buffers between two hops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from memferry_allocator import DeviceLostError, Direction, Driver, Stream

from .pieces import Piece


class Carrier(Protocol):
    """One way's streams.  Not thread-safe: the engine's lock is held round every call."""

    @property
    def hops(self) -> int:
        """Driver copies that a piece takes."""

    @property
    def slice_bytes(self) -> int | None:
        """The longest piece that it takes; None: any."""

    def next_stream(self) -> Stream:
        """The stream of the piece that comes next."""

    def submit(self, piece: Piece) -> None:
        """Enqueue one piece on the stream that `next_stream` has named."""


class DirectLink:
    """One driver copy a piece, of any size, on one stream."""

    hops = 1
    slice_bytes: int | None = None

    def __init__(self, driver: Driver, lane: Stream) -> None:
        self._driver, self._lane = driver, lane

    def next_stream(self) -> Stream:
        return self._lane

    def submit(self, piece: Piece) -> None:
        self._driver.copy(*piece, stream=self._lane)


class KernelRelay:
    """One hop by a kernel of a helper, which reads at one end what it writes at the other: no staging, no slices.

    Parameters
    ----------
    driver : Driver
    device : int
        The helper.
    direction : Direction
    blocks : int
        Thread blocks of a kernel.
    """

    hops = 1
    slice_bytes: int | None = None

    def __init__(self, driver: Driver, device: int, direction: Direction, blocks: int) -> None:
        self._driver, self._inward = driver, direction is Direction.HOST_TO_DEVICE
        self._blocks = blocks
        self._lane = driver.create_stream(device, priority=-1)  # few blocks, which must not wait behind many

    def next_stream(self) -> Stream:
        return self._lane

    def submit(self, piece: Piece) -> None:
        dst, src, nbytes = piece
        if self._inward:
            src = self._driver.host_device_pointer(src, self._lane.device)
        else:
            dst = self._driver.host_device_pointer(dst, self._lane.device)
        self._driver.kernel_copy(dst, src, nbytes, stream=self._lane, blocks=self._blocks)

    def close(self) -> None:
        """Wait for what is under way; a second call does nothing."""
        self._lane.close()


class Relay:
    """Two hops by way of staging buffers, each with a stream of its own, or one for each hop.

    On a buffer's stream the copies into it and out of it alternate, so that stream order alone keeps a slice from
    being overwritten before it has left; that there are two buffers or more keeps both links busy.  Where each hop
    is another device's, events between the two streams do the same.

    Parameters
    ----------
    driver : Driver
    device : int
        Whose streams do it.
    buffers : sequence of int
        Staging memory, at least two, each of `slice_bytes`.
    release : callable
        Gives the buffers back; called once nothing uses them.
    last : int, optional
        The device whose streams do the second hop; by default the same.
    """

    hops = 2
    slice_bytes: int

    def __init__(
        self,
        driver: Driver,
        device: int,
        buffers: Sequence[int],
        slice_bytes: int,
        release: Callable[[], None],
        *,
        last: int | None = None,
    ) -> None:
        self.slice_bytes = slice_bytes
        self._driver = driver
        self._slots: list[tuple[Stream, Stream, int]] = []
        for buffer in buffers:
            stream = driver.create_stream(device)
            other = stream if last in (None, device) else driver.create_stream(last)
            self._slots.append((stream, other, buffer))
        self._turn = 0
        self._release: Callable[[], None] | None = release

    def next_stream(self) -> Stream:
        return self._slots[self._turn][0]

    def submit(self, piece: Piece) -> None:
        stream, other, buffer = self._slots[self._turn]
        self._driver.copy(buffer, piece.src, piece.nbytes, stream=stream)
        if other is not stream:
            other.wait(stream.record())
        try:
            self._driver.copy(piece.dst, buffer, piece.nbytes, stream=other)
        finally:
            if other is not stream:
                stream.wait(other.record())
        self._turn = (self._turn + 1) % len(self._slots)

    def close(self) -> None:
        """Wait for what is under way and give everything back; a second call does nothing."""
        for stream, other, _ in self._slots:
            stream.close()
            other.close()
        release, self._release = self._release, None
        if release is not None:
            release()


def device_relay(driver: Driver, helper: int, count: int, slice_bytes: int) -> Relay:
    """A relay over memory of `helper`.

    Raises
    ------
    DriverError
        It has no room for the buffers, or is gone; nothing is left behind.
    """
    block = driver.malloc(helper, count * slice_bytes)

    def release() -> None:
        with contextlib.suppress(DeviceLostError):  # then its memory is gone as well
            driver.free(helper, block)

    try:
        return Relay(driver, helper, [block + i * slice_bytes for i in range(count)], slice_bytes, release)
    except BaseException:
        release()
        raise
