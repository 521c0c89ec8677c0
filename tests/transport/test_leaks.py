"""Nothing is left over after many transfers: no event, no stream, no staging memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from memferry_allocator import EmulatedDriver, EmulatedOptions, Event, Span, Stream
from memferry_transport import Fault, FaultKind, FaultyDriver

from ..allocator.machine import address
from .fleet import IN, OUT, Fleet, calibrated


class Counting(EmulatedDriver):
    """Counts events that are alive, streams that are open, and device memory that is taken."""

    def __init__(self, options: EmulatedOptions) -> None:
        super().__init__(options)
        self.events: weakref.WeakSet[Event] = weakref.WeakSet()
        self.open_streams = self.taken = 0

    def create_event(self, device: int, *, timing: bool = False) -> Event:
        event = super().create_event(device, timing=timing)
        self.events.add(event)
        return event

    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        self.open_streams += 1
        return super().create_stream(device, priority=priority)

    def destroy_stream(self, stream: Stream) -> None:
        self.open_streams -= not stream.handle.closed
        super().destroy_stream(stream)

    def counts(self) -> tuple[int, int, int, int]:
        gc.collect()
        used = sum(memory.used for memory in self._memory.devices)
        return len(self.events), self.open_streams, used, self.registered


def run(fleet: Fleet, count: int, other: int) -> None:
    """Transfers of all kinds: over several ways, plain, and between devices."""
    small = Span(fleet.ptr, 50), Span(address(fleet.home), 50)
    for number in range(count):
        kind = number % 8
        if kind == 0:
            fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
        elif kind == 1:
            fleet.engine.copy(*fleet.ends(OUT), OUT, stream=fleet.stream)
        elif kind == 2:
            fleet.engine.copy(Span(other, 300), Span(fleet.ptr, 300), stream=fleet.stream)
        else:
            fleet.engine.copy(*small, IN, stream=fleet.stream)
        if number % 16 == 0:
            fleet.stream.synchronize()
    fleet.stream.synchronize()


@pytest.mark.parametrize("mode", ["quota", "queue"])
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_nothing_is_left_over(count: int, mode: str) -> None:
    driver = Counting(EmulatedOptions(device_count=3))
    fleet = Fleet(driver, 1000, calibration=calibrated(3), mode=mode)
    other = fleet.machine.device(300, 1)
    before = driver.counts()
    run(fleet, 40, other)
    within = driver.counts()
    run(fleet, count, other)
    after = driver.counts()
    assert after[1:] == within[1:]
    assert after[0] <= within[0] + 20  # the last few are watched, and those that streams came after last
    fleet.engine.close()
    del fleet.engine
    left = driver.counts()
    assert left[1:] == (before[1] - 2, before[2], before[3])  # the engine's own two lanes
    fleet.machine.close()


def test_nothing_is_left_over_after_faults() -> None:
    driver = Counting(EmulatedOptions(device_count=3))
    faulty = FaultyDriver(driver)
    fleet = Fleet(faulty, 1000, calibration=calibrated(3), adaptive=False)
    before: Any = None
    for number in range(60):
        fleet.clock.now += 1000  # type: ignore[attr-defined]
        faulty.arm(Fault(FaultKind.FAIL, first=number % 30, count=1 + number % 3))
        try:
            fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).synchronize()
        except Exception:  # every way may have failed
            fleet.stream.synchronize()
        if number == 30:
            before = driver.counts()
    after = driver.counts()
    assert after[1:] == before[1:]
    assert after[0] <= before[0] + 20
    faulty.arm()
    fleet.close()
