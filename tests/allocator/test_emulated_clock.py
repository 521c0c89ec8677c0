"""Rule 5: the virtual clock, by links given as plain data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import EmulatedDriver, InvalidRequestError
from memferry_allocator.driver import LinkModel
from memferry_allocator.driver.emulated.clock import Link

from .machine import Machine, address, refused

N = 1 << 20
SECOND = LinkModel(0.0, N)  # N bytes take a second
LINKS = {"host_to_device": SECOND, "device_to_host": SECOND, "on_device": SECOND, "peer": SECOND}


class Track:
    """A machine whose copies take whole seconds."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.driver: EmulatedDriver = machine.driver  # type: ignore[assignment]
        self.ptr = [machine.device(N) for _ in range(3)]
        self.data = [address(machine.pinned(N)) for _ in range(3)]
        self.streams = [machine.stream() for _ in range(3)]

    def copy(self, dst: int, src: int, stream: int, nbytes: int = N) -> None:
        self.driver.copy(dst, src, nbytes, stream=self.streams[stream])

    def h2d(self, which: int, stream: int, nbytes: int = N) -> None:
        self.copy(self.ptr[which], self.data[which], stream, nbytes)

    def d2h(self, which: int, stream: int, nbytes: int = N) -> None:
        self.copy(self.data[which], self.ptr[which], stream, nbytes)

    def end(self) -> float:
        """When everything is done."""
        self.driver.synchronize(0)
        return self.driver.now


@pytest.fixture
def track(emulate: Callable[..., Machine]) -> Track:
    return Track(emulate(device_count=2, **LINKS))


def test_time_passes_by_waiting_alone(track: Track) -> None:
    track.h2d(0, 0)
    assert track.driver.now == 0
    track.streams[1].synchronize()
    assert track.driver.now == 0
    assert track.end() == 1
    assert track.end() == 1


