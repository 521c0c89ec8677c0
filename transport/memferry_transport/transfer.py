"""A transfer under way."""

from __future__ import annotations

from enum import Enum

from memferry_allocator import Direction, DriverError, Event, Stream

from .errors import TransferFailedError
from .runs import PathShare


class TransferStatus(Enum):
    """How far a transfer is.  The destination may be used again once it is none of the first two."""

    QUEUED = "not all submitted"
    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self not in (TransferStatus.QUEUED, TransferStatus.UNDER_WAY)


class Transfer:
    """Bytes on their way, and the event after which they are there.

    Thread-safe.

    Attributes
    ----------
    direction : Direction or None
        None: from device to device.
    nbytes : int
        Bytes of all regions together.
    predicted_s : float or None
        Seconds that the engine counted on for several ways and their joining; None for a plain copy.
    """

    __slots__ = ("_event", "_over", "_pieces", "_ways", "direction", "nbytes", "predicted_s")

    def __init__(
        self,
        direction: Direction | None,
        nbytes: int,
        pieces: int,
        event: Event | None,
        ways: tuple[PathShare, ...] = (),
        *,
        over: str = "direct path",
        predicted_s: float | None = None,
    ) -> None:
        self.direction = direction
        self.nbytes = nbytes
        self._pieces = pieces
        self._event = event
        self._ways = ways
        self._over = over
        self.predicted_s = predicted_s

    @property
    def event(self) -> Event:
        """Recorded behind the last piece: the destination may be read, and reused, from then on."""
        assert self._event is not None
        return self._event

    @property
    def pieces(self) -> int:
        """Driver copies it took.

        Regions are cut where registrations end, and into slices, of two copies each, where they go over a helper.
        """
        return self._pieces

    @property
    def ways(self) -> tuple[PathShare, ...]:
        """What each way carries, where there are several; empty for a plain copy."""
        return self._ways

    def wait(self, stream: Stream) -> None:
        """Order what `stream` gets from now on behind the transfer."""
        stream.wait(self.event)

    def synchronize(self) -> None:
        """Block the calling thread until the bytes are there.

        Raises
        ------
        TransferFailedError
            A helper was lost while its share was under way; copy once more.
        """
        self.event.synchronize()
        self._lost()

    @property
    def done(self) -> bool:
        """Whether the bytes are there; does not block.

        Raises
        ------
        TransferFailedError
            As for `synchronize`.
        """
        return not self._lost() and self.event.query()

    @property
    def status(self) -> TransferStatus:
        """How far it is; does not block."""
        try:
            return TransferStatus.DONE if self.done else TransferStatus.UNDER_WAY
        except TransferFailedError:
            return TransferStatus.FAILED

    def cancel(self) -> bool:
        """Submit no more of it; whether that left anything out.

        A transfer that `TransferEngine.copy` has returned is submitted, or done: it goes on to its end.
        """
        return False

    def explain(self) -> str:
        """Which way the bytes went: in one line, and one more for each way if there are several."""
        name = "d2d" if self.direction is None else self.direction.value
        if not self._ways:
            return f"{self.nbytes} bytes {name} over the {self._over} in {self.pieces} driver copies"
        first = f"{self.nbytes} bytes {name} over {len(self._ways)} paths in {self.pieces} driver copies"
        return "\n  ".join([first, *map(str, self._ways)])

    def _lost(self) -> bool:
        """False; raises if a way's device is gone."""
        for way in self._ways:
            try:
                for event in way.ended:
                    event.query()
            except DriverError as error:
                raise TransferFailedError(
                    f"{self.nbytes} bytes {'' if self.direction is None else self.direction.value}: the "
                    f"{way.nbytes} bytes {way.path} are not all there ({error}); copy once more"
                ) from error
        return False
