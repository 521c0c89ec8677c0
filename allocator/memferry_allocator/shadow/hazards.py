"""What must be waited for before bytes are read or written again."""

from __future__ import annotations

from collections.abc import Collection

from ..driver import Event, Stream

_KEPT = 8  # marks of that many streams are kept for their next use; short-lived streams must not pile up


class Hazards:
    """The last write to some bytes, and the reads since, as events of the streams that did them.

    Streams wait with `before`; the calling host thread with `host_before_read` and `host_before_write`.
    Whoever reads has waited for the write, so that waiting for the readers is waiting for everybody.

    Events that are recorded here are recorded again at the stream's next use: nobody else holds them, waits
    that are enqueued keep waiting for the earlier recording, and a later one covers it for everybody else.
    """

    __slots__ = ("_marks", "_reads", "_write", "_write_mark", "_writer")

    def __init__(self) -> None:
        self._write: Event | None = None
        self._writer: Stream | None = None
        self._reads: dict[Stream, Event] = {}
        self._marks: dict[Stream, Event] = {}
        self._write_mark: Event | None = None

    def before(self, stream: Stream, *, writes: bool) -> None:
        """Let `stream` wait until it may read the bytes, or write them."""
        if writes and self._reads:
            for event in self._reads.values():
                stream.wait(event)
        elif self._write is not None and stream is not self._writer and stream not in self._reads:
            stream.wait(self._write)

    def wrote(self, stream: Stream, event: Event) -> None:
        """Somebody else has recorded the end of a write."""
        self._write, self._writer = event, stream
        if self._reads:
            self._reads = {}

    def has_read(self, stream: Stream, event: Event) -> None:
        """Somebody else has recorded the end of a read."""
        self._reads[stream] = event

    def written_by(self, stream: Stream) -> None:
        """A write ends with what `stream` holds now."""
        mark = self._write_mark
        if mark is None:
            mark = self._write_mark = stream.record()
        else:
            stream.record(mark)
        self.wrote(stream, mark)

    def read_by(self, stream: Stream) -> None:
        """A read ends with what `stream` holds now."""
        mark = self._marks.get(stream)
        if mark is not None:
            stream.record(mark)
        else:
            mark = stream.record()
            if len(self._marks) >= _KEPT:
                self._marks.clear()
            self._marks[stream] = mark
        self._reads[stream] = mark

    def over(self) -> None:
        """Every use has been waited for by the host."""
        self._write = self._writer = None
        self._reads.clear()

    def host_before_read(self) -> None:
        if self._write is not None:
            _settle((self._write,))
            self._write = self._writer = None

    def host_before_write(self) -> None:
        uses = self.last_uses
        if uses:
            _settle(uses.values())
        self.over()

    @property
    def last_uses(self) -> dict[Stream, Event]:
        """Events after which nobody uses the bytes any more: every reader has waited for the write."""
        if self._reads:
            return dict(self._reads)
        if self._write is None or self._writer is None:
            return {}
        return {self._writer: self._write}


def _settle(events: Collection[Event]) -> None:
    for event in events:
        with event.driver.beside_captures():
            if not event.query():
                event.synchronize()
