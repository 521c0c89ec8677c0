"""What must be waited for before bytes are read or written again."""

from __future__ import annotations

from ..driver import Event, Stream


class Hazards:
    """The last writes to some bytes, and the reads since, as events of the streams that did them.

    Streams wait with `before`; the calling host thread with `host_before_read` and `host_before_write`.
    """

    def __init__(self) -> None:
        self._writes: dict[Stream, Event] = {}
        self._reads: dict[Stream, Event] = {}

    def before(self, stream: Stream, *, writes: bool) -> None:
        """Let `stream` wait until it may read the bytes, or write them."""
        for event in (self.last_uses if writes else self._writes).values():
            stream.wait(event)

    def wrote(self, stream: Stream, event: Event) -> None:
        self._writes = {stream: event}
        self._reads = {}

    def has_read(self, stream: Stream, event: Event) -> None:
        self._reads[stream] = event

    def host_before_read(self) -> None:
        _settle(self._writes)
        self._writes.clear()

    def host_before_write(self) -> None:
        _settle(self.last_uses)
        self._writes.clear()
        self._reads.clear()

    @property
    def last_uses(self) -> dict[Stream, Event]:
        """Events after which nobody uses the bytes any more: every reader has waited for the writes."""
        return dict(self._reads or self._writes)


def _settle(events: dict[Stream, Event]) -> None:
    for event in events.values():
        if not event.query():
            event.synchronize()
