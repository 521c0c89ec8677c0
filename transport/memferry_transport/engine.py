"""The transfer engine: copies between host and device, off the compute stream, in its order."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from memferry_allocator import Direction, Driver, Span, Stream, registrations
from memferry_allocator.driver import require_stream

from .errors import InvalidTransferError
from .transfer import Transfer


class TransferEngine:
    """Moves bytes between host memory and one device, each direction on a stream of its own.

    A transfer asked for on a consumer's stream starts after what that stream already holds, and what the
    stream gets later starts after the transfer; beside it, the stream's kernels and the other direction's
    copies go on.  A `memferry_allocator.Copier`.  Thread-safe.

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
        self._moved = dict.fromkeys(Direction, 0)
        self._lock = threading.Lock()

    def lane(self, direction: Direction) -> Stream:
        """The stream that carries a direction; a transfer asked for on it needs no events around it."""
        return self._inward if direction is Direction.HOST_TO_DEVICE else self._outward

    @property
    def bytes_moved(self) -> dict[Direction, int]:
        """Bytes submitted so far, by direction."""
        return dict(self._moved)

    def copy(self, dst: Span, src: Span, direction: Direction, *, stream: Stream) -> Transfer:
        """Copy one region.

        Parameters
        ----------
        dst, src : Span
            Of equal size; the host side's pages must be registered.
        direction : Direction
        stream : Stream
            Whose order the transfer joins.

        Raises
        ------
        InvalidTransferError
            Sizes differ, or host pages are not registered; nothing was copied.
        DriverError, RaceError
            The driver refused a piece.  Pieces before it may be under way; what `stream` gets later comes
            after them, so that both ranges may be used again in its order.
        """
        return self.copy_regions([(dst, src)], direction, stream=stream)

    def copy_regions(
        self, regions: Sequence[tuple[Span, Span]], direction: Direction, *, stream: Stream
    ) -> Transfer:
        """Copy many ``(dst, src)`` regions as one transfer.  Parameters and errors as for `copy`."""
        require_stream(stream, self.device)
        if not isinstance(direction, Direction):
            raise InvalidTransferError(f"copy: {direction!r} is not a Direction")
        pieces = [piece for dst, src in regions for piece in self._pieces(dst, src, direction)]
        lane = self.lane(direction)
        nbytes = sum(size for _, _, size in pieces)
        with self._lock:
            if stream is not lane:
                lane.wait(stream.record())
            try:
                for to, of, size in pieces:
                    self.driver.copy(to, of, size, stream=lane)
            finally:
                event = lane.record()
                if stream is not lane:
                    stream.wait(event)
            self._moved[direction] += nbytes
        return Transfer(direction, nbytes, len(pieces), event)

    def close(self) -> None:
        """Wait for the transfers under way and give the streams back; a second call does nothing."""
        self._inward.close()
        self._outward.close()

    def _pieces(self, dst: Span, src: Span, direction: Direction) -> list[tuple[int, int, int]]:
        """A region as driver copies: none may cross the edge of a registration."""
        if dst.nbytes != src.nbytes or dst.nbytes < 0:
            raise InvalidTransferError(
                f"{direction.value} copy: source has {src.nbytes} bytes and destination {dst.nbytes}; "
                "give two ranges of one size"
            )
        host = src if direction is Direction.HOST_TO_DEVICE else dst
        known = self._registered
        if not known.covers(host.ptr, host.nbytes):
            raise InvalidTransferError(
                f"{direction.value} copy: the {host.nbytes} host bytes at {host.ptr:#x} are not all registered; "
                "take them from a HostArena, or register them with registrations(driver).register"
            )
        return [
            (dst.ptr + piece.ptr - host.ptr, src.ptr + piece.ptr - host.ptr, piece.nbytes)
            for piece in known.split(host.ptr, host.nbytes)
        ]
