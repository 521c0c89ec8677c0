"""Relays of one hop, by a helper's kernel: when they are taken, in what time, in order, and when they fail."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from memferry_allocator import (
    CaptureMode,
    DeviceLostError,
    Direction,
    Driver,
    EmulatedDriver,
    EmulatedOptions,
    Event,
    RaceError,
    Span,
    Stream,
    UnsupportedError,
)
from memferry_allocator.driver import COPY_BLOCKS, LinkModel
from memferry_transport import Edge, Fault, FaultKind, FaultyDriver, LinearCost, Path, Transfer, TransferStatus
from memferry_transport.adaptive import PARTS, SAMPLED, Adaptive, situation
from memferry_transport.planner import KERNEL_PIECE, KERNEL_UNIT
from memferry_transport.runs import PathShare

from ..allocator.machine import address, pattern, refused
from .fleet import IN, OUT, RATE, Crying, Fleet, calibrated, slow_links

AS_FAST = LinearCost(0.0, RATE)
DIRECT, KERNEL, STAGED = "direct", "via device 1 by its kernel", "via device 1"


@pytest.fixture
def make() -> Iterator[Callable[..., Fleet]]:
    """Fleets whose helpers have kernels as fast as the direct way, closed at the end."""
    fleets: list[Fleet] = []

    def fleet(driver: Driver | None = None, nbytes: int = 4000, **options: Any) -> Fleet:
        driver = driver or slow_links(2)
        known = calibrated(driver.device_count, kernels=dict.fromkeys(range(driver.device_count), AS_FAST))
        fleets.append(Fleet(driver, nbytes, **{"calibration": known, **options}))
        return fleets[-1]

    yield fleet
    for found in fleets:
        with contextlib.suppress(DeviceLostError):  # of those that lose a device
            found.close()


def move(fleet: Fleet, direction: Direction, nbytes: int | None = None, skew: int = 0) -> Transfer:
    dst, src = fleet.ends(direction)
    size = (fleet.nbytes if nbytes is None else nbytes) - skew
    return fleet.engine.copy(Span(dst.ptr + skew, size), Span(src.ptr, size), direction, stream=fleet.stream)


def used(transfer: Transfer) -> list[str]:
    return [str(way.path) for way in transfer.ways]


def restore(fleet: Fleet) -> None:
    """Other bytes at either end than at the other."""
    fleet.driver.synchronize(0)
    fleet.home[:] = pattern(fleet.nbytes)
    fleet.machine.write(fleet.ptr, pattern(fleet.nbytes, 1))
    fleet.driver.synchronize(0)


# -- time and choice ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_all_links_together(make: Callable[..., Fleet], direction: Direction, devices: int) -> None:
    fleet = make(slow_links(devices), 8000, max_helpers=7)
    move(fleet, direction).synchronize()
    assert fleet.arrived(direction)
    before = fleet.driver.now  # type: ignore[attr-defined]
    transfer = move(fleet, direction)
    transfer.synchronize()
    assert [way.nbytes for way in transfer.ways] == [8000 // devices] * devices
    assert [(way.slices, way.copies) for way in transfer.ways] == [(1, 1)] * devices
    assert fleet.driver.now - before == pytest.approx(8 / devices)  # type: ignore[attr-defined]


def test_a_kernel_goes_over_its_own_device_s_links() -> None:
    driver = EmulatedDriver(
        EmulatedOptions(
            device_count=2,
            eagerness=0.0,
            host_to_device=LinkModel(1.0, 1000.0),
            device_to_host=LinkModel(2.0, 500.0),
            peer=LinkModel(0.5, 4000.0),
        )
    )
    fleet = Fleet(driver, 1000)
    driver.enable_peer_access(1, 0)
    mapped, lane = fleet.machine.mapped(fleet.home, 1), fleet.machine.stream(1)
    for dst, src, seconds in ((fleet.ptr, mapped, 1.5 + 1.0), (mapped, fleet.ptr, 2.5 + 2.0)):
        before = driver.now
        driver.kernel_copy(dst, src, 1000, stream=lane)
        driver.copy(*fleet.ends(IN)[0][:1], fleet.host.ptr, 0, stream=fleet.stream)
        lane.synchronize()
        assert driver.now - before == pytest.approx(seconds)
    fleet.close()


def test_for_each_size_the_relay_that_ends_sooner(make: Callable[..., Fleet]) -> None:
    """The kernel starts sooner, staging is faster: they are even where each would carry 2000 bytes."""
    known = calibrated(2, {1: 1000.0}, kernels={1: LinearCost(0.0, 500.0)})
    known.ways[Path(0, 1), IN] = type(known.ways[Path(0, 1), IN])(LinearCost(2.0, 1000.0))  # type: ignore[index]
    fleet = make(nbytes=8000, calibration=known, adaptive=False)
    assert used(move(fleet, IN, 3900)) == [DIRECT, KERNEL]
    assert used(move(fleet, IN, 8000)) == [DIRECT, STAGED]


@pytest.mark.parametrize(("relay", "wanted"), [("kernel", KERNEL), ("staging", STAGED), ("auto", KERNEL)])
def test_a_kind_that_is_asked_for(make: Callable[..., Fleet], relay: str, wanted: str) -> None:
    fleet = make(relay=relay)
    for direction in Direction:
        restore(fleet)
        transfer = move(fleet, direction)
        transfer.synchronize()
        assert used(transfer) == [DIRECT, wanted]
        assert fleet.arrived(direction)


def test_without_a_measured_kernel_helpers_stage(make: Callable[..., Fleet]) -> None:
    fleet = make(calibration=calibrated(2))
    assert used(move(fleet, IN)) == [DIRECT, STAGED]
    named = make(calibration=calibrated(2), helpers=(1,), relay="kernel")
    assert used(move(named, IN)) == [DIRECT, KERNEL]


def test_bytes_that_lie_differently_at_both_ends_are_staged(make: Callable[..., Fleet]) -> None:
    fleet = make()
    assert used(move(fleet, IN, skew=16)) == [DIRECT, KERNEL]
    assert used(move(fleet, IN, skew=8)) == [DIRECT, STAGED]
    assert used(move(make(relay="kernel"), IN, skew=8)) == []


def test_a_kernel_s_share_needs_no_slices(make: Callable[..., Fleet]) -> None:
    """Of 16 MiB in slices of 8 MiB, with a way that takes a while to start."""
    slow = LinkModel(0.0, 50e9)
    driver = EmulatedDriver(EmulatedOptions(device_count=2, eagerness=0.0, host_to_device=slow))
    known = calibrated(2, direct=50e9, slice_bytes=8 << 20, kernels={1: LinearCost(20e-6, 50e9)})
    nbytes = 16 << 20
    fleet = make(driver, nbytes, calibration=known, slice_bytes=8 << 20, relay="kernel", break_even_bytes=0)
    direct, kernel = move(fleet, IN).ways
    assert kernel.nbytes % KERNEL_UNIT == 0
    assert 0 <= (direct.nbytes - kernel.nbytes) - 20e-6 * 50e9 < 2 * KERNEL_UNIT
    small = move(fleet, IN, KERNEL_PIECE)
    assert used(small) == []  # the direct way has ended before the kernel starts
    assert len(move(fleet, IN, 4 << 20).ways) == 2


def test_both_kinds_are_never_on_one_link(make: Callable[..., Fleet]) -> None:
    for nbytes in range(200, 4000, 300):
        transfer = move(make(slow_links(3)), IN, nbytes)
        helpers = [way.path.helper for way in transfer.ways]
        assert len(set(helpers)) == len(helpers)


# -- what the calls are ------------------------------------------------------------------------------------
class Counting(EmulatedDriver):
    """Counts what goes to streams."""

    def __init__(self, options: EmulatedOptions) -> None:
        super().__init__(options)
        self.calls: Counter[str] = Counter()

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        self.calls["copy"] += 1
        super().copy(dst, src, nbytes, stream=stream)

    def kernel_copy(self, dst: int, src: int, nbytes: int, *, stream: Stream, blocks: int = COPY_BLOCKS) -> None:
        self.calls["kernel"] += 1
        super().kernel_copy(dst, src, nbytes, stream=stream, blocks=blocks)

    def event_record(self, event: Event, stream: Stream) -> None:
        self.calls["record"] += 1
        super().event_record(event, stream)

    def stream_wait(self, stream: Stream, event: Event) -> None:
        self.calls["wait"] += 1
        super().stream_wait(stream, event)


def test_what_a_transfer_over_two_ways_asks_of_the_driver(make: Callable[..., Fleet]) -> None:
    """Begin, and the end of each way and of all; with two more where times are taken, which are few."""
    driver = Counting(slow_links(2).options)
    fleet, found = make(driver), []
    for _ in range(4 * SAMPLED):
        driver.calls.clear()
        move(fleet, IN).synchronize()
        found.append(dict(driver.calls))
    plain = {"copy": 1, "kernel": 1, "record": 4, "wait": 4}
    timed = {**plain, "record": 6}
    late = found[2 * SAMPLED :]
    assert late.count(plain) == 2 * SAMPLED - 2
    assert late.count(timed) == 2
    assert found[1] == timed


# -- adaptation --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("direction", Direction)
def test_shares_come_to_follow_what_is_measured(make: Callable[..., Fleet], direction: Direction) -> None:
    """Calibrated alike, but the kernel's bytes take twice as long: they cross a peer link of the same pace."""
    link = LinkModel(0.0, RATE)
    driver = EmulatedDriver(
        EmulatedOptions(
            device_count=2,
            eagerness=0.0,
            on_device=LinkModel(0.0, 1e18),
            host_to_device=link,
            device_to_host=link,
            peer=LinkModel(0.0, RATE / 2),
        )
    )
    fleet = make(driver, 64_000, slice_bytes=8000)
    for _ in range(30):
        transfer = move(fleet, direction)
        transfer.synchronize()
    assert used(transfer) == [DIRECT, KERNEL]
    seconds = [way.nbytes / rate for way, rate in zip(transfer.ways, (RATE, RATE / 2), strict=True)]
    assert max(seconds) / min(seconds) < 1.1
    assert fleet.arrived(direction)


