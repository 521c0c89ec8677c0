"""A copy on one stream in the order of another: the path of every small copy, in one piece.

Made of the calls that the seam has for it, each with its own checks, it would cost the host three times as much.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..handles import Event, Stream
from .core import CLOSED
from .errors import SUCCESS, require_size
from .library import Answers
from .order_calls import OrderCalls
from .work_calls import WorkCalls


class BesideCalls(OrderCalls, WorkCalls):
    """What is checked and made current once for several calls."""

    def copy_beside(
        self, pieces: Sequence[tuple[int, int, int]], *, stream: Stream, lane: Stream, begin: Event
    ) -> Event:
        device = lane.device
        if stream is lane or stream.device != device or self._addresses is not None:
            return super().copy_beside(pieces, stream=stream, lane=lane, begin=begin)
        if self._library.beside is not None and len(pieces) == 1 and pieces[0][2] > 0:
            return self._copy_in_two_calls(*pieces[0], stream, lane, begin)
        consumer, carrier, first = self._stream(stream), self._stream(lane), self._event(begin)
        end, answers, library = self.create_event(device), self._answers, self._library
        pushed = self._make_current(device, answers)
        try:
            self._record_on(begin, first, stream, consumer)
            code = library.cuStreamWaitEvent(carrier, first, 0)
            if code != SUCCESS:
                raise self._error(device, code, "stream_wait")
            lane.knows(begin)
            try:
                for dst, src, nbytes in pieces:
                    if nbytes > 0:
                        code = library.cuMemcpyAsync(dst, src, nbytes, carrier)
                        if code != SUCCESS:
                            raise self._error(device, code, "copy", f"{nbytes} bytes from {src:#x} to {dst:#x}")
                    elif nbytes < 0:
                        require_size("copy", nbytes)
            finally:
                last = end.handle
                self._record_on(end, last, lane, carrier)
                code = library.cuStreamWaitEvent(consumer, last, 0)
                if code != SUCCESS:
                    raise self._error(device, code, "stream_wait")
                stream.knows(end)
        finally:
            if pushed:
                library.cuCtxPopCurrent_v2(answers.context)
        return end

    def _copy_in_two_calls(
        self, dst: int, src: int, nbytes: int, stream: Stream, lane: Stream, begin: Event
    ) -> Event:
        """The same with the compiled part.  Each call is under the lock of the stream that it records on."""
        device, beside, answer = lane.device, self._library.beside, self._answers.beside
        consumer, carrier, first = self._stream(stream), self._stream(lane), self._event(begin)
        if self._lost or device not in self._contexts:
            self._on(device)
        context, end = self._contexts[device], self.create_event(device)
        recordings = stream.recordings
        with recordings.lock:
            if stream.handle is CLOSED:  # meanwhile; nobody closes it from here on
                self._stream(stream)
            before = recordings.last
            told = beside.begin(beside.table, context, consumer, first, answer)
            if told and answer.code != SUCCESS:
                raise self._error(device, answer.code, beside.CALLS[answer.call])
            if told or not begin.recorded_on(stream, before):
                begin.captured()  # or a finaliser has recorded meanwhile: it stays without a number
        recordings, last, numbered = lane.recordings, end.handle, False
        with recordings.lock:
            if lane.handle is CLOSED:
                self._stream(lane)
            before = recordings.last
            told = beside.copy(beside.table, context, carrier, first, dst, src, nbytes, last, consumer, answer)
            code = answer.code if told else SUCCESS
            if told and answer.captured:
                end.captured()
            elif not told or answer.recorded:
                numbered = end.recorded_on(lane, before)
                if not numbered:  # a finaliser has recorded meanwhile, who knows in what order
                    with self._on(device):
                        self._record_on(end, last, lane, carrier)
        if code != SUCCESS:
            call = beside.CALLS[answer.call]
            raise self._error(device, code, call, f"{nbytes} bytes from {src:#x} to {dst:#x}")
        lane.knows(begin)
        if numbered:
            stream.knows(end)
        return end

    def _make_current(self, device: int, answers: Answers) -> bool:
        """Make a device's context current; whether it was pushed, and is to be popped."""
        if self._lost or device not in self._contexts:
            self._on(device)  # which tells what is wrong, or makes one
        context, current, library = self._contexts[device], answers.context, self._library
        if library.cuCtxGetCurrent(current) == SUCCESS and current[0] == context:
            return False
        code = library.cuCtxPushCurrent_v2(context)
        if code != SUCCESS:
            raise self._error(device, code, "push context")
        return True
