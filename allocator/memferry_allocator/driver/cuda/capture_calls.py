"""Graph capture, and working beside it."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cu

from ..api import CaptureMode, Stream
from .core import CudaCore
from .errors import SUCCESS, error_of
from .library import Answers

_MODES = {
    CaptureMode.GLOBAL: cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
    CaptureMode.THREAD_LOCAL: cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CaptureMode.RELAXED: cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
}
_RELAXED = int(_MODES[CaptureMode.RELAXED])


class CaptureCalls(CudaCore):
    """Beginning and ending captures, and working beside them."""

    def begin_capture(self, stream: Stream, mode: CaptureMode = CaptureMode.GLOBAL) -> None:
        handle = self._stream(stream)
        with self._on(stream.device):
            result = cu.cuStreamBeginCapture(handle, _MODES[CaptureMode(mode)])
            self._check(stream.device, "begin_capture", result)
        self._captured[int(handle)] = stream

    def end_capture(self, stream: Stream) -> None:
        handle = self._stream(stream)
        with self._on(stream.device):
            result = cu.cuStreamEndCapture(handle)
            if result[0] != cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
                self._captured.pop(int(handle), None)  # also where it was broken: it ends all the same
            graph = self._check(stream.device, "end_capture", result)
            self._check(stream.device, "destroy graph", cu.cuGraphDestroy(graph))

    def capture_under_way(self) -> bool:
        return bool(self._captured)

    def beside_captures(self) -> Beside:
        self._known(0)
        return Beside(self._library, self._answers)


class Beside:
    """The calling thread's calls neither heed captures nor harm them until the end."""

    __slots__ = ("_answers", "_before", "_library")

    def __init__(self, library: Any, answers: Answers) -> None:
        self._library = library
        self._answers = answers
        self._before = _RELAXED

    def __enter__(self) -> None:
        self._before = self._exchange(_RELAXED)

    def __exit__(self, *_: object) -> None:
        self._exchange(self._before)

    def _exchange(self, mode: int) -> int:
        """Set the thread's way with captures, and return what it was."""
        answer = self._answers.mode
        answer[0] = mode
        code = self._library.cuThreadExchangeStreamCaptureMode(answer)
        if code != SUCCESS:
            raise error_of(code, "beside_captures")
        return int(answer[0])