def test_a_step_is_a_slice_or_a_small_part() -> None:
    kernel, staged = (Path(0), Path(0, 1, "kernel")), (Path(0), Path(0, 1))
    assert situation(IN, staged, 1 << 24, 8 << 20).step == 8 << 20
    assert situation(IN, kernel, 1 << 24, 8 << 20).step == (1 << 24) // PARTS
    assert situation(IN, kernel, 1 << 34, 8 << 20).step == 8 << 20
    assert situation(IN, kernel, 1 << 24, 8 << 20) == situation(IN, kernel, (1 << 25) - 1, 8 << 20)
    assert situation(IN, kernel, 1 << 24, 8 << 20) != situation(IN, kernel, 1 << 25, 8 << 20)


class Seen(PathShare):
    """Done, in a known time."""

    seconds = 1.0

    @property
    def measured_s(self) -> float:
        return self.seconds


def test_times_are_taken_of_all_until_shares_settle_and_of_some_later() -> None:
    adaptive, paths = Adaptive(100), (Path(0), Path(0, 1, "kernel"))
    key = situation(IN, paths, 6400, 100)
    wanted = []
    for _ in range(40):
        wanted.append(adaptive.wants(key))
        if wanted[-1]:
            adaptive.watch(key, tuple(Seen(path, 3200, 1, 1) for path in paths))
            adaptive.learn()
    assert wanted[:3] == [True] * 3
    assert wanted[8:40] == [number % SAMPLED == 0 for number in range(8, 40)]
    assert adaptive.shifts(key) == (0, 0)


