"""Ways that fail: their bytes take another way, and they are left alone for a while."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_allocator import (
    DeviceLostError,
    Direction,
    DriverError,
    EmulatedDriver,
    EmulatedOptions,
    Span,
    Stream,
)
from memferry_transport import (
    Edge,
    Fault,
    FaultKind,
    FaultyDriver,
    Path,
    Transfer,
    TransferFailedError,
    TransferStatus,
)
from memferry_transport.faults import DelegatingDriver
from memferry_transport.health import Health, arrives

from ..allocator.machine import address, pattern, refused
from .fleet import IN, OUT, Clock, Crying, Fleet, Losing, slow_links

VIA = Path(0, 1)


# -- the books ---------------------------------------------------------------------------------------------
def test_three_errors_in_ten_seconds_and_then_ever_longer() -> None:
    clock = Clock()
    health = Health(clock)
    for back_off in (30.0, 60.0, 120.0):
        for _ in range(3):
            assert health.usable(VIA)
            health.failed(VIA, "so")
            clock.now += 4.9
        clock.now -= 4.9
        start = clock.now
        for now, usable in ((0.0, False), (back_off - 0.1, False), (back_off, True)):
            clock.now = start + now
            assert health.usable(VIA) is usable
    assert health.usable(Path(0))


def test_errors_far_apart_are_forgiven() -> None:
    clock = Clock()
    health = Health(clock)
    for _ in range(20):
        health.failed(VIA, "so")
        clock.now += 5.1
    assert health.usable(VIA)


def test_a_lost_device_stays_lost() -> None:
    clock = Clock()
    health = Health(clock)
    health.lost(VIA, "gone")
    clock.now = 1e9
    assert not health.usable(VIA)
    assert health.report([VIA]).paths[0].usable_in_s == math.inf


def test_what_is_left_alone_is_verified_again() -> None:
    health = Health(Clock())
    edges = Edge(None, 1), Edge(1, 0), Edge(None, 2)
    health.verified(*edges)
    health.suspend(VIA, "wrong bytes")
    assert not health.is_verified(edges[0])
    assert not health.is_verified(edges[1])
    assert health.is_verified(edges[2])


def test_a_report_is_read() -> None:
    health = Health(Clock())
    health.verified(Edge(1, 0), Edge(None, 1))
    health.suspend(Path(0, 2), "wrong bytes")
    health.failed(Path(0, 1), "slip")
    health.lost(Path(0, 3), "gone")
    assert str(health.report([Path(0), Path(0, 1)])).splitlines() == [
        "direct: well",
        "via device 1: in use, 1 error(s), the last: slip",
        "via device 2: left alone for 30 s, 1 error(s), the last: wrong bytes",
        "via device 3: lost, 1 error(s), the last: gone",
        "verified: host -> device 1, device 1 -> device 0",
    ]


# -- transfers ---------------------------------------------------------------------------------------------
class Faulty(Fleet):
    """A fleet whose copies go wrong as told, its ways verified already unless told otherwise."""

    driver: FaultyDriver

    def __init__(
        self, devices: int = 3, *plan: Fault, warm: bool = True, nbytes: int = 2000, **options: Any
    ) -> None:
        super().__init__(FaultyDriver(slow_links(devices), plan), nbytes, adaptive=False, **options)
        if warm:
            for direction in Direction:
                self.move(direction).synchronize()
                self.restore()

    def restore(self) -> None:
        """Other bytes at either end than at the other."""
        self.driver.synchronize(0)
        self.home[:] = pattern(self.nbytes)
        self.machine.write(self.ptr, pattern(self.nbytes, 1))
        self.driver.synchronize(0)

    def move(self, direction: Direction) -> Transfer:
        return self.engine.copy(*self.ends(direction), direction, stream=self.stream)

    def used(self, transfer: Transfer) -> list[str]:
        return [str(way.path) for way in transfer.ways]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.VANISH])
@pytest.mark.parametrize("hop", range(15))
def test_a_helper_that_fails_at_any_hop(direction: Direction, kind: FaultKind, hop: int) -> None:
    fleet = Faulty(3)
    fleet.driver.arm(Fault(kind, first=hop, on=1))
    transfer = fleet.move(direction)
    with fleet.driver.launch(fleet.stream, reads=[fleet.device]):
        pass
    transfer.synchronize()
    assert transfer.status is TransferStatus.DONE
    assert fleet.arrived(direction)
    assert sum(way.nbytes for way in transfer.ways) == 2000
    states = {str(path.path): path for path in fleet.engine.health().paths}
    failed = hop < 14  # seven slices of two hops
    assert states["via device 1"].errors == int(failed)
    assert states["via device 1"].usable_in_s == (math.inf if failed and kind is FaultKind.VANISH else 0)
    assert fleet.engine.bytes_moved[direction] == 4000
    if kind is FaultKind.FAIL:
        fleet.driver.arm()
        fleet.restore()
        again = fleet.move(direction)
        again.synchronize()
        assert fleet.used(again) == ["direct", "via device 1", "via device 2"]
        assert fleet.arrived(direction)
        fleet.close()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("mode", "hop"), [("quota", 3), ("quota", 6), ("quota", 13), ("queue", 3)])
def test_a_helper_that_is_said_to_be_lost_and_writes_on(direction: Direction, mode: str, hop: int) -> None:
    """Its slices go another way too, but not before what it may still be writing."""

    driver = Crying(EmulatedOptions(device_count=3, eagerness=0.0))
    fleet = Fleet(driver, 2000, adaptive=False, mode=mode)
    fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream).synchronize()
    fleet.home[:] = pattern(2000)
    fleet.machine.write(fleet.ptr, pattern(2000, 1))
    driver.synchronize(0)
    driver.cry(hop)
    fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream).synchronize()
    assert driver.left == 0
    assert fleet.arrived(direction)
    fleet.close()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("after", [1, 2, 5, 24, 25, 26, 27])
def test_a_helper_lost_between_two_calls(direction: Direction, after: int) -> None:
    """Seen as long as the call has not returned, even after the last slice: 27 copies make a transfer."""
    driver = Losing(EmulatedOptions(device_count=3, eagerness=0.0))
    fleet = Fleet(driver, 2000, adaptive=False)
    first = fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream)
    first.synchronize()
    assert first.pieces == 27
    fleet.home[:] = pattern(2000)
    fleet.machine.write(fleet.ptr, pattern(2000, 1))
    driver.synchronize(0)
    driver.after = after
    fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream)
    with driver.launch(fleet.stream, reads=[fleet.device], writes=[fleet.device]):
        pass
    fleet.stream.synchronize()
    assert fleet.arrived(direction)
    assert str(fleet.engine.health().paths[1]).startswith("via device 1: lost")
    fleet.engine.close()


@pytest.mark.parametrize("direction", Direction)
def test_the_direct_way_fails(direction: Direction) -> None:
    fleet = Faulty(2)
    fleet.driver.arm(Fault(FaultKind.FAIL, on=0))
    transfer = fleet.move(direction)
    transfer.synchronize()
    assert fleet.arrived(direction)
    assert fleet.used(transfer) == ["via device 1"]
    assert fleet.engine.health().paths[0].errors == 1
    fleet.close()


def test_all_ways_fail() -> None:
    fleet = Faulty(3)
    fleet.driver.arm(Fault(FaultKind.FAIL, count=None))
    with refused("UNKNOWN"):
        fleet.move(IN)
    fleet.driver.arm()
    assert fleet.engine.bytes_moved[IN] == 2000
    assert all(path.errors == 0 for path in fleet.engine.health().paths)  # perhaps it was the bytes' fault
    fleet.driver.fill(fleet.ptr, 1, 2000, stream=fleet.stream)  # both ends may be used in the stream's order
    fleet.driver.fill(fleet.machine.mapped(fleet.home), 1, 2000, stream=fleet.stream)
    fleet.close()


def test_bytes_that_nobody_can_carry_are_nobody_s_fault() -> None:
    fleet = Faulty(2)
    regions = [(Span(fleet.ptr + 2000 - 100, 2000), fleet.host)]
    with refused("INVALID_VALUE"):
        fleet.engine.copy_regions(regions, IN, stream=fleet.stream)
    assert all(path.errors == 0 for path in fleet.engine.health().paths)
    fleet.close()


def test_three_failures_and_the_way_is_left_alone() -> None:
    fleet = Faulty(2)
    fleet.driver.arm(Fault(FaultKind.FAIL, on=1, count=3))
    for _ in range(3):
        fleet.move(IN).synchronize()
    assert fleet.move(IN).ways == ()
    fleet.clock.now += 30  # type: ignore[attr-defined]
    assert fleet.used(fleet.move(IN)) == ["direct", "via device 1"]
    fleet.close()


def test_a_slow_copy_is_only_slow() -> None:
    fleet = Faulty(2)
    fleet.driver.arm(Fault(FaultKind.DELAY, on=1, times=5))
    before = fleet.driver.now
    fleet.move(IN).synchronize()
    assert fleet.driver.now - before == pytest.approx(1.4)
    assert fleet.arrived(IN)
    fleet.close()


@pytest.mark.parametrize("slow", [1, 2])
def test_a_way_that_is_seen_to_crawl_twice_is_left_alone(slow: int) -> None:
    """Once may be its first use."""
    fleet = Fleet(FaultyDriver(slow_links(2)), 2000)
    for _ in range(slow):
        fleet.driver.arm(Fault(FaultKind.DELAY, on=1, times=20, count=None))  # type: ignore[attr-defined]
        fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).synchronize()
    fleet.driver.arm()  # type: ignore[attr-defined]
    transfer = fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    transfer.synchronize()
    assert [str(way.path) for way in transfer.ways] == (["direct", "via device 1"] if slow == 1 else [])
    assert ("it carried" in str(fleet.engine.health())) is (slow == 2)
    fleet.close()


class Owners(DelegatingDriver):
    """Devices that fill no other device's memory, nor carry it from and to the host."""

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        ends = self.device_of(dst), self.device_of(src)
        assert None not in ends or stream.device in ends
        super().copy(dst, src, nbytes, stream=stream)

    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        assert self.device_of(ptr) in (None, stream.device)
        super().fill(ptr, value, nbytes, stream=stream)


