"""Streams, events, and what they put in order."""

from __future__ import annotations

from ...errors import DriverError
from ..handles import Event, Stream
from .core import EmulatedCore
from .order import join
from .state import EventState


class OrderCalls(EmulatedCore):
    """Streams and events."""

    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        with self._lock:
            state = self._engine.stream(self._device(device))
            self._streams[state.actor] = state
            return Stream(self, device, state, owned=True)

    def stream_from_handle(self, device: int, handle: int) -> Stream:
        with self._lock:
            self._device(device)
            state = self._streams.get(handle)
            if state is None or state.device != device:
                raise DriverError("CUDA_ERROR_INVALID_HANDLE", "stream_from_handle", f"no stream {handle} here")
            return Stream(self, device, state, owned=False)

    def destroy_stream(self, stream: Stream) -> None:
        if self._forked:
            return
        with self._lock:
            if not stream.owned or self._closed or (stream.driver is self and stream.handle.closed):
                return
            if stream.driver is self and stream.device in self._lost:
                stream.handle.closed = True
                return
            state = self._state(stream)
            self._captures.forbid_on(state, "destroy_stream")
            self._engine.reach(state.queue.last, state.clock)
            self._engine.scheduler.remove(state.queue)
            del self._streams[state.actor]
            state.closed = True

    def stream_wait(self, stream: Stream, event: Event) -> None:
        with self._lock:
            state, recorded = self._state(stream), self._event(event)
            if self._captures.wait(state, recorded.capture):
                return
            known = dict(state.clock)
            join(known, recorded.clock)
            state.clock = known
            earlier = () if recorded.work is None else (recorded.work,)
            self._engine.enqueue(state, None, (), after=earlier)

    def stream_synchronize(self, stream: Stream) -> None:
        with self._lock:
            state = self._state(stream)
            self._captures.forbid_on(state, "stream_synchronize")
            self._engine.reach(state.queue.last, state.clock)

    def stream_query(self, stream: Stream) -> bool:
        with self._lock:
            state = self._state(stream)
            self._captures.forbid_on(state, "stream_query")
            return self._engine.poll(state.queue.last, state.clock)

    def create_event(self, device: int, *, timing: bool = False) -> Event:
        return Event(self, self._device(device), EventState(), timing)

    def event_record(self, event: Event, stream: Stream) -> None:
        with self._lock:
            state, recorded = self._state(stream), self._event(event)
            if event.device != state.device:
                raise DriverError(
                    "CUDA_ERROR_INVALID_HANDLE",
                    "event_record",
                    f"an event of device {event.device} on a stream of device {state.device}",
                )
            if self._captures.enqueue(state, "event_record"):
                recorded.capture = state.capture
                event.captured()
                return
            noted = False
            while not noted:
                last = stream.recordings.last
                recorded.work = self._engine.enqueue(state, None, ())
                recorded.clock = state.clock
                recorded.capture = None
                noted = event.recorded_on(stream, last)

    def event_query(self, event: Event) -> bool:
        with self._lock:
            recorded = self._recorded(event, "event_query")
            return self._engine.poll(recorded.work, recorded.clock)

    def event_synchronize(self, event: Event) -> None:
        with self._lock:
            recorded = self._recorded(event, "event_synchronize")
            self._engine.reach(recorded.work, recorded.clock)

    def event_elapsed(self, start: Event, end: Event) -> float:
        with self._lock:
            first, last = self._event(start).work, self._event(end).work
            if start.device != end.device:
                raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event_elapsed", "events of two devices")
            if not (start.timing and end.timing):
                raise DriverError(
                    "CUDA_ERROR_INVALID_HANDLE", "event_elapsed", "make both events with timing=True"
                )
            if first is None or last is None:
                raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event_elapsed", "an event was never recorded")
            if not (first.done and last.done):
                raise DriverError("CUDA_ERROR_NOT_READY", "event_elapsed", "synchronise the events first")
            return last.end - first.end

    def _recorded(self, event: Event, call: str) -> EventState:
        """The state of an event that may be asked whether it is done."""
        recorded = self._event(event)
        if recorded.capture is not None:
            raise DriverError("CUDA_ERROR_CAPTURED_EVENT", call)
        if recorded.work is not None:
            self._captures.forbid(call)
        return recorded
