"""Streams, events, and what they put in order."""

from __future__ import annotations

import weakref

from cuda.bindings import driver as cu

from ...errors import DriverError, UnsupportedError
from ..handles import Event, Stream, recordings_so_far
from .core import CLOSED, CudaCore
from .errors import NOT_READY, SUCCESS

_NON_BLOCKING, _DISABLE_TIMING = 1, 2
_PER_THREAD = 2  # a name for another stream in every thread
_LEGACY = (0, 1)  # the default stream's names: it cannot be captured, and asking it breaks captures of others


class _Lent(weakref.ref[Event]):
    """Keeps the handle of an event that is gone for the next one: no driver call happens in a finaliser."""

    __slots__ = ("handle", "lent", "spare")

    handle: int
    spare: list[int]
    lent: set[_Lent]


def _take_back(gone: _Lent) -> None:
    gone.lent.discard(gone)
    gone.spare.append(gone.handle)


class OrderCalls(CudaCore):
    """Streams and events."""

    # -- streams ------------------------------------------------------------------------------------
    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        with self._on(device):
            result = cu.cuStreamCreateWithPriority(_NON_BLOCKING, priority)
            handle = int(self._check(device, "create_stream", result))
        return Stream(self, device, handle, owned=True)

    def stream_from_handle(self, device: int, handle: int) -> Stream:
        if handle == _PER_THREAD:
            raise UnsupportedError(
                "stream_from_handle: the per-thread default stream is another one in every thread; pass a created "
                "stream"
            )
        self._context(device)
        return Stream(self, device, int(handle), owned=False)

    def destroy_stream(self, stream: Stream) -> None:
        if self._forked or not stream.owned:
            return
        with self._lock:
            if stream.handle is CLOSED or self._closed:
                return
            handle = self._stream(stream)
            if handle in self._captured and stream.device not in self._lost:
                code = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
                raise DriverError(code, "destroy_stream", "end the capture first")
        lost = stream.device in self._lost
        if not lost:  # first: whoever finds a stream closed takes its work for done
            with self._on(stream.device):
                self._check(stream.device, "synchronize", cu.cuStreamSynchronize(handle))
        with stream.recordings.lock, self._lock:  # a pool of another thread may be recording on it
            if stream.handle is CLOSED:  # by another thread, meanwhile
                return
            object.__setattr__(stream, "handle", CLOSED)
        if not lost:
            with self._on(stream.device):
                self._check(stream.device, "destroy_stream", cu.cuStreamDestroy(handle))

    def stream_wait(self, stream: Stream, event: Event) -> None:
        handle, other = self._stream(stream), self._event(event)
        if event.recorded[1] == 0:
            return
        code = self._answer(stream.device, self._library.cuStreamWaitEvent, handle, other, 0)
        if code != SUCCESS:
            raise self._error(stream.device, code, "stream_wait")

    def stream_synchronize(self, stream: Stream) -> None:
        handle = self._stream(stream)
        number = recordings_so_far()
        code = self._answer(stream.device, self._library.cuStreamSynchronize, handle)
        if code != SUCCESS:
            raise self._error(stream.device, code, "stream_synchronize")
        stream.over(number)

    def stream_query(self, stream: Stream) -> bool:
        handle = self._stream(stream)
        code = self._answer(stream.device, self._library.cuStreamQuery, handle)
        return self._done(stream.device, "stream_query", code)

    def is_capturing(self, stream: Stream) -> bool:
        # Every operation of a pool asks: what is right costs a few comparisons and one call.
        if self._forked or self._closed or stream.__class__ is not Stream or stream.driver is not self:
            self._stream(stream)
        handle = stream.handle
        if handle is CLOSED:
            self._stream(stream)
        if handle in _LEGACY:
            return False
        status, ask = self._answers.status, self._library.cuStreamIsCapturing
        if ask(handle, status) != SUCCESS:
            code = self._answer(stream.device, ask, handle, status)  # a thread that has no context may need one
            if code != SUCCESS:
                raise self._error(stream.device, code, "is_capturing")
        return status[0] != 0  # type: ignore[no-any-return]  # cffi has no types

    # -- events -------------------------------------------------------------------------------------
    def create_event(self, device: int, *, timing: bool = False) -> Event:
        known = self._timed_events if timing else self._events
        spare = known.get(device)
        if spare is None or self._forked or self._closed:
            self._known(device)
            spare = known.setdefault(device, [])
        try:
            handle = spare.pop()
        except IndexError:
            with self._on(device):
                result = cu.cuEventCreate(0 if timing else _DISABLE_TIMING)
                handle = int(self._check(device, "create_event", result))
        event = Event(self, device, handle, timing)
        lent = _Lent(event, _take_back)  # a third of what `weakref.finalize` takes
        lent.handle, lent.spare, lent.lent = handle, spare, self._lent
        self._lent.add(lent)
        return event

    def event_record(self, event: Event, stream: Stream) -> None:
        handle, other = self._stream(stream), self._event(event)
        with self._on(stream.device):
            self._record_on(event, other, stream, handle)

    def _record_on(self, event: Event, other: int, stream: Stream, handle: int) -> None:
        """Record and number an event; the device's context is current.

        One recording at a time on a stream, so that the sequence is the stream's own order.
        """
        library, recordings, status = self._library, stream.recordings, self._answers.status
        with recordings.lock:
            if stream.handle is CLOSED:  # meanwhile; nobody closes it from here on
                self._stream(stream)
            while True:
                last = recordings.last
                code = library.cuEventRecord(other, handle)
                if code != SUCCESS:
                    raise self._error(stream.device, code, "event_record")
                if handle in _LEGACY:
                    captured = False
                elif library.cuStreamIsCapturing(handle, status) == SUCCESS:
                    captured = status[0]
                else:  # it wants a context
                    captured = self.is_capturing(stream)
                if captured:
                    event.captured()
                    return
                if event.recorded_on(stream, last):
                    return

    def event_query(self, event: Event) -> bool:
        handle = self._event(event)
        if event.sequence == 0:  # never recorded, whatever its handle was used for before
            return True
        code = self._answer(event.device, self._library.cuEventQuery, handle)
        return self._done(event.device, "event_query", code)

    def event_synchronize(self, event: Event) -> None:
        handle = self._event(event)
        if event.sequence == 0:
            return
        code = self._answer(event.device, self._library.cuEventSynchronize, handle)
        if code != SUCCESS:
            raise self._error(event.device, code, "event_synchronize")

    def event_elapsed(self, start: Event, end: Event) -> float:
        first, last = self._event(start), self._event(end)
        if start.sequence == 0 or end.sequence == 0:
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event_elapsed", "an event was never recorded")
        with self._on(end.device):
            result = cu.cuEventElapsedTime(first, last)
            return float(self._check(end.device, "event_elapsed", result)) / 1e3

    def _done(self, device: int, call: str, code: int) -> bool:
        if code == SUCCESS:
            return True
        if code == NOT_READY:
            return False
        raise self._error(device, code, call)
