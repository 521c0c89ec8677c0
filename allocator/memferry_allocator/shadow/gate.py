"""Which streams a view may begin and end on."""

from __future__ import annotations

from ..driver import Driver, Stream, require_stream
from ..errors import CaptureError, DeviceLostError, DriverError, InvalidRequestError
from .lock import overrides


class StreamGate:
    """Refuses streams before anything is changed: foreign, closed, or being captured into a graph.

    The end of a view is an event of its streams.  One that is recorded in a capture tells nothing to anybody
    outside, so that views neither begin nor end there.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._is_capturing = driver.is_capturing if overrides(driver, "is_capturing") else None

    def admit(self, stream: object) -> Stream:
        """`stream`, if a view may begin on it."""
        found = stream
        if found.__class__ is not Stream or found.device != self._device:  # so that what is right costs no call
            found = require_stream(stream, self._device)
        if found.driver is not self._driver:
            raise InvalidRequestError(
                f"stream: it is of another driver ({found.driver.name}); make one with this space's driver"
            )
        if self._is_capturing is not None and self._is_capturing(found):
            raise CaptureError(
                "stream: it is being captured into a graph; begin and end views outside the capture, and keep "
                "them open as long as the graph is run"
            )
        return found

    def ending(self, streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
        """Those of a view's streams whose work may not be over."""
        if self._is_capturing is None:
            return streams
        closed = set()
        for stream in streams:
            try:
                captured = self._is_capturing(stream)
            except DriverError as error:
                if error.code != "CUDA_ERROR_INVALID_HANDLE" and not over(error):
                    raise
                closed.add(stream)  # when its work was over
                continue
            if captured:
                raise CaptureError(
                    "release: a stream of the view is being captured into a graph; release it after the capture"
                )
        return tuple(stream for stream in streams if stream not in closed) if closed else streams


def over(error: DriverError) -> bool:
    """Whether an error says that the device is lost or its driver closed: no work is left to wait for."""
    return isinstance(error, DeviceLostError) or error.code == "CUDA_ERROR_DEINITIALIZED"
