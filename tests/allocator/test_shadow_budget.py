"""Device and host budgets of a shadow space, its buffers and its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memferry_allocator import (
    ClosedError,
    DriverOutOfMemory,
    HostArena,
    InvalidRequestError,
    Mode,
    OutOfMemory,
    Place,
    ShadowSpace,
    Span,
)

from .machine import Machine
from .shadow_world import LAZY, SIZE, World


def test_a_newer_copy_goes_home_before_its_memory_goes(world: World) -> None:
    for value, part in enumerate(world.buffer, start=1):
        world.write(part, value)
    assert [part.resident for part in world.buffer] == [False, True, True]
    for value, part in enumerate(world.buffer, start=1):
        assert set(world.read(part, Place.DEVICE, world.other)) == {value}


def test_out_of_memory_when_everything_is_in_use(world: World) -> None:
    first, second, third = world.buffer
    world.write(third, 9)
    views = [part.acquire(Place.DEVICE, Mode.READ, stream=world.stream) for part in (first, second)]
    assert not third.resident
    before = (world.space.pool.used, [part.resident for part in world.buffer])
    calls: list[Callable[[], object]] = [
        lambda: third.acquire(Place.DEVICE, Mode.READ, stream=world.stream),
        lambda: third.acquire(Place.DEVICE, Mode.WRITE, stream=world.stream),
        third.prefetch,
    ]
    for call in calls:
        with pytest.raises(OutOfMemory) as caught:
            call()
        assert caught.value.budget == "device pool"
        assert (world.space.pool.used, [part.resident for part in world.buffer]) == before
        assert not third.in_use
    assert set(world.read(third, Place.MAPPED)) == {9}
    for view in views:
        view.release()
    assert set(world.read(third, Place.DEVICE)) == {9}


@pytest.mark.parametrize(("nbytes", "fits"), [(0, False), (-1, False), (1, True), (1280, True), (1281, False)])
def test_partitions_that_never_fit(machine: Machine, nbytes: int, fits: bool) -> None:
    """A budget that is no multiple of the pool's alignment has room for whole multiples only."""
    arena = HostArena(machine.driver, 16 * SIZE, LAZY)
    space = ShadowSpace(machine.driver, device_budget=1300)
    spans = [Span(arena.address, 256), Span(arena.address + SIZE, nbytes)]
    if fits:
        part = space.buffer("b", spans)[1]
        part.acquire(Place.DEVICE, Mode.READ, stream=machine.stream()).release()
    else:
        with pytest.raises(InvalidRequestError, match=r"buffer 'b': partition 1 .*1.27 KiB"):
            space.buffer("b", spans)
        space.resize(2048)  # no half of it is left behind
    space.close()
    arena.close()


def test_the_budget_is_reserved_at_once(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_memory=10 * SIZE)
    free = machine.driver.memory_info(0).free
    space = ShadowSpace(machine.driver, device_budget=3 * SIZE)
    assert free - machine.driver.memory_info(0).free == 3 * SIZE
    with pytest.raises(DriverOutOfMemory):
        ShadowSpace(machine.driver, device_budget=8 * SIZE)
    space.close()
    assert machine.driver.memory_info(0).free == free


def test_resize(world: World) -> None:
    world.write(world.part, 7)
    world.space.resize(SIZE)
    assert not world.part.resident
    assert world.space.pool.nbytes == SIZE
    assert set(world.read(world.part, Place.DEVICE)) == {7}
    world.read(world.buffer[1], Place.DEVICE)
    assert [part.resident for part in world.buffer] == [False, True, False]


@pytest.mark.parametrize("budget", [0, -1, 1 << 60])
def test_a_resize_that_fails_leaves_the_old_budget(world: World, budget: int) -> None:
    world.write(world.part, 7)
    with pytest.raises((InvalidRequestError, DriverOutOfMemory)):
        world.space.resize(budget)
    assert world.space.pool.nbytes == 2 * SIZE
    assert set(world.read(world.part, Place.DEVICE)) == {7}


def test_resizing_and_closing_under_open_views_change_nothing(world: World) -> None:
    world.write(world.part, 7)
    view = world.buffer[1].acquire(Place.MAPPED, Mode.READ, stream=world.stream)
    for call in (lambda: world.space.resize(SIZE), world.space.close):
        with pytest.raises(InvalidRequestError, match=r"views of weights\[1\] are open"):
            call()
        assert world.part.resident
        assert world.part.dirty
    view.release()


def test_closing_brings_everything_home(machine: Machine) -> None:
    world = World(machine)
    for value, part in enumerate(world.buffer, start=1):
        world.write(part, value)
    world.space.close()
    world.space.close()
    for value, part in enumerate(world.buffer, start=1):
        assert set(world.home(part)) == {value}
    for place in Place:
        with pytest.raises(ClosedError, match="make a new one"):
            world.part.acquire(place, Mode.READ, stream=None if place is Place.HOST else world.stream)
    world.moves.close()
    world.arena.close()


def test_a_buffer_is_a_sequence(world: World) -> None:
    assert len(world.buffer) == 3
    assert world.buffer.nbytes == 3 * SIZE
    assert list(world.buffer) == [world.buffer[0], world.buffer[1], world.buffer[2]]
    assert world.buffer[-1].name == "weights[2]"
    with pytest.raises(IndexError):
        _ = world.buffer[3]
