"""Until when somebody may still be using free memory."""

from __future__ import annotations

from typing import Any

from ..driver import Driver, Event, Stream
from ..errors import DriverError
from .requests import CLOSED, captured


class Mark:
    """A point in a stream's work behind which memory is free, or one that the host has waited for.

    For an owned stream the event is recorded only when somebody else wants the memory: later than the use,
    which is safe, and free of charge where nobody does.  A borrowed stream may be gone by then, so that its
    event is there from the beginning.

    Parameters
    ----------
    driver : Driver
    stream : Stream, optional
        Whose work it is; None for memory that the host has waited for.
    event : Event, optional
        Where it was recorded already.
    token : optional
        What the thread that waited knows (`Driver.publish`).
    """

    __slots__ = ("_closed", "driver", "event", "stream", "token")

    def __init__(
        self, driver: Driver, stream: Stream | None, event: Event | None = None, token: Any = None
    ) -> None:
        self.driver = driver
        self.stream = stream
        self.event = event
        self.token = token
        self._closed = False

    @property
    def open(self) -> bool:
        """Whether its event is still to be recorded: it covers all that its stream gets until then."""
        return self.event is None and self.stream is not None and not self._closed

    @property
    def reachable(self) -> bool:
        """Whether its end can be told: not while a stream whose event is still missing is being captured."""
        return not self.open or self.stream is None or not captured(self.driver, self.stream)

    def before(self, stream: Stream) -> None:
        """Order `stream` behind it."""
        if self.stream is stream:
            return
        self._record()
        if self.event is not None:
            stream.wait(self.event)
        elif self.token is not None:
            self.driver.observe(self.token)

    def settle(self) -> None:
        """Block the calling thread until it is reached."""
        self._record()
        if self.event is not None:
            with self.driver.beside_captures():
                self.event.synchronize()
        elif self.token is not None:
            self.driver.observe(self.token)

    def _record(self) -> None:
        if self.open:
            assert self.stream is not None
            try:
                self.event = self.stream.record()
            except DriverError as error:
                if error.code != CLOSED:
                    raise
                self._closed = True  # an owned stream is closed when its work is done
                self.token = self.driver.publish()