def test_of_each_device_only_its_own_memory_is_asked() -> None:
    driver = FaultyDriver(
        Owners(EmulatedDriver(EmulatedOptions(device_count=2))), [Fault(FaultKind.CORRUPT, count=None)]
    )
    assert not arrives(driver, [1, 0], on=1)
    assert not arrives(driver, [0, 1], on=1)
    driver.arm()
    assert arrives(driver, [1, 0], on=1)
    driver.close()


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.VANISH])
def test_a_helper_that_fails_keeps_nothing_alive_that_callers_have(kind: FaultKind) -> None:
    fleet = Faulty(3)

    def move() -> weakref.ref[Clock]:
        local = Clock()
        fleet.move(IN).synchronize()
        return weakref.ref(local)

    gc.disable()
    try:
        fleet.driver.arm(Fault(kind, first=4, on=1))
        assert move()() is None
    finally:
        gc.enable()
    fleet.engine.close()


def test_a_device_that_is_lost_while_it_is_looked_at_leaves_nothing() -> None:
    for after in range(1, 7):
        driver = Losing(EmulatedOptions(device_count=2))
        driver.after, free = after, driver.memory_info(0).free
        if after < 6:  # the last of its copies is the fifth
            with pytest.raises(DeviceLostError):
                arrives(driver, [1, 0], on=1)
        else:
            assert arrives(driver, [1, 0], on=1)
        assert (driver.registered, driver.memory_info(0).free) == (0, free)
        driver.close()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("edge", [Edge(None, 1), Edge(1, 0), Edge(1, None), Edge(0, 1)])
