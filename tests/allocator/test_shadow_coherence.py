"""What a shadow space moves, who waits for whom, and that a refused move loses nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memferry_allocator import (
    Direction,
    HostArena,
    Mode,
    Place,
    RaceError,
    ShadowSpace,
    Span,
)

from .machine import Machine, address, pages, pattern, refused
from .shadow_world import LAZY, SIZE, World


def test_reading_twice_copies_once(world: World) -> None:
    for stream in (world.stream, world.stream, world.other):
        assert np.array_equal(world.read(world.part, Place.DEVICE, stream), pattern(SIZE))
    assert world.moves.since() == (1, 0)
    assert world.part.resident
    assert not world.part.dirty


def test_writing_fetches_nothing(world: World) -> None:
    world.write(world.part, 7)
    assert world.moves.since() == (0, 0)
    assert world.part.dirty
    assert set(world.read(world.part, Place.DEVICE)) == {7}
    assert world.moves.since() == (0, 0)


def test_bytes_come_home_once(world: World) -> None:
    world.write(world.part, 7)
    for _ in range(2):
        assert set(world.read(world.part)) == {7}
    assert world.moves.since() == (0, 1)
    assert world.part.resident  # both copies are valid
    world.part.write_back()
    world.part.evict()
    assert world.moves.since() == (0, 0)


def test_a_clean_copy_is_dropped_without_a_move(world: World) -> None:
    world.read(world.part, Place.DEVICE)
    world.moves.since()
    world.part.evict()
    assert world.moves.since() == (0, 0)
    assert not world.part.resident


@pytest.mark.parametrize("place", [Place.HOST, Place.MAPPED])
def test_writing_at_home_makes_the_copy_invalid(world: World, place: Place) -> None:
    world.write(world.part, 7)
    with world.part.acquire(place, Mode.WRITE, stream=None if place is Place.HOST else world.stream) as view:
        if place is Place.HOST:
            world.home(world.part)[:] = 8
        else:
            world.driver.fill(view.ptr, 8, SIZE, stream=world.stream)
    assert not world.part.resident
    assert world.moves.since() == (0, 0)  # nor is it worth bringing home what is replaced
    assert set(world.read(world.part, Place.DEVICE)) == {8}
    assert world.moves.since() == (1, 0)


@pytest.mark.parametrize("place", [Place.HOST, Place.MAPPED])
def test_changing_at_home_brings_it_home_first(world: World, place: Place) -> None:
    world.write(world.part, 7)
    with world.part.acquire(place, Mode.READ_WRITE, stream=None if place is Place.HOST else world.stream) as view:
        if place is Place.HOST:
            world.home(world.part)[:10] = 8
        else:
            world.driver.fill(view.ptr, 8, 10, stream=world.stream)
    assert list(world.read(world.part, Place.DEVICE)) == [8] * 10 + [7] * (SIZE - 10)


def test_reading_at_home_keeps_the_copy(world: World) -> None:
    world.read(world.part, Place.DEVICE)
    world.read(world.part, Place.MAPPED)
    world.read(world.part)
    assert world.part.resident
    assert world.moves.since() == (1, 0)


def test_mapped_views_are_the_host_pages(world: World) -> None:
    with world.part.acquire(Place.MAPPED, Mode.READ, stream=world.stream) as view:
        assert view.ptr == world.driver.host_device_pointer(world.part.host.ptr, 0)
    assert world.moves.since() == (0, 0)
    assert world.space.pool.used == 0


def test_prefetch(world: World) -> None:
    world.part.prefetch()
    world.part.prefetch()
    assert world.part.resident
    assert world.moves.since() == (1, 0)
    assert np.array_equal(world.read(world.part, Place.DEVICE), pattern(SIZE))
    assert world.moves.since() == (0, 0)


def test_the_default_copier_is_the_space_s_own(machine: Machine) -> None:
    arena = HostArena(machine.driver, SIZE, LAZY)
    space = ShadowSpace(machine.driver, device_budget=SIZE)
    part = space.buffer("b", [arena.cut(SIZE)])[0]
    arena.array(part.host)[:] = 5
    with part.acquire(Place.DEVICE, Mode.READ_WRITE, stream=machine.stream()) as view:
        assert set(machine.driver.host_bytes(view.ptr, SIZE) or b"") == {5}
    space.close()
    for direction in Direction:
        with refused("INVALID_HANDLE"):
            space.copier.lane(direction).record()
    arena.close()


def test_host_views_block_until_the_bytes_are_there(world: World) -> None:
    """Also on a device that runs everything late."""
    world.write(world.part, 9)
    assert set(world.read(world.part)) == {9}
    world.write(world.part, 10, place=Place.MAPPED)
    assert set(world.read(world.part)) == {10}


def test_host_writes_wait_for_readers_of_the_pages(world: World) -> None:
    out = world.machine.pinned(SIZE)
    with world.part.acquire(Place.MAPPED, Mode.READ, stream=world.stream) as view:
        world.driver.copy(address(out), view.ptr, SIZE, stream=world.stream)
    with world.part.acquire(Place.HOST, Mode.WRITE):
        world.home(world.part)[:] = 0
    world.driver.synchronize(0)
    assert np.array_equal(out, pattern(SIZE))


def test_views_of_two_streams_are_ordered(world: World) -> None:
    """Writer, reader, writer on different streams, none of which knows of the others."""
    out = world.machine.pinned(SIZE)
    world.write(world.part, 1, stream=world.stream)
    with world.part.acquire(Place.DEVICE, Mode.READ, stream=world.other) as view:
        world.driver.copy(address(out), view.ptr, SIZE, stream=world.other)
    world.write(world.part, 2, stream=world.machine.stream())
    assert set(world.read(world.part)) == {2}
    world.other.synchronize()
    assert set(out) == {1}


def test_other_streams_may_read_through_a_view(world: World) -> None:
    out = world.machine.pinned(SIZE)
    world.write(world.part, 3)
    view = world.part.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    view.record_stream(world.other)
    view.record_stream(world.other)
    assert view.streams == (world.stream, world.other)
    world.driver.copy(address(out), view.ptr, SIZE, stream=world.other)
    view.release()
    world.write(world.part, 4)  # waits for both
    assert set(world.read(world.part)) == {4}
    world.driver.synchronize(0)
    assert set(out) == {3}


def test_eviction_waits_for_every_stream_of_a_view(world: World) -> None:
    out = world.machine.pinned(SIZE)
    view = world.part.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    view.record_stream(world.other)
    world.driver.copy(address(out), view.ptr, SIZE, stream=world.other)
    view.release()
    world.part.evict()
    for index in (1, 2):  # takes over the memory
        world.write(world.buffer[index], index)
    world.driver.synchronize(0)
    assert np.array_equal(out, pattern(SIZE))


def test_bytes_used_without_a_view_are_caught(world: World) -> None:
    view = world.part.acquire(Place.DEVICE, Mode.WRITE, stream=world.stream)
    ptr = view.ptr
    with pytest.raises(RaceError):
        world.driver.fill(ptr, 1, SIZE, stream=world.other)
    world.driver.fill(ptr, 1, SIZE, stream=world.stream)
    view.release()
    world.read(world.part, Place.DEVICE, world.other)
    with pytest.raises(RaceError):  # after the release, and after somebody else's use
        world.driver.fill(ptr, 2, SIZE, stream=world.stream)


def test_host_pages_used_without_a_view_are_caught(world: World) -> None:
    world.write(world.part, 1, place=Place.MAPPED)
    with pytest.raises(RaceError), world.driver.host_access(reads=[world.part.host]):
        pass


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("place", [Place.DEVICE, Place.MAPPED])
@pytest.mark.parametrize("state", ["at home", "clean copy", "newer copy"])
def test_a_closed_stream(world: World, place: Place, mode: Mode, state: str) -> None:
    closed = world.driver.create_stream(0)
    closed.close()
    expected = pattern(SIZE)
    if state == "clean copy":
        world.read(world.part, Place.DEVICE)
    elif state == "newer copy":
        world.write(world.part, 7)
        expected = np.full(SIZE, 7, np.uint8)
    for _ in range(2):
        with refused("INVALID_HANDLE"):
            world.part.acquire(place, mode, stream=closed)
        assert not world.part.in_use
    assert world.space.pool.used == (SIZE if world.part.resident else 0)
    assert np.array_equal(world.read(world.part, Place.DEVICE), expected)
    assert np.array_equal(world.read(world.part), expected)


@pytest.mark.parametrize("place", [Place.HOST, Place.MAPPED])
def test_a_race_with_somebody_else_s_use_of_the_pages(world: World, place: Place) -> None:
    """The refused writer has not thrown the newer copy away."""
    world.write(world.part, 7)
    rogue = world.machine.stream()
    world.driver.copy(world.machine.device(SIZE), world.part.host.ptr, SIZE, stream=rogue)
    with pytest.raises(RaceError):
        world.part.acquire(place, Mode.WRITE, stream=None if place is Place.HOST else world.stream)
    assert world.part.dirty
    rogue.synchronize()
    assert set(world.read(world.part)) == {7}


def test_a_race_with_somebody_else_s_use_of_the_copy(world: World) -> None:
    rogue, ptr = world.machine.stream(), world.space.pool.allocate(SIZE, stream=world.stream)
    world.space.pool.deallocate(ptr, SIZE, stream=world.stream)
    world.driver.fill(ptr, 1, SIZE, stream=rogue)  # memory that was given back
    with pytest.raises(RaceError):
        world.part.acquire(Place.DEVICE, Mode.WRITE, stream=world.stream)
    assert not world.part.resident
    assert world.space.pool.used == 0
    rogue.synchronize()
    assert np.array_equal(world.read(world.part, Place.DEVICE), pattern(SIZE))


@pytest.mark.parametrize("way", ["acquire", "prefetch"])
def test_a_copy_in_that_fails(world: World, way: str) -> None:
    world.moves.broken = True
    for _ in range(4):
        with refused("INVALID_VALUE"):
            if way == "acquire":
                world.part.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
            else:
                world.part.prefetch()
        assert not world.part.resident
        assert world.space.pool.used == 0
    world.moves.broken = False
    assert np.array_equal(world.read(world.part, Place.DEVICE), pattern(SIZE))


@pytest.mark.parametrize("way", ["write_back", "evict", "HOST", "MAPPED"])
def test_a_copy_home_that_fails(world: World, way: str) -> None:
    world.write(world.part, 7)
    world.moves.broken = True
    calls: dict[str, Callable[[], object]] = {
        "write_back": world.part.write_back,
        "evict": world.part.evict,
        "HOST": lambda: world.part.acquire(Place.HOST, Mode.READ),
        "MAPPED": lambda: world.part.acquire(Place.MAPPED, Mode.READ_WRITE, stream=world.stream),
    }
    with refused("INVALID_VALUE"):
        calls[way]()
    assert world.part.dirty
    world.moves.broken = False
    assert set(world.read(world.part)) == {7}


@pytest.mark.parametrize("place", Place)
def test_a_copy_home_that_fails_half_way_is_waited_for(world: World, place: Place) -> None:
    """What is under way must neither overwrite newer bytes nor read bytes that are being written."""
    world.write(world.part, 7)
    world.moves.broken, world.moves.begun = True, 0.5
    with refused("INVALID_VALUE"):
        world.part.write_back()
    world.moves.broken = False
    if place is Place.HOST:
        with world.part.acquire(place, Mode.WRITE) as view:
            view.array()[:] = 8
    else:
        world.write(world.part, 8, place=place, stream=world.other)
    world.driver.synchronize(0)
    assert set(world.read(world.part)) == {8}


def test_mapped_views_of_pages_that_are_not_registered(world: World) -> None:
    data = pages(SIZE)
    part = world.space.buffer("loose", [Span(address(data), SIZE)])[0]
    world.write(part, 7)
    with refused("INVALID_VALUE"):
        part.acquire(Place.MAPPED, Mode.WRITE, stream=world.stream)
    assert part.dirty
    part.evict()
    assert set(data) == {7}