def test_one_copy_at_a_time_in_one_direction(track: Track) -> None:
    track.h2d(0, 0)
    track.h2d(1, 1)
    track.h2d(2, 2, N // 2)
    track.streams[1].synchronize()
    assert track.driver.now == 2
    assert track.end() == 2.5


def test_both_directions_at_once(track: Track) -> None:
    track.h2d(0, 0)
    track.d2h(1, 1)
    assert track.end() == 1


def test_a_stream_keeps_its_order_in_time(track: Track) -> None:
    track.h2d(0, 0)
    track.d2h(1, 0)
    assert track.end() == 2


def test_events_keep_their_order_in_time(track: Track) -> None:
    track.h2d(0, 0)
    track.streams[1].wait(track.streams[0].record())
    track.d2h(0, 1)
    assert track.end() == 2


def test_gaps_are_used(track: Track) -> None:
    track.d2h(0, 0)
    track.streams[1].wait(track.streams[0].record())
    track.h2d(0, 1)  # from 1 to 2
    track.h2d(1, 2, N // 2)  # fits before
    track.streams[2].synchronize()
    assert track.driver.now == 0.5
    assert track.end() == 2


def test_a_gap_that_is_too_short_is_not(track: Track) -> None:
    track.d2h(0, 0, N // 2)
    track.streams[1].wait(track.streams[0].record())
    track.h2d(0, 1)  # from 0.5 to 1.5
    track.h2d(1, 2)  # behind it
    track.streams[2].synchronize()
    assert track.driver.now == 2.5


def test_nothing_starts_in_the_past(track: Track) -> None:
    track.h2d(0, 0)
    assert track.end() == 1
    track.h2d(1, 1)
    assert track.end() == 2


def test_each_link_is_its_own(track: Track) -> None:
    other = track.machine.device(N, 1)
    track.h2d(0, 0)
    track.driver.copy(other, track.data[1], N, stream=track.machine.stream(1))
    track.copy(track.ptr[1], track.ptr[2], 1)
    track.d2h(2, 2)
    track.driver.synchronize(1)
    assert track.end() == 1


def test_peers_have_a_link_each_way(track: Track) -> None:
    there = [track.machine.device(N, 1) for _ in range(2)]
    track.copy(there[0], track.ptr[0], 0)
    track.copy(track.ptr[1], there[1], 1)
    assert track.end() == 1
    track.copy(there[0], track.ptr[0], 0)
    track.copy(there[1], track.ptr[0], 1)
    assert track.end() == 3


def test_fills_take_the_link_they_write_by(track: Track) -> None:
    track.driver.fill(track.ptr[0], 1, N, stream=track.streams[0])
    track.copy(track.ptr[1], track.ptr[2], 1)
    assert track.end() == 2
    track.driver.fill(track.driver.host_device_pointer(track.data[0], 0), 1, N, stream=track.streams[0])
    track.d2h(1, 1)
    track.driver.fill(track.ptr[0], 1, N, stream=track.streams[2])
    assert track.end() == 4


def test_copies_within_the_host_take_no_time(track: Track) -> None:
    track.copy(track.data[0], track.data[1], 0)
    assert track.end() == 0


def test_latency_counts_for_every_copy(emulate: Callable[..., Machine]) -> None:
    track = Track(emulate(**{**LINKS, "host_to_device": LinkModel(0.25, N)}))
    for _ in range(4):
        track.h2d(0, 0, N // 4)
    assert track.end() == 2


def test_events_measure(track: Track) -> None:
    start, middle, end = (track.driver.create_event(0, timing=True) for _ in range(3))
    track.streams[0].record(start)
    track.h2d(0, 0)
    track.streams[0].record(middle)
    track.d2h(0, 0, N // 2)
    track.streams[0].record(end)
    end.synchronize()
    assert middle.elapsed_since(start) == 1
    assert end.elapsed_since(middle) == 0.5
    assert start.elapsed_since(end) == -1.5


def test_events_measure_only_what_is_done(emulate: Callable[..., Machine]) -> None:
    track = Track(emulate(device_count=2, eagerness=0.0))
    start, end = (track.driver.create_event(0, timing=True) for _ in range(2))
    track.streams[0].record(start)
    track.h2d(0, 0)
    track.streams[0].record(end)
    start.synchronize()
    with refused("NOT_READY"):
        end.elapsed_since(start)
    elsewhere = track.driver.create_event(1, timing=True)
    track.machine.stream(1).record(elsewhere).synchronize()
    with refused("INVALID_HANDLE"):
        elsewhere.elapsed_since(start)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("eagerness", [0.0, 0.5, 1.0])
def test_time_does_not_depend_on_what_runs_early(
    emulate: Callable[..., Machine], seed: int, eagerness: float
) -> None:
    track = Track(emulate(seed=seed, eagerness=eagerness, **LINKS))
    for turn in range(12):
        which = turn % 3
        track.h2d(which, which)
        track.d2h(which, which, N // 2)
        if turn % 4 == 3:
            track.streams[(which + 1) % 3].wait(track.streams[which].record())
            track.streams[which].synchronize()
    assert track.end() == 13.5


def test_the_default_links_are_a_real_machine_s(machine: Machine) -> None:
    track = Track(machine)
    track.h2d(0, 0)
    assert track.end() == pytest.approx(10e-6 + N / 55.4e9)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_a_link_carries_one_transfer_at_a_time(requests: list[tuple[int, int]]) -> None:
    """Every transfer starts when it may, at the earliest, and no two of them are under way together."""
    link, taken = Link(LinkModel(0.0, 1.0)), []
    for ready, nbytes in requests:
        start = next(
            begin
            for begin in range(ready, 10_000)
            if all(begin + nbytes <= low or high <= begin for low, high in taken)
        )
        assert link.reserve(float(ready), nbytes) == start + nbytes
        taken.append((start, start + nbytes))


@pytest.mark.parametrize(("latency", "rate"), [(-1.0, 1.0), (0.0, 0.0), (0.0, -1.0)])
def test_links_that_cannot_be(latency: float, rate: float) -> None:
    with pytest.raises(InvalidRequestError, match="link"):
        LinkModel(latency, rate)