def test_a_link_that_changes_bytes_is_not_used(direction: Direction, edge: Edge) -> None:
    """It is found before it carries anything, and looked at again after the back-off."""
    fleet = Faulty(3, Fault(FaultKind.CORRUPT, edge=edge, count=None), warm=False)
    needed = {IN: [Edge(1, 0)], OUT: [Edge(0, 1)]}[direction] + [Edge(None, 1), Edge(1, None)]
    for _ in range(2):
        transfer = fleet.move(direction)
        transfer.synchronize()
        assert fleet.used(transfer) == [
            "direct",
            *(["via device 1"] if edge not in needed else []),
            "via device 2",
        ]
        assert fleet.arrived(direction)
        fleet.restore()
    if edge in needed:
        assert "changed" in str(fleet.engine.health())
    fleet.driver.arm()
    fleet.clock.now += 30  # type: ignore[attr-defined]
    assert fleet.used(fleet.move(direction)) == ["direct", "via device 1", "via device 2"]
    fleet.close()


def test_a_helper_without_room_does_not_help() -> None:
    driver = EmulatedDriver(EmulatedOptions(device_count=2, device_memory=1 << 20))
    taken = driver.malloc(1, (1 << 20) - 100)
    fleet = Fleet(driver, 2000)
    transfer = fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    assert transfer.ways == ()
    transfer.synchronize()
    assert "OUT_OF_MEMORY" in str(fleet.engine.health())
    driver.free(1, taken)
    fleet.close()