# -- order -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_right_behind_sees_the_bytes(make: Callable[..., Fleet], seed: int) -> None:
    fleet = make(EmulatedDriver(EmulatedOptions(device_count=3, seed=seed, eagerness=0.2)))
    assert any(way.path.by_kernel for way in move(fleet, IN).ways)
    with fleet.driver.launch(fleet.stream, reads=[fleet.device]):
        memory = np.frombuffer(fleet.driver.host_bytes(fleet.ptr, 4000), np.uint8)  # type: ignore[arg-type]
        assert np.array_equal(memory, pattern(4000))


class Forgetful(EmulatedDriver):
    """Leaves out one wait between streams, by its number."""

    forgotten: int | None = None
    waits = 0

    def stream_wait(self, stream: Stream, event: Event) -> None:
        self.waits += 1
        if self.waits - 1 != self.forgotten:
            super().stream_wait(stream, event)


def waited(make: Callable[..., Fleet], forgotten: int | None, direction: Direction) -> int:
    """The waits of a transfer over three ways between work on both its ends, one left out."""
    driver = Forgetful(EmulatedOptions(device_count=3, eagerness=0.0))
    fleet = make(driver, adaptive=False)
    move(fleet, direction).synchronize()
    driver.waits, driver.forgotten = 0, forgotten
    for value in (5, 6):
        with driver.launch(fleet.stream, reads=[fleet.device], writes=[fleet.device]):
            pass
        driver.fill(fleet.machine.mapped(fleet.home), value, 4000, stream=fleet.stream)
        if value == 5:
            assert len(move(fleet, direction).ways) == 3
    return driver.waits


