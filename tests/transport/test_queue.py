"""Transfers from a queue: any way may take any slice, and the bytes are there when the call returns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import Direction, EmulatedDriver, EmulatedOptions, RaceError, Span, Stream
from memferry_transport import (
    Fault,
    FaultKind,
    FaultyDriver,
    LinearCost,
    TransferCancelledError,
    TransferEngine,
    TransferOptions,
    TransferStatus,
)
from memferry_transport.job import Job
from memferry_transport.quotas import worth_pulling
from memferry_transport.shared_queue import SharedQueue

from ..allocator.machine import Machine, address, pattern, refused
from ..threads import in_threads
from .fleet import IN, OUT, Crying, Fleet, Losing, calibrated, slow_links

EVEN = LinearCost(0.0, 100.0)


# -- the tail guard ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("left", "own", "direct", "relay", "pulls"),
    [
        (1, 0, 0, EVEN, True),  # one second by either way
        (1, 0, 0, LinearCost(0.1, 100), False),
        (1, 0, 1, LinearCost(1.0, 100), True),  # the direct way is busy for a second first
        (3, 0, 0, LinearCost(0.0, 33), False),
        (4, 0, 0, LinearCost(0.0, 33), True),
        (2, 1, 0, EVEN, True),
        (1, 1, 0, EVEN, False),
    ],
)
def test_a_relay_takes_no_slice_that_would_hold_the_end_up(
    left: int, own: int, direct: int, relay: LinearCost, pulls: bool
) -> None:
    assert worth_pulling(left, own, direct, 100, relay, EVEN) is pulls


# -- transfers ---------------------------------------------------------------------------------------------
def queued(driver: Any = None, nbytes: int = 3000, **options: Any) -> Fleet:
    return Fleet(driver or slow_links(3), nbytes, **{"mode": "queue", **options})


@pytest.mark.parametrize("direction", Direction)
def test_all_ways_take_part_and_a_kernel_sees_the_bytes(direction: Direction) -> None:
    fleet = queued()
    transfer = fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream)
    with fleet.driver.launch(fleet.stream, reads=[fleet.device], writes=[fleet.device]):
        pass
    assert transfer.status is TransferStatus.DONE
    assert sum(way.nbytes for way in transfer.ways) == 3000
    assert len(transfer.ways) == 3
    assert transfer.pieces == sum(way.slices * (1 if way.path.direct else 2) for way in transfer.ways)
    assert all(way.nbytes >= 300 for way in transfer.ways)
    assert transfer.explain().splitlines()[0] == f"3000 bytes {direction.value} from a queue: done"
    assert fleet.engine.bytes_moved[direction] == 3000
    transfer.synchronize()
    assert not transfer.cancel()
    assert fleet.arrived(direction)
    fleet.close()


def test_what_a_kernel_wrote_before_goes_home() -> None:
    fleet = queued()
    fleet.driver.fill(fleet.ptr, 7, 3000, stream=fleet.stream)
    fleet.engine.copy(*fleet.ends(OUT), OUT, stream=fleet.stream)
    fleet.driver.fill(fleet.ptr, 8, 3000, stream=fleet.stream)
    fleet.stream.synchronize()
    assert set(fleet.home) == {7}
    fleet.close()


def test_a_short_transfer_does_not_queue() -> None:
    fleet = queued(break_even_bytes=3001)
    transfer = fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    assert transfer.ways == ()
    transfer.synchronize()
    fleet.close()


def test_started_is_not_ordered_until_it_is_waited_for() -> None:
    fleet = queued()
    transfer = fleet.engine.start([fleet.ends(IN)], IN, stream=fleet.stream)
    transfer.synchronize()
    other = fleet.machine.stream()
    started = fleet.engine.start([fleet.ends(OUT)], OUT, stream=fleet.stream)
    threading.Thread(target=started.synchronize).start()
    started.wait(other)
    with fleet.driver.launch(other, writes=[fleet.device]):
        pass
    with pytest.raises(RaceError):
        fleet.driver.fill(fleet.ptr, 0, 3000, stream=fleet.stream)
    fleet.close()


@given(
    devices=st.integers(2, 5),
    seed=st.integers(0, 99),
    eagerness=st.sampled_from([0.0, 0.3]),
    slice_bytes=st.integers(50, 500),
    outstanding=st.integers(1, 4),
    moves=st.lists(
        st.tuples(st.sampled_from(Direction), st.integers(0, 999), st.integers(0, 999), st.integers(0, 2000)),
        max_size=4,
    ),
)
def test_any_transfers_arrive_byte_for_byte(
    devices: int,
    seed: int,
    eagerness: float,
    slice_bytes: int,
    outstanding: int,
    moves: list[tuple[Direction, int, int, int]],
) -> None:
    driver = EmulatedDriver(EmulatedOptions(device_count=devices, seed=seed, eagerness=eagerness))
    fleet = queued(driver, slice_bytes=slice_bytes, outstanding=outstanding, break_even_bytes=0)
    home, there = pattern(3000), pattern(3000, 1)
    for direction, to, of, nbytes in moves:
        if direction is IN:
            there[to : to + nbytes] = home[of : of + nbytes]
        else:
            home[to : to + nbytes] = there[of : of + nbytes]
        (dst, _), (src, _) = fleet.ends(direction)
        fleet.engine.copy(Span(dst + to, nbytes), Span(src + of, nbytes), direction, stream=fleet.stream)
    fleet.stream.synchronize()
    with driver.host_access(reads=[fleet.host]):
        assert np.array_equal(fleet.home, home)
    assert np.array_equal(fleet.on_device(), there)
    fleet.close()


def test_threads() -> None:
    driver = EmulatedDriver(EmulatedOptions(device_count=3))
    options = TransferOptions(mode="queue", slice_bytes=100, helpers=(2,))
    engines = [TransferEngine(driver, device, options=options, calibration=calibrated(3)) for device in (0, 1)]

    def work(number: int) -> None:
        engine, machine = engines[number % 2], Machine(driver)
        there, back = machine.pinned(1000), machine.pinned(1000)
        ptr, stream = machine.device(1000, engine.device), machine.stream(engine.device)
        for turn in range(3):
            there[:] = data = pattern(1000, number * 100 + turn)
            engine.copy(Span(ptr, 1000), Span(address(there), 1000), IN, stream=stream)
            engine.copy(Span(address(back), 1000), Span(ptr, 1000), OUT, stream=stream)
            stream.synchronize()
            with driver.host_access(reads=[Span(address(back), 1000)]):
                assert np.array_equal(back, data)
        machine.close()

    in_threads(4, work)
    for engine in engines:
        engine.close()


# -- cancellation ------------------------------------------------------------------------------------------
class Gate(EmulatedDriver):
    """Holds up copies of other threads than the main one, once told to."""

    def __init__(self, options: EmulatedOptions) -> None:
        super().__init__(options)
        self.closed, self.open = threading.Event(), threading.Event()
        self.through = 0
        self.open.set()

    def hold(self, free: int) -> None:
        """Let `free` copies through and no more, until `open` is set."""
        self.through = free
        self.open.clear()

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        if threading.current_thread() is not threading.main_thread() and not self.open.is_set():
            if not self.through:
                self.closed.set()
                self.open.wait()
            self.through -= 1
        super().copy(dst, src, nbytes, stream=stream)


@pytest.fixture
def gate() -> Iterator[Fleet]:
    fleet = queued(Gate(EmulatedOptions(device_count=2, eagerness=0.0)))
    fleet.engine.copy(*fleet.ends(OUT), OUT, stream=fleet.stream)
    fleet.stream.synchronize()
    yield fleet
    fleet.close()


def test_cancelled_slices_are_not_submitted(gate: Fleet) -> None:
    driver = gate.driver
    assert isinstance(driver, Gate)
    driver.hold(3)
    transfer = gate.engine.start([gate.ends(IN)], IN, stream=gate.stream)
    driver.closed.wait()
    assert transfer.status is TransferStatus.QUEUED
    assert transfer.cancel()
    assert not transfer.status.terminal  # what is under way goes on
    assert not transfer.cancel()
    driver.open.set()
    for look in (transfer.synchronize, lambda: transfer.event, lambda: transfer.wait(gate.stream)):
        with pytest.raises(TransferCancelledError, match=r"3000 bytes h2d: cancelled, [1-9]00 of them"):
            look()
    assert transfer.status is TransferStatus.CANCELLED
    assert not transfer.done
    assert sum(way.nbytes for way in transfer.ways) < 1000
    driver.fill(gate.ptr, 9, 3000, stream=gate.stream)  # `wait` has ordered it behind what was submitted
    gate.stream.synchronize()


def test_before_it_is_terminal_the_destination_is_not_free(gate: Fleet) -> None:
    driver = gate.driver
    assert isinstance(driver, Gate)
    driver.hold(3)
    transfer = gate.engine.start([gate.ends(IN)], IN, stream=gate.stream)
    driver.closed.wait()
    transfer.cancel()
    with pytest.raises(RaceError):
        driver.fill(gate.ptr, 9, 3000, stream=gate.stream)
    driver.open.set()
    with pytest.raises(TransferCancelledError):
        transfer.synchronize()


def test_what_is_submitted_is_not_cancelled() -> None:
    fleet = Fleet(slow_links(3))
    for several in (True, False):
        size = 4000 if several else 100
        regions = [(Span(fleet.ptr, size), Span(address(fleet.home), size))]
        transfer = fleet.engine.start(regions, IN, stream=fleet.stream)
        assert not transfer.cancel()
        transfer.synchronize()
        assert transfer.status is TransferStatus.DONE
    assert fleet.arrived(IN)
    fleet.close()


def test_closing_lets_jobs_end(gate: Fleet) -> None:
    transfers = [gate.engine.start([gate.ends(IN)], IN, stream=gate.stream) for _ in range(2)]
    gate.engine.close()
    assert [transfer.status for transfer in transfers] == [TransferStatus.DONE] * 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("memferry transfers")]


# -- faults ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.VANISH])
@pytest.mark.parametrize("first", [0, 1, 4, 7])
def test_a_helper_that_fails(direction: Direction, kind: FaultKind, first: int) -> None:
    driver = FaultyDriver(slow_links(3))
    fleet = queued(driver)
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    fleet.engine.copy(*fleet.ends(OUT), OUT, stream=fleet.stream).synchronize()
    fleet.home[:] = pattern(3000)
    fleet.machine.write(fleet.ptr, pattern(3000, 1))
    driver.synchronize(0)
    driver.arm(Fault(kind, first=first, on=1))
    transfer = fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream)
    transfer.synchronize()
    assert fleet.arrived(direction)
    errors = {str(path.path): path.errors for path in fleet.engine.health().paths}
    assert errors == {"direct": 0, "via device 1": 1, "via device 2": 0}
    fleet.engine.close()


@pytest.mark.parametrize("after", [3, 10])
def test_a_helper_lost_under_way_is_made_good(after: int) -> None:
    """Unlike with quotas: the engine's thread sees it, and sends the helper's slices another way."""

    driver = Losing(EmulatedOptions(device_count=3, eagerness=0.0))
    fleet = queued(driver)
    fleet.engine.copy(*fleet.ends(OUT), OUT, stream=fleet.stream).synchronize()
    fleet.home[:] = pattern(3000)
    fleet.machine.write(fleet.ptr, pattern(3000, 2))
    driver.synchronize(0)
    driver.after = after
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).synchronize()
    assert fleet.arrived(IN)
    fleet.engine.close()


def test_a_helper_lost_once_its_slices_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = slow_links(3)
    fleet = queued(driver)
    end = SharedQueue._end

    def lose_and_end(queue: SharedQueue, job: Job) -> None:
        driver.lose(1)
        end(queue, job)

    monkeypatch.setattr(SharedQueue, "_end", lose_and_end)
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    with driver.launch(fleet.stream, writes=[fleet.device]):
        pass
    assert fleet.arrived(IN)
    assert str(fleet.engine.health().paths[1]).startswith("via device 1: lost")
    fleet.engine.close()


@pytest.mark.parametrize("after", [2, 5])
def test_the_consumer_comes_after_what_was_submitted_before_an_error(after: int) -> None:
    """Whatever ends the engine's work on it; that the next transfer has its turn is seen too."""
    driver = Crying(EmulatedOptions(device_count=3, eagerness=0.0))
    fleet = queued(driver)
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).synchronize()
    driver.cry(after, RaceError("two at once"))
    with pytest.raises(RaceError, match="two at once"):
        fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    driver.fill(fleet.ptr, 1, 3000, stream=fleet.stream)
    driver.fill(fleet.machine.mapped(fleet.home), 1, 3000, stream=fleet.stream)
    fleet.stream.synchronize()
    fleet.home[:] = pattern(3000)
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).synchronize()
    assert fleet.arrived(IN)
    fleet.close()


def test_all_ways_fail() -> None:
    driver = FaultyDriver(slow_links(2))
    fleet = queued(driver)
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).synchronize()
    driver.arm(Fault(FaultKind.FAIL, first=4, count=None))
    with refused("UNKNOWN"):
        fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    driver.fill(fleet.ptr, 1, 3000, stream=fleet.stream)  # it comes after what was submitted
    transfer = fleet.engine.start([fleet.ends(IN)], IN, stream=fleet.stream)
    with refused("UNKNOWN"):
        transfer.synchronize()
    assert transfer.status is TransferStatus.FAILED
    driver.arm()
    fleet.stream.synchronize()
    fleet.close()
