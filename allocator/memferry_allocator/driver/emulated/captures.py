"""The captures under way, and what each of them forbids to whom."""

from __future__ import annotations

import threading

from ...errors import DriverError
from ..api import CaptureMode
from .state import Capture, HostThreads, StreamState


class Captures:
    """All captures of a machine.  The driver's lock is held round every call.

    A forbidden call is refused and breaks the captures that forbid it, as it does on a GPU.
    """

    def __init__(self, threads: HostThreads) -> None:
        self._threads = threads
        self._active: list[Capture] = []

    @property
    def under_way(self) -> bool:
        return bool(self._active)

    def begin(self, state: StreamState, mode: CaptureMode) -> None:
        if state.capture is not None:
            raise DriverError("CUDA_ERROR_ILLEGAL_STATE", "begin_capture", "the stream is being captured already")
        state.capture = Capture(mode, threading.get_ident(), state)
        self._active.append(state.capture)

    def end(self, state: StreamState) -> None:
        capture = state.capture
        if capture is None or capture.origin is not state:
            raise DriverError("CUDA_ERROR_ILLEGAL_STATE", "end_capture", "no capture began on this stream")
        if capture.mode is not CaptureMode.RELAXED and capture.thread != threading.get_ident():
            raise DriverError("CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "end_capture")
        self._active.remove(capture)
        for member in capture.members:
            member.capture = None
        if capture.broken:
            raise DriverError("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "end_capture", capture.broken)

    # -- what is forbidden meanwhile ------------------------------------------------------------------
    def forbid(self, call: str) -> None:
        """Refuse a call that would not be safe beside a capture, unless the thread has said that it is."""
        if not self._active or self._threads.beside:
            return
        me = threading.get_ident()
        self._refuse(
            call,
            [
                capture
                for capture in self._active
                if capture.mode is CaptureMode.GLOBAL
                or (capture.mode is CaptureMode.THREAD_LOCAL and capture.thread == me)
            ],
        )

    def forbid_on(self, state: StreamState, call: str) -> None:
        """Refuse to wait for a captured stream; no mode allows it."""
        if state.capture is not None:
            self._refuse(call, [state.capture])
        self.forbid(call)

    def forbid_device(self, device: int, call: str) -> None:
        """Refuse to wait for a device that has a captured stream; no mode allows it."""
        self._refuse(call, [capture for capture in self._active if capture.origin.device == device])
        self.forbid(call)

    def enqueue(self, state: StreamState, call: str) -> bool:
        """Whether work for `state` is captured, not run."""
        capture = state.capture
        if capture is None:
            return False
        if capture.broken:
            raise DriverError("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", call, capture.broken)
        return True

    def wait(self, state: StreamState, captured: Capture | None) -> bool:
        """Whether a wait of `state` for an event is captured; one for a captured event joins its capture."""
        if captured is not None and captured in self._active and state.capture is None:
            captured.members.append(state)
            state.capture = captured
        if not self.enqueue(state, "stream_wait"):
            return False
        assert state.capture is not None
        if captured is not state.capture:
            state.capture.broken = "stream_wait crossed its edge"
            raise DriverError("CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "stream_wait")
        return True

    @staticmethod
    def _refuse(call: str, captures: list[Capture]) -> None:
        for capture in captures:
            capture.broken = capture.broken or f"{call} was called"
        if captures:
            raise DriverError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", call)
