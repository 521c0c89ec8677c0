"""Graph capture, as far as refusing what a capture refuses: what is enqueued on a captured stream never runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..api import CaptureMode, Stream
from .core import EmulatedCore


class CaptureCalls(EmulatedCore):
    """Beginning and ending captures, and working beside them."""

    def begin_capture(self, stream: Stream, mode: CaptureMode = CaptureMode.GLOBAL) -> None:
        with self._lock:
            self._captures.begin(self._state(stream), CaptureMode(mode))

    def end_capture(self, stream: Stream) -> None:
        with self._lock:
            self._captures.end(self._state(stream))

    def is_capturing(self, stream: Stream) -> bool:
        return self._state(stream).capture is not None  # no lock: one attribute, read by every allocation

    def capture_under_way(self) -> bool:
        return self._captures.under_way

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        self.require_usable()
        threads = self._engine.threads
        threads.beside += 1
        try:
            yield
        finally:
            threads.beside -= 1