def test_a_helper_that_is_not_a_peer_does_not_help() -> None:
    class Apart(EmulatedDriver):
        def can_access_peer(self, device: int, peer: int) -> bool:
            return False

    fleet = Fleet(Apart(EmulatedOptions(device_count=2)), 2000)
    assert fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).ways == ()
    assert "cannot reach" in str(fleet.engine.health())
    fleet.close()


@pytest.mark.parametrize("direction", Direction)
def test_a_helper_lost_under_way_is_told(direction: Direction) -> None:
    """What was submitted to it is lost; the transfer says so, and the destination may be written again."""
    fleet = Faulty(2)
    transfer = fleet.move(direction)
    assert transfer.status is TransferStatus.UNDER_WAY
    fleet.driver.vanish(1)
    for look in (lambda: transfer.done, transfer.synchronize):
        with pytest.raises(TransferFailedError, match="via device 1 are not all there"):
            look()
    assert transfer.status is TransferStatus.FAILED
    assert transfer.status.terminal
    assert "via device 1" in transfer.explain()
    again = fleet.move(direction)
    again.synchronize()
    assert fleet.used(again) == ["direct"]
    assert fleet.arrived(direction)
    fleet.engine.close()


def test_the_engine_s_own_device_is_lost() -> None:
    fleet = Faulty(2)
    fleet.driver.vanish(0)
    with pytest.raises(DeviceLostError):
        fleet.move(IN)
    fleet.engine.close()


@settings(max_examples=2 * settings.default.max_examples)
@given(
    faults=st.lists(
        st.builds(
            Fault,
            st.sampled_from([FaultKind.FAIL, FaultKind.DELAY, FaultKind.VANISH]),
            first=st.integers(0, 40),
            count=st.integers(1, 5),
            on=st.integers(1, 3),
            times=st.integers(2, 3),
        ),
        max_size=4,
    ),
    directions=st.lists(st.sampled_from(Direction), min_size=1, max_size=4),
)
def test_whatever_helpers_do_the_bytes_arrive(faults: list[Fault], directions: list[Direction]) -> None:
    fleet = Faulty(4, warm=False)
    fleet.driver.arm(*faults)
    for direction in directions:
        transfer = fleet.move(direction)
        try:
            transfer.synchronize()
        except TransferFailedError:  # of a helper lost meanwhile; nothing is promised but to say so
            fleet.move(direction).synchronize()
        assert fleet.arrived(direction)
        fleet.restore()
    fleet.engine.close()


# -- the faults themselves ---------------------------------------------------------------------------------
def test_faults_befall_the_copies_that_fit() -> None:
    driver = FaultyDriver(EmulatedDriver(EmulatedOptions(device_count=2)))
    fleet = Fleet(driver, 200, helpers=())
    driver.arm(
        Fault(FaultKind.FAIL, first=1, count=2, edge=Edge(None, 0)),
        Fault(FaultKind.CORRUPT, edge=Edge(0, None), count=None, on=0),
    )
    outcomes = []
    for _ in range(4):
        try:
            fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).synchronize()
            outcomes.append(True)
        except DriverError:
            outcomes.append(False)
    assert outcomes == [True, False, False, True]
    back = fleet.machine.pinned(200)
    fleet.engine.copy(Span(address(back), 200), fleet.device, OUT, stream=fleet.stream).synchronize()
    assert np.array_equal(back[16:], fleet.home[16:])
    assert set(back[:16]) == {0xA5}
    driver.arm()
    assert np.array_equal(fleet.on_device(), fleet.home)
    fleet.close()