@pytest.mark.parametrize("direction", Direction)
def test_every_wait_counts(make: Callable[..., Fleet], direction: Direction) -> None:
    assert waited(make, None, direction) == 2 * (1 + 2)  # begin and end, of the lane and of two kernels' streams
    for forgotten in range(2 * (1 + 2)):
        with pytest.raises(RaceError):
            waited(make, forgotten, direction)


def test_a_capture_sees_one_plain_copy(make: Callable[..., Fleet]) -> None:
    fleet = make()
    fleet.driver.begin_capture(fleet.stream, CaptureMode.RELAXED)
    assert move(fleet, IN).ways == ()
    fleet.driver.end_capture(fleet.stream)


def test_two_engines_share_a_helper_s_link(make: Callable[..., Fleet]) -> None:
    driver = slow_links(3)
    fleets = [make(driver, device=device, helpers=(2,), adaptive=False) for device in (0, 1)]
    for fleet in fleets:
        move(fleet, IN).synchronize()
        fleet.machine.write(fleet.ptr, pattern(4000, 1), device=fleet.engine.device)
        driver.synchronize(fleet.engine.device)
    before = driver.now
    for fleet in fleets:
        assert used(move(fleet, IN)) == [DIRECT, "via device 2 by its kernel"]
    for fleet in fleets:
        fleet.stream.synchronize()
    assert driver.now - before == pytest.approx(4.0)
    assert all(fleet.arrived(IN) for fleet in fleets)


# -- verified before use -----------------------------------------------------------------------------------
class NoKernels(EmulatedDriver):
    """Copies by copy engines only."""

    def prepare_kernel_copy(self, device: int) -> None:
        raise UnsupportedError("NVRTC does not load")


def test_where_kernels_do_not_load_helpers_stage(make: Callable[..., Fleet]) -> None:
    fleet = make(NoKernels(slow_links(2).options))
    for _ in range(2):
        assert used(move(fleet, IN)) == [DIRECT, STAGED]
    assert "NVRTC does not load" in str(fleet.engine.health())


@pytest.mark.parametrize(("direction", "edge"), [(IN, Edge(None, 0)), (OUT, Edge(0, None))])
def test_a_kernel_that_changes_bytes_is_found_and_left_alone(
    make: Callable[..., Fleet], direction: Direction, edge: Edge
) -> None:
    driver = FaultyDriver(slow_links(2), [Fault(FaultKind.CORRUPT, edge=edge, kernel=True, count=None)])
    fleet = make(driver)
    transfer = move(fleet, direction)
    transfer.synchronize()
    assert used(transfer) == [DIRECT, STAGED]
    assert fleet.arrived(direction)
    assert "by a kernel of device 1" in str(fleet.engine.health())
    driver.arm()
    fleet.clock.now += 30  # type: ignore[attr-defined]
    assert used(move(fleet, direction)) == [DIRECT, KERNEL]


