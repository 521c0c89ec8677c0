"""Who moves bytes for the shadow space: a protocol, and the plain copy that serves by default."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from ..driver import Driver, Event, Span, Stream
from ..errors import InvalidRequestError
from ..host import registrations


class Direction(Enum):
    """Which way a copy goes between host and device."""

    HOST_TO_DEVICE = "h2d"
    DEVICE_TO_HOST = "d2h"


_INWARD = Direction.HOST_TO_DEVICE


class Completion(Protocol):
    """What a copy gives back: at least the event of its end."""

    @property
    def event(self) -> Event: ...


class Copier(Protocol):
    """Moves bytes in stream order.  `TransferEngine` of the transport is one."""

    def lane(self, direction: Direction) -> Stream:
        """The stream on which this copier's copies of a direction are ordered."""

    def copy(self, dst: Span, src: Span, direction: Direction, *, stream: Stream) -> Completion:
        """Enqueue a copy as if on `stream`: after what is there already, before what comes later."""


class DirectCopy:
    """A copy by the device's own link, done when its event is."""

    def __init__(self, event: Event) -> None:
        self.event = event


class DirectCopier:
    """One stream a direction, one driver copy a registered range.

    Parameters
    ----------
    driver : Driver
    device : int
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self._inward, self._outward = driver.create_stream(device), driver.create_stream(device)
        self._registered = registrations(driver)

    def lane(self, direction: Direction) -> Stream:
        return self._inward if direction is _INWARD else self._outward

    def copy(self, dst: Span, src: Span, direction: Direction, *, stream: Stream) -> DirectCopy:
        """See `Copier.copy`.  The bytes move on the lane of `direction`, whatever `stream` is."""
        if dst.nbytes != src.nbytes:
            raise InvalidRequestError(f"copy: source has {src.nbytes} bytes and destination {dst.nbytes}")
        inward = direction is _INWARD
        lane, host = (self._inward, src) if inward else (self._outward, dst)
        if stream is not lane:
            lane.wait(stream.record())
        try:
            for start, nbytes in self._registered.pieces(host):
                offset = start - host.ptr
                self.driver.copy(dst.ptr + offset, src.ptr + offset, nbytes, stream=lane)
        finally:  # also if a piece is refused: what comes later must come after those before it
            event = lane.record()
            if stream is not lane:
                stream.wait(event)
        return DirectCopy(event)

    def close(self) -> None:
        """Wait for the copies under way and give the streams back; a second call does nothing."""
        self._inward.close()
        self._outward.close()
