"""What has gone over the links of other devices: how much, and whether all of it has come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memferry_allocator import Direction, DriverError, Event, Stream

from .errors import TransferFailedError
from .runs import PathShare


@dataclass(frozen=True)
class HelperUse:
    """What a helper has done for an engine so far.

    Attributes
    ----------
    device : int
        The helper.
    bytes_in, bytes_out : int
        Carried for the engine's device, into its memory and out of it.
    staging_nbytes : int
        Memory of the helper that the engine holds now.
    """

    device: int
    bytes_in: int
    bytes_out: int
    staging_nbytes: int


class Borrowed:
    """The helpers' shares of an engine's transfers.  The engine's lock is held round every call."""

    def __init__(self) -> None:
        self._carried: dict[tuple[int, Direction], int] = {}
        self._last: dict[Stream, Event] = {}  # of each helper's streams: it covers what came before it

    def note(self, direction: Direction, shares: Iterable[PathShare]) -> None:
        """Count what was submitted to helpers."""
        for share in shares:
            helper = share.path.helper
            if helper is None or not share.nbytes:
                continue
            key = helper, direction
            self._carried[key] = self._carried.get(key, 0) + share.nbytes
            for event in share.ended:
                stream = event.recorded[0]
                if stream is not None:
                    self._last[stream] = event

    def carried(self, helper: int, direction: Direction) -> int:
        """Bytes so far."""
        return self._carried.get((helper, direction), 0)

    def require_arrived(self) -> None:
        """Find out whether a helper was lost with bytes on their way.

        Raises
        ------
        TransferFailedError
            One was.  It is told once.
        """
        lost: dict[int, str] = {}
        for stream, event in list(self._last.items()):
            try:
                if event.query():
                    del self._last[stream]
            except DriverError as error:
                del self._last[stream]
                lost.setdefault(stream.device, str(error))
        for helper, reason in lost.items():
            raise TransferFailedError(
                f"device {helper}, a helper, was lost ({reason}): what it carried last may not have come; copy "
                "all of it once more, which other ways will do"
            )
