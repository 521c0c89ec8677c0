"""Where an iteration's time goes: marks on the compute stream, read once they are passed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from memferry_allocator import Driver, Event, Stream

MOST = 1 << 14  # stalls kept of an iteration that does not end


@dataclass(frozen=True)
class IterationTimes:
    """One iteration on the compute stream, from one `step` to the next, in seconds; the parts make `total`.

    Attributes
    ----------
    busy : float
        What is left: kernels of forward, backward and updates of resident layers, and gaps between them.
    update : float
        Waiting for weights whose update was not over.
    copy : float
        Waiting for weights that were on their way, and for gradients to leave.
    step : float
        In ``optimizer.step()``.
    """

    total: float = 0.0
    busy: float = 0.0
    update: float = 0.0
    copy: float = 0.0
    step: float = 0.0

    @property
    def exposed(self) -> float:
        """What training waits for: everything but `busy`."""
        return self.update + self.copy + self.step

    @property
    def busy_share(self) -> float:
        """Of the whole; 0 where nothing was timed."""
        return self.busy / self.total if self.total else 0.0


@dataclass(frozen=True)
class _Stall:
    begin: Event
    end: Event
    updating: float


class StallMeter:
    """Times what the compute stream waits for.  On the emulated device, by its virtual clock.

    Parameters
    ----------
    driver : Driver
    device : int
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        self._device = device
        self._boundary: Event | None = None
        self._submitted: Event | None = None
        self._stalls: deque[_Stall] = deque(maxlen=MOST)
        self.last = IterationTimes()

    def mark(self, stream: Stream) -> Event:
        """The present point of a stream."""
        return stream.record(self._driver.create_event(self._device, timing=True))

    def stalled(self, begin: Event, stream: Stream, updating: float) -> None:
        """`stream` has waited since `begin`, for an update at most `updating` seconds of it."""
        self._stalls.append(_Stall(begin, self.mark(stream), updating))

    def wait(self, stream: Stream, copied: Event) -> None:
        """Let `stream` wait for a copy, and take the time."""
        begin = self.mark(stream)
        stream.wait(copied)
        self.stalled(begin, stream, 0.0)

    def submitted(self, stream: Stream) -> None:
        """Everything of a step is on its way."""
        self._submitted = self.mark(stream)

    def iteration(self, stream: Stream) -> None:
        """A step begins: block until `stream` has come here, and sum up what was since the last one."""
        before, self._boundary = self._boundary, self.mark(stream)
        self._boundary.synchronize()
        stalls = list(self._stalls)
        self._stalls.clear()
        submitted, self._submitted = self._submitted, None
        if before is None or before.recorded[0] is not stream:
            return
        total = self._boundary.elapsed_since(before)
        update = copy = 0.0
        for stall in stalls:
            if stall.end.recorded[0] is stream:
                seconds = stall.end.elapsed_since(stall.begin)
                update += min(seconds, stall.updating)
                copy += max(0.0, seconds - stall.updating)
        inside = submitted is not None and submitted.recorded[0] is stream
        step = submitted.elapsed_since(before) if submitted is not None and inside else 0.0
        self.last = IterationTimes(total, total - update - copy - step, update, copy, step)
