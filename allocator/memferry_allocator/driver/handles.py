"""Streams, events and brackets, as a driver hands them out."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from .api import Driver

_MOST_KNOWN = 64


class Recordings:
    """The recordings on one stream, by one thread at a time.

    A finaliser may record in the middle of another recording of its thread, wherever that is.

    Attributes
    ----------
    lock : RLock
        Held while an event is recorded and numbered.
    last : int
        The number of the last one.
    """

    __slots__ = ("last", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last = 0


@dataclass(frozen=True, eq=False)
class Stream:
    """Work that runs in order on one device; ``int(stream.handle)`` is the driver's own name for it.

    A stream made by `Driver.create_stream` belongs to its creator, who closes it; one taken over with
    `Driver.stream_from_handle` (a framework's own stream) is borrowed and closing it does nothing.
    """

    driver: Driver
    device: int
    handle: Any
    owned: bool
    recordings: Recordings = field(default_factory=Recordings, init=False, repr=False)
    number: int = field(default_factory=itertools.count(1).__next__, init=False, repr=False)  # of its own for ever
    _aware: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # of recordings, by `number`

    def wait(self, event: Event) -> None:
        """Order everything enqueued here from now on after what `event` has recorded.

        What is ordered already costs nothing: an event of this very stream, one of a stream for whose later
        event this one has waited before, or one before the last `synchronize` of its stream.
        """
        if self.driver._forked:
            self.driver.require_usable()
        try:
            origin, sequence = event.recorded
        except AttributeError:
            raise _no_event(event) from None
        if origin is self:
            return
        if origin is not None:
            other = origin.number
            if self._aware.get(other, 0) >= sequence or origin._aware.get(other, 0) >= sequence:
                return
        self.driver.stream_wait(self, event)
        self.knows(event)

    def knows(self, event: Event) -> None:
        """Note that what is enqueued here from now on comes after what `event` has recorded; for drivers."""
        origin, sequence = event.recorded
        if origin is not None:
            if len(self._aware) >= _MOST_KNOWN:  # of streams long gone; forgetting one costs a wait too many
                self._aware.clear()
            self._aware[origin.number] = sequence

    def over(self, number: int) -> None:
        """Note that the host has waited for all recordings up to a number: nobody need wait for them any more.

        For drivers; the emulated one keeps account of which thread knows that.
        """
        if number > self._aware.get(self.number, 0):
            self._aware[self.number] = number

    def record(self, event: Event | None = None) -> Event:
        """Record what has been enqueued so far, in `event` or a new one, and return it."""
        if event is None:
            event = self.driver.create_event(self.device)
        elif not isinstance(event, Event):
            raise _no_event(event)
        self.driver.event_record(event, self)
        return event

    def synchronize(self) -> None:
        """Block the calling thread until everything enqueued so far is done."""
        self.driver.stream_synchronize(self)

    def query(self) -> bool:
        """Whether everything enqueued so far is done; does not block."""
        return self.driver.stream_query(self)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which CUDA libraries for Python take each other's streams: its version and the handle.

        Raises
        ------
        UnsupportedError
            The stream is none of CUDA's.
        """
        if self.driver.name != "cuda":
            raise UnsupportedError(f"__cuda_stream__: a stream of the {self.driver.name} driver is none of CUDA's")
        return 0, int(self.handle)

    def close(self) -> None:
        """Destroy an owned stream once its work is done; a second call does nothing."""
        if self.owned:
            self.driver.destroy_stream(self)


class Event:
    """A point in a stream's order.  Its driver handle goes back to the driver when this object dies.

    `recorded` is the stream on which it was recorded last, and the number of that recording, which grows with
    every one in this process: of two events of one stream, the one with the larger number covers the other.
    """

    __slots__ = ("__weakref__", "device", "driver", "handle", "recorded", "timing")

    def __init__(self, driver: Driver, device: int, handle: Any, timing: bool) -> None:
        self.driver = driver
        self.device = device
        self.handle = handle
        self.timing = timing
        self.recorded: tuple[Stream | None, int] = (None, 0)

    @property
    def sequence(self) -> int:
        """The number of its last recording."""
        return self.recorded[1]

    def recorded_on(self, stream: Stream, last: int) -> bool:
        """Note a recording; for drivers, which let no other thread record on that stream meanwhile.

        Parameters
        ----------
        last : int
            ``stream.recordings.last`` from before the recording.

        Returns
        -------
        bool
            False if a finaliser has recorded meanwhile.  Which of the two came first is unknown: record once more.
        """
        number, recordings = next(_sequence), stream.recordings
        if recordings.last != last:
            return False
        recordings.last = number
        self.recorded = (stream, number)
        return True

    def captured(self) -> None:
        """Note a recording into a graph: it is a point in no stream's order, so waiting for it proves nothing."""
        self.recorded = (None, next(_sequence))

    def query(self) -> bool:
        """Whether the recorded work is done; an event never recorded is done."""
        return self.driver.event_query(self)

    def synchronize(self) -> None:
        """Block the calling thread until the recorded work is done."""
        self.driver.event_synchronize(self)

    def elapsed_since(self, earlier: Event) -> float:
        """Seconds on the device between two events made with ``timing=True``, both done."""
        return self.driver.event_elapsed(earlier, self)


class Bracket:
    """The extent of accesses that happen outside the driver's sight; a context manager.

    On a real device it does nothing: the hardware keeps the order.  On the emulated device it runs what
    must have run before, and checks that nothing unordered touches the same bytes until it ends.
    """

    def __enter__(self) -> Bracket:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Close the bracket, from any thread that was handed the bytes; a second call does nothing."""


def recordings_so_far() -> int:
    """A number above those of all recordings so far, and below those of all to come."""
    return next(_sequence)


NO_BRACKET = Bracket()
_sequence = itertools.count(1)


def _no_event(found: object) -> InvalidRequestError:
    return InvalidRequestError(f"event: expected an Event, got {found!r}; stream.record() gives one")


def require_stream(stream: object, device: int | None = None) -> Stream:
    """`stream` if it is one (and on `device`), else a typed error.  None never means the default stream."""
    if not isinstance(stream, Stream):
        raise InvalidRequestError(
            f"stream: expected a memferry_allocator Stream, got {stream!r}; make one with "
            "driver.create_stream(device), or wrap a framework's with driver.stream_from_handle"
        )
    if device is not None and stream.device != device:
        raise InvalidRequestError(f"stream: it is on device {stream.device}, this memory is on device {device}")
    return stream