def test_what_was_verified_is_shown(make: Callable[..., Fleet]) -> None:
    fleet = make()
    for direction in Direction:
        move(fleet, direction)
    assert {Edge(None, 0, 1), Edge(0, None, 1)} == set(fleet.engine.health().verified)
    assert "verified: host -> device 0 by a kernel of device 1, device 0 -> " in str(fleet.engine.health())


# -- failures ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["quota", "queue"])
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.VANISH])
def test_a_kernel_that_fails(make: Callable[..., Fleet], direction: Direction, kind: FaultKind, mode: str) -> None:
    driver = FaultyDriver(slow_links(3))
    fleet = make(driver, adaptive=False, mode=mode)
    move(fleet, direction).synchronize()
    restore(fleet)
    driver.arm(Fault(kind, on=1, kernel=True))
    transfer = move(fleet, direction)
    with driver.launch(fleet.stream, reads=[fleet.device]):
        pass
    transfer.synchronize()
    assert transfer.status is TransferStatus.DONE
    assert fleet.arrived(direction)
    assert sum(way.nbytes for way in transfer.ways) == 4000
    states = {str(path.path): path for path in fleet.engine.health().paths}
    assert states[KERNEL].errors == 1
    assert states[KERNEL].usable_in_s == (math.inf if kind is FaultKind.VANISH else 0)
    driver.arm()


@pytest.mark.parametrize("direction", Direction)
def test_three_failures_and_the_helper_stages(make: Callable[..., Fleet], direction: Direction) -> None:
    driver = FaultyDriver(slow_links(2))
    fleet = make(driver, adaptive=False)
    move(fleet, direction).synchronize()
    driver.arm(Fault(FaultKind.FAIL, kernel=True, count=None))
    assert [used(move(fleet, direction)) for _ in range(4)] == [[DIRECT]] * 3 + [[DIRECT, STAGED]]


def test_the_direct_way_fails(make: Callable[..., Fleet]) -> None:
    driver = FaultyDriver(slow_links(2))
    fleet = make(driver, adaptive=False)
    move(fleet, IN).synchronize()
    restore(fleet)
    driver.arm(Fault(FaultKind.FAIL, on=0))
    transfer = move(fleet, IN)
    transfer.synchronize()
    assert used(transfer) == [KERNEL]
    assert fleet.arrived(IN)
    assert transfer.pieces == 2


def test_all_ways_fail(make: Callable[..., Fleet]) -> None:
    driver = FaultyDriver(slow_links(3))
    fleet = make(driver, adaptive=False)
    move(fleet, IN).synchronize()
    driver.arm(Fault(FaultKind.FAIL, first=1, count=None))
    with refused("UNKNOWN"):
        move(fleet, IN)
    driver.arm()
    for ptr in (fleet.ptr, fleet.machine.mapped(fleet.home)):
        driver.fill(ptr, 1, 4000, stream=fleet.stream)  # both ends may be used in the stream's order
        other = fleet.machine.stream()
        with pytest.raises(RaceError):
            driver.fill(ptr, 2, 4000, stream=other)


class CryingKernels(Crying):
    """Raises once, instead of a chosen copy by a kernel."""

    def kernel_copy(self, dst: int, src: int, nbytes: int, *, stream: Stream, blocks: int = COPY_BLOCKS) -> None:
        super().kernel_copy(dst, src, nbytes, stream=stream, blocks=blocks)
        if self.left:
            self.left -= 1
            if not self.left:
                raise self.error


@pytest.mark.parametrize("direction", Direction)
def test_a_helper_that_is_said_to_be_lost_and_writes_on(make: Callable[..., Fleet], direction: Direction) -> None:
    """Its bytes go another way too, but not before what its kernel may still be writing."""
    driver = CryingKernels(EmulatedOptions(device_count=3, eagerness=0.0))
    fleet = make(driver, adaptive=False)
    move(fleet, direction).synchronize()
    restore(fleet)
    driver.cry(1)
    move(fleet, direction).synchronize()
    assert driver.left == 0
    assert fleet.arrived(direction)
    assert address(fleet.home)
