"""What a shadow space refuses: a typed error that says what to do, and everything is as it was."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memferry_allocator import (
    AllocatorError,
    CaptureError,
    CaptureMode,
    DriverError,
    EmulatedDriver,
    ForkedError,
    InvalidRequestError,
    Mode,
    OutOfMemory,
    Place,
    ShadowSpace,
    Span,
)

from .machine import Machine, pattern
from .shadow_world import LAZY, SIZE, World, snapshot

HUGE = 1 << 70


@pytest.fixture
def two(emulate: Callable[..., Machine]) -> World:
    """A space whose partitions are at home, copied, and newer on the device, on a machine with two devices."""
    world = World(emulate(device_count=2, eagerness=0.0))
    world.read(world.buffer[1], Place.DEVICE)
    world.write(world.buffer[2], 9)
    return world


# -- streams ----------------------------------------------------------------------------------------------------
def _streams(world: World) -> dict[str, Any]:
    closed = world.driver.create_stream(0)
    closed.close()
    return {
        "none": None,
        "a number": 7,
        "another device's": world.machine.stream(1),
        "another driver's": EmulatedDriver().create_stream(0),
        "closed": closed,
        "fine": world.stream,
    }


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize(
    ("place", "mode", "stream", "match"),
    [
        (Place.HOST, Mode.READ, "fine", "takes no stream"),
        ("device", Mode.READ, "fine", "not a Place and a Mode"),
        (Place.DEVICE, "read", "fine", "not a Place and a Mode"),
        (None, None, "none", "not a Place and a Mode"),
        *(
            (place, mode, stream, match)
            for place in (Place.DEVICE, Place.MAPPED)
            for mode in Mode
            for stream, match in (
                ("none", "create_stream"),
                ("a number", "create_stream"),
                ("another device's", "on device 1"),
                ("another driver's", "this space's driver"),
                ("closed", "closed"),
            )
        ),
    ],
)
def test_acquiring(two: World, part: int, place: Any, mode: Any, stream: str, match: str) -> None:
    streams = _streams(two)
    before = snapshot(two.space)
    with pytest.raises((InvalidRequestError, DriverError), match=match):
        two.buffer[part].acquire(place, mode, stream=streams[stream])
    assert snapshot(two.space) == before


@pytest.mark.parametrize("stream", ["none", "a number", "another device's", "another driver's", "closed"])
@pytest.mark.parametrize("call", ["record_stream", "prefetch"])
def test_further_streams(two: World, call: str, stream: str) -> None:
    if (call, stream) == ("prefetch", "none"):
        return  # which is what it is without
    streams = _streams(two)
    with two.buffer[1].acquire(Place.DEVICE, Mode.READ, stream=two.stream) as view:
        calls: dict[str, Callable[[], None]] = {
            "record_stream": lambda: view.record_stream(streams[stream]),
            "prefetch": lambda: two.part.prefetch(stream=streams[stream]),
        }
        before = snapshot(two.space)
        with pytest.raises((InvalidRequestError, DriverError)):
            calls[call]()
        assert snapshot(two.space) == before
        assert view.streams == (two.stream,)


@pytest.mark.parametrize("place", [Place.DEVICE, Place.MAPPED])
@pytest.mark.parametrize("mode", Mode)
def test_a_stream_that_is_closed_under_its_view(world: World, place: Place, mode: Mode) -> None:
    """Closing it has waited for its work, so that the view ends like any other."""
    stream = world.driver.create_stream(0)
    view = world.part.acquire(place, mode, stream=stream)
    if mode.writes:
        world.driver.fill(view.ptr, 4, SIZE, stream=stream)
    stream.close()
    view.release()
    assert not world.part.in_use
    expected = np.full(SIZE, 4, np.uint8) if mode.writes else pattern(SIZE)
    assert np.array_equal(world.read(world.part, Place.DEVICE, world.other), expected)
    world.part.evict()
    assert np.array_equal(world.read(world.part), expected)


# -- sizes and ranges -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [-1, 1.5, HUGE, "x", "12GB", True, None, b"1", float("nan")])
def test_sizes(two: World, size: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: two.space.allocate("b", size),
        lambda: two.space.allocate("b", partitions=[100, size]),
        lambda: (
            two.space.allocate("b", 1000, partition_nbytes=size) if size is not None else two.space.allocate("b")
        ),
        lambda: two.space.buffer("b", [Span(1 << 20, size)]),
        lambda: two.space.resize(size),
        lambda: ShadowSpace(two.driver, device_budget=size),
        lambda: ShadowSpace(two.driver, device_budget=SIZE, host_budget=0 if size in (None, HUGE) else size),
    ]
    before, free = snapshot(two.space), two.driver.memory_info(0)
    resident = [part.resident for part in two.buffer]
    for index, call in enumerate(calls):
        if index == 4 and size == HUGE:
            continue  # gives the copies up first; see the budget's tests
        with pytest.raises((InvalidRequestError, OutOfMemory)):
            call()
        assert snapshot(two.space) == before
        assert two.driver.memory_info(0) == free
    assert [part.resident for part in two.buffer] == resident


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"nbytes": 10, "partitions": [10]},
        {"partitions": [10], "partition_nbytes": 5},
        {"partition_nbytes": 5},
        {"nbytes": 10, "partition_nbytes": 0},
        {"partitions": [10, 0]},
        {"nbytes": 2 * SIZE + 1},
        {"nbytes": 10 * SIZE, "partition_nbytes": 3 * SIZE},
        {"partitions": [2 * SIZE, 2 * SIZE + 1]},
    ],
)
def test_cuts(two: World, arguments: dict[str, Any]) -> None:
    before = snapshot(two.space)
    with pytest.raises(InvalidRequestError, match="buffer 'b'"):
        two.space.allocate("b", **arguments)
    assert snapshot(two.space) == before


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        ([(0, 64), (32, 64)], "overlap"),
        ([(64, 64), (0, 65)], "overlap"),
        ([(0, 64), (0, 64)], "overlap"),
        ([(1, 64)], "multiple of 16"),
        ([(0, 64), (72, 64)], "multiple of 16"),
        ([(0, 0)], "more than 0 bytes"),
        ([(0, -5)], "more than 0 bytes"),
        ([(-(1 << 62), 64)], "Span"),
        ([None], "Span"),
        ([(0.0, 64)], "Span"),
        ([(0, 64, 1)], "Span"),
    ],
)
def test_ranges(two: World, spans: list[Any], match: str) -> None:
    base = two.arena.address + 8 * SIZE
    moved = [(base + span[0], *span[1:]) if span else span for span in spans]
    before = snapshot(two.space)
    with pytest.raises(InvalidRequestError, match=match):
        two.space.buffer("b", moved)
    assert snapshot(two.space) == before


@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, SIZE), (SIZE // 2, 16), (3 * SIZE - 16, SIZE), (SIZE, 2 * SIZE)]
)
def test_bytes_belong_to_one_partition(two: World, start: int, nbytes: int) -> None:
    own = two.space.allocate("own", 256, options=LAZY)
    before = snapshot(two.space)
    for span in (Span(two.part.host.ptr + start, nbytes), own[0].host):
        with pytest.raises(InvalidRequestError, match=r"overlap.*close the buffer"):
            two.space.buffer("b", [span])
        assert snapshot(two.space) == before
    two.space.buffer("beside", [Span(two.part.host.ptr + 3 * SIZE, SIZE)])


@pytest.mark.parametrize(
    "arguments", [{"driver": None}, {"device": 9}, {"device": -1}, {"device": 1, "pool": True}]
)
def test_spaces_that_cannot_be(two: World, arguments: dict[str, Any]) -> None:
    if "pool" in arguments:
        arguments = {**arguments, "pool": two.space.pool}
    before, free = snapshot(two.space), two.driver.memory_info(0)
    with pytest.raises(AllocatorError):
        ShadowSpace(**{"driver": two.driver, "device_budget": SIZE, **arguments})
    assert snapshot(two.space) == before
    assert two.driver.memory_info(0) == free


# -- captures ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("place", [Place.DEVICE, Place.MAPPED])
@pytest.mark.parametrize("mode", Mode)
def test_views_do_not_begin_in_a_capture(two: World, part: int, place: Place, mode: Mode) -> None:
    two.driver.begin_capture(two.other)
    before = snapshot(two.space)
    with pytest.raises(CaptureError, match="outside the capture"):
        two.buffer[part].acquire(place, mode, stream=two.other)
    with pytest.raises(CaptureError):
        two.part.prefetch(stream=two.other)
    assert snapshot(two.space) == before
    two.driver.end_capture(two.other)  # unharmed


@pytest.mark.parametrize("mode", Mode)
def test_views_do_not_end_in_a_capture(two: World, mode: Mode) -> None:
    view = two.buffer[1].acquire(Place.DEVICE, mode, stream=two.other)
    two.driver.begin_capture(two.other)
    before = snapshot(two.space)
    with pytest.raises(CaptureError, match="after the capture"):
        view.release()
    assert snapshot(two.space) == before
    assert not view.released
    two.driver.end_capture(two.other)
    view.release()
    assert view.released


def test_readers_do_not_join_in_a_capture(two: World) -> None:
    with two.buffer[1].acquire(Place.DEVICE, Mode.READ, stream=two.stream) as view:
        two.driver.begin_capture(two.other)
        with pytest.raises(CaptureError):
            view.record_stream(two.other)
        assert view.streams == (two.stream,)
        two.driver.end_capture(two.other)


@pytest.mark.parametrize("capture", CaptureMode)
def test_a_space_works_beside_a_capture_and_leaves_it_unharmed(two: World, capture: CaptureMode) -> None:
    """Views of other streams and of the host, evictions, new buffers and budgets, under every mode."""
    two.driver.begin_capture(two.other, capture)
    for value, part in enumerate(two.buffer, start=1):
        two.write(part, value)
    for value, part in enumerate(two.buffer, start=1):
        with part.acquire(Place.HOST, Mode.READ_WRITE) as view:
            assert set(view.array()) == {value}
    with two.space.allocate("new", 2 * SIZE, partition_nbytes=SIZE) as buffer:
        two.write(buffer[0], 5, place=Place.MAPPED)
        with buffer[0].pinned():
            buffer[1].prefetch(stream=two.stream)
    two.space.resize(3 * SIZE)
    two.space.close()
    two.driver.end_capture(two.other)


# -- forks ------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_so_whoever_holds_the_lock(two: World) -> None:
    """The lock may have been held by another thread when the process forked, and stays so for ever."""
    view = two.buffer[1].acquire(Place.DEVICE, Mode.READ, stream=two.stream)
    buffer = two.space.allocate("own", 100, options=LAZY)
    entries: list[Callable[[], object]] = [
        lambda: two.part.acquire(Place.HOST, Mode.READ),
        lambda: two.part.acquire(Place.DEVICE, Mode.READ, stream=two.stream),
        two.part.prefetch,
        two.part.evict,
        two.part.write_back,
        two.part.settle,
        two.part.pin,
        two.part.unpin,
        view.release,
        lambda: view.record_stream(two.other),
        lambda: view.export(two),
        lambda: two.space.allocate("b", 100),
        lambda: two.space.buffer("b", []),
        lambda: two.space.resize(SIZE),
        lambda: setattr(two.space, "eviction", two.space.eviction),
        two.space.close,
        buffer.close,
        lambda: ShadowSpace(two.driver, device_budget=SIZE),
    ]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with two.space.lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:  # no assertion, no output: only how many entries told
        told = 0
        for entry in entries:
            try:
                entry()
            except ForkedError:
                told += 1
        os._exit(0 if told == len(entries) else 1)
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    view.release()
    two.space.close()
