"""One way's part of one transfer, while it is submitted and afterwards."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from memferry_allocator import DeviceLostError, DriverError, Event, Stream

from .carriers import Carrier
from .paths import Path
from .pieces import Piece, slices


@dataclass(frozen=True)
class PathShare:
    """What one way carried, or carries, of a transfer.

    Attributes
    ----------
    path : Path
    nbytes, slices, copies : int
        Bytes, the pieces they were cut into, and the driver copies that took.
    predicted_s : float or None
        Seconds that the engine counted on; None without a cost.
    started : Event or None
        Before the first byte, if times are taken.
    ended : tuple of Event
        After the last byte on each stream of the way.
    """

    path: Path
    nbytes: int
    slices: int
    copies: int
    predicted_s: float | None = None
    started: Event | None = None
    ended: tuple[Event, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the share is there.

        Raises
        ------
        DriverError
            Its device is lost.
        """
        return all(event.query() for event in self.ended)

    @property
    def measured_s(self) -> float | None:
        """Seconds from the first byte to the last; None as long as it is under way, or if no times are taken."""
        if self.started is None or not self.ended:
            return None
        try:
            return max(event.elapsed_since(self.started) for event in self.ended) if self.done else None
        except DriverError:  # of a device that is gone nothing can be measured any more
            return None

    def __str__(self) -> str:
        text = f"{self.path}: {self.nbytes} bytes in {self.slices} pieces"
        for name, seconds in (("predicted", self.predicted_s), ("measured", self.measured_s)):
            if seconds is not None:
                text += f", {name} {seconds * 1e3:.3f} ms"
        return text


class Run:
    """Carries one way's share.  The engine's lock is held round every call.

    Parameters
    ----------
    path : Path
    carrier : Carrier
    begin : Event
        What the way's streams come after.
    timed : bool
        Take times.
    predicted_s : float or None
    """

    def __init__(
        self, path: Path, carrier: Carrier, begin: Event, *, timed: bool, predicted_s: float | None = None
    ) -> None:
        self.path = path
        self.todo: deque[Piece] = deque()
        self.sent: list[Piece] = []
        self.error: DriverError | None = None
        self.carrier = carrier
        self.begin = begin
        self._after = [begin]
        self._timed = timed
        self._predicted_s = predicted_s
        self._streams: list[Stream] = []
        self._started: Event | None = None
        self._ended: tuple[Event, ...] | None = None

    def take(self, pieces: Iterable[Piece], slice_bytes: int | None = None) -> None:
        """Line up `pieces`, cut to what the way carries at once, or less."""
        size = slice_bytes or self.carrier.slice_bytes
        self.todo.extend(pieces if size is None else slices(pieces, size))

    def follow(self, events: Iterable[Event]) -> None:
        """Let what is submitted from now on come after `events` too."""
        for event in events:
            self._after.append(event)
            for stream in self._streams:
                stream.wait(event)

    def submit(self) -> None:
        """Submit all of it, to a way of one stream."""
        stream = self.carrier.next_stream()
        with stream.driver.several_calls(stream.device):
            while self.todo:
                self.step()

    def step(self) -> Stream:
        """Submit the next piece, and tell on which stream."""
        stream = self.carrier.next_stream()
        if stream not in self._streams:
            for event in self._after:
                stream.wait(event)
            if self._timed and self._started is None:
                self._started = stream.record(stream.driver.create_event(stream.device, timing=True))
            self._streams.append(stream)
        self.carrier.submit(self.todo[0])
        self.sent.append(self.todo.popleft())
        self._ended = None
        return stream

    def fail(self, error: DriverError) -> list[Piece]:
        """Give the share up after an error: the pieces that are to go some other way.

        Of a device that is lost nothing can be relied on, not even what was submitted before.
        """
        self.error = _without_frames(error)
        left = list(self.todo)
        self.todo.clear()
        if isinstance(error, DeviceLostError):
            left = self.sent + left
            self.sent = []
        return left

    def end(self) -> tuple[Event, ...]:
        """Events behind everything submitted so far; none of a device that is lost."""
        if self._ended is None:
            events: list[Event] = []
            for stream in self._streams:
                with contextlib.suppress(DeviceLostError) if self.error else contextlib.nullcontext():
                    events.append(stream.record(stream.driver.create_event(stream.device, timing=self._timed)))
            self._ended = tuple(events)
        return self._ended

    def note_loss(self) -> None:
        """Count a device that is lost by now as an error of the way; what it has carried, it has carried."""
        try:
            self.end()
        except DeviceLostError as error:
            self.error = _without_frames(error)

    def share(self) -> PathShare:
        return PathShare(
            self.path,
            sum(piece.nbytes for piece in self.sent),
            len(self.sent),
            len(self.sent) * self.carrier.hops,
            self._predicted_s,
            self._started,
            self.end(),
        )


def _without_frames(error: DriverError) -> DriverError:
    """The error alone: the frames it has come through hold what callers have in variables, such as tensors."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
