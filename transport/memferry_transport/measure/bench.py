"""A measuring bench: devices, memory, and the stopwatch that all cases use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from memferry_allocator import Driver, Event, InvalidRequestError, Stream

from ..calibration import Calibration
from .buffers import Buffers
from .hold import Plug
from .options import MeasureOptions


@dataclass(frozen=True)
class Load:
    """What is enqueued on one stream, and timed on it.

    Attributes
    ----------
    stream : Stream
    enqueue : callable
        Enqueues one copy, or whatever is measured.
    times : int
        How often it is called for a sample.
    """

    stream: Stream
    enqueue: Callable[[], object]
    times: int


class Bench:
    """Measures work on streams; a context manager, which waits and gives everything back.  Not thread-safe.

    Parameters
    ----------
    driver : Driver
    devices : sequence of int
        The devices that take part.
    options : MeasureOptions, optional
    machine : str
        What a calibration made here counts for.

    Raises
    ------
    InvalidRequestError
        No device, one twice, or one that does not exist.
    """

    def __init__(
        self, driver: Driver, devices: Sequence[int], options: MeasureOptions | None = None, *, machine: str = ""
    ) -> None:
        self.driver = driver
        self.machine = machine
        self.devices = tuple(devices)
        self.options = options or MeasureOptions()
        count = driver.device_count
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise InvalidRequestError(f"devices: {list(devices)} names none, or one twice")
        if any(not 0 <= device < count for device in self.devices):
            raise InvalidRequestError(
                f"devices: {list(devices)} are not all there; this machine has 0 … {count - 1}"
            )
        self.buffers = Buffers(driver, self.options.largest)
        self._plug: Plug | None = None
        self._calibration: Calibration | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is under way and give memory and streams back."""
        self.driver.synchronize_all()
        self.buffers.close()

    def calibration(self) -> Calibration:
        """What the ways of the bench's devices cost: as given with `use`, else measured now, once."""
        if self._calibration is None:
            from .calibrate import calibrate_on  # which measures on a bench

            self._calibration = calibrate_on(self)
        return self._calibration

    def use(self, calibration: Calibration) -> None:
        """Decide by a calibration that was made earlier."""
        self._calibration = calibration

    @property
    def calibrated(self) -> Calibration | None:
        """The calibration, if there is one yet."""
        return self._calibration

    def seconds(self, loads: Sequence[Load], *, hold: bool = True) -> list[list[float]]:
        """Run `loads` at once, as often as the options say.

        Each sample: all streams are held back, the loads are enqueued in turns, each between two events of its
        stream, and the streams are let go together.  A sample whose streams were let go too early is taken again.
        One run comes before that and is not counted.

        Parameters
        ----------
        loads : sequence of Load
        hold : bool
            False for what blocks the calling thread until it is done, as copies of pageable memory may.

        Returns
        -------
        list of list of float
            For each load its samples: seconds of one `Load.enqueue`, by the device's clock.
        """
        samples: list[list[float]] = [[] for _ in loads]
        for number in range(-1, self.options.samples):
            elapsed = self._sample(loads, hold=hold)
            if number >= 0:
                for load, kept, seconds in zip(loads, samples, elapsed, strict=True):
                    kept.append(seconds / load.times)
        return samples

    def _sample(self, loads: Sequence[Load], *, hold: bool) -> list[float]:
        plug = self._plug = self._plug or Plug(self.driver, self.devices[0], self.buffers)
        events = [[self.driver.create_event(load.stream.device, timing=True) for _ in range(2)] for load in loads]
        while True:
            if hold:
                plug.hold([load.stream for load in loads])
            try:
                self._enqueue(loads, events)
                held = not hold or plug.held()
            finally:  # whatever went wrong: the bytes are touched again soon
                for load in loads:
                    load.stream.synchronize()
            if held:
                return [end.elapsed_since(start) for start, end in events]

    @staticmethod
    def _enqueue(loads: Sequence[Load], events: Sequence[Sequence[Event]]) -> None:
        """All loads, in turns, each between its two events."""
        for load, (start, _) in zip(loads, events, strict=True):
            load.stream.record(start)
        for turn in range(max(load.times for load in loads)):
            for load, (_, end) in zip(loads, events, strict=True):
                if turn < load.times:
                    load.enqueue()
                if turn == load.times - 1:
                    load.stream.record(end)
