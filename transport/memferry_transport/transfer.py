"""A transfer under way."""

from __future__ import annotations

from dataclasses import dataclass

from memferry_allocator import Direction, Event, Stream


@dataclass(frozen=True, eq=False)
class Transfer:
    """Bytes on their way, and the event after which they are there.

    Attributes
    ----------
    direction : Direction
    nbytes : int
        Bytes of all regions together.
    pieces : int
        Driver copies it took: regions are cut where registrations end.
    event : Event
        Recorded behind the last piece: the destination may be read, and reused, from then on.
    """

    direction: Direction
    nbytes: int
    pieces: int
    event: Event

    def wait(self, stream: Stream) -> None:
        """Order what `stream` gets from now on behind the transfer."""
        stream.wait(self.event)

    def synchronize(self) -> None:
        """Block the calling thread until the bytes are there."""
        self.event.synchronize()

    @property
    def done(self) -> bool:
        """Whether the bytes are there; does not block."""
        return self.event.query()

    def explain(self) -> str:
        """Which way the bytes went, in one line."""
        return f"{self.nbytes} bytes {self.direction.value} over the direct path in {self.pieces} driver copies"
