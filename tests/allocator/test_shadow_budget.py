"""Device and host budgets of a shadow space, its buffers and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import (
    ClosedError,
    DevicePool,
    DriverOutOfMemory,
    EmulatedDriver,
    HostArena,
    InvalidRequestError,
    LeastRecentlyUsed,
    Mode,
    OutOfMemory,
    Place,
    ShadowBuffer,
    ShadowSpace,
    Span,
    Stream,
    registrations,
)
from memferry_allocator.device.resource import MemoryResource

from .machine import Machine, pattern, refused
from .shadow_world import LAZY, SIZE, World, snapshot


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
        assert caught.value.budget == "device budget"
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


@pytest.mark.parametrize("budget", [0, -1, SIZE - 1, 1 << 60])
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


# -- pages of the space's own -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ({"nbytes": 1000}, [1000]),
        ({"nbytes": "1KiB"}, [1024]),
        ({"nbytes": 1000, "partition_nbytes": 300}, [300, 300, 300, 100]),
        ({"nbytes": 600, "partition_nbytes": 300}, [300, 300]),
        ({"nbytes": 100, "partition_nbytes": 300}, [100]),
        ({"nbytes": np.int64(5), "partition_nbytes": "2B"}, [2, 2, 1]),
        ({"partitions": [1, 255, 257, "1KiB"]}, [1, 255, 257, 1024]),
        ({"nbytes": 0}, []),
        ({"nbytes": 0, "partition_nbytes": 10}, []),
        ({"partitions": []}, []),
    ],
)
def test_how_a_buffer_is_cut(world: World, arguments: dict[str, Any], sizes: list[int]) -> None:
    with world.space.allocate("b", **arguments, options=LAZY) as buffer:
        assert [part.nbytes for part in buffer] == sizes
        assert buffer.nbytes == sum(sizes)
        assert [part.name for part in buffer] == [f"b[{index}]" for index in range(len(sizes))]
        ends = [part.host.ptr + part.nbytes for part in buffer]
        assert all(part.host.ptr % 256 == 0 for part in buffer)
        assert all(end <= part.host.ptr for end, part in zip(ends, list(buffer)[1:], strict=False))
        for value, part in enumerate(buffer, start=1):
            with part.acquire(Place.DEVICE, Mode.READ_WRITE, stream=world.stream) as view:
                assert set(world.driver.host_bytes(view.ptr, part.nbytes) or b"") == {0}
                world.driver.fill(view.ptr, value, part.nbytes, stream=world.stream)
        for value, part in enumerate(buffer, start=1):
            with part.acquire(Place.HOST, Mode.READ) as view:
                assert set(view.array()) == {value}
            with part.acquire(Place.MAPPED, Mode.READ, stream=world.other) as view:
                assert view.ptr == world.driver.host_device_pointer(part.host.ptr, 0)


@given(st.lists(st.integers(1, 3000), max_size=8), st.integers(0, 20_000))
def test_the_host_budget_holds(sizes: list[int], budget: int) -> None:
    driver = EmulatedDriver()
    with ShadowSpace(driver, device_budget=4096, host_budget=budget + 1) as space:
        held: list[ShadowBuffer] = []
        for size in sizes:
            used = space.host_used
            assert used == sum(buffer.nbytes for buffer in held) <= budget + 1
            if used + size <= budget + 1:
                held.append(space.allocate("b", size, options=LAZY))
                continue
            with pytest.raises(OutOfMemory) as caught:
                space.allocate("b", size, options=LAZY)
            error = caught.value
            assert (error.size, error.used, error.limit, error.budget) == (size, used, budget + 1, "host budget")
            assert space.host_used == used
            if held:
                held.pop(0).close()
    assert space.host_used == 0
    assert registrations(driver).nbytes == 0


def test_pages_of_the_caller_are_not_in_the_host_budget(world: World) -> None:
    assert world.space.host_used == 0
    assert world.space.host_budget is None


def test_pages_that_cannot_be_had_cost_nothing(world: World) -> None:
    before = snapshot(world.space)
    for size in (1 << 60, 1 << 59):
        with pytest.raises((OutOfMemory, InvalidRequestError)):
            world.space.allocate("b", size, partition_nbytes=SIZE if size < 1 << 50 else None, options=LAZY)
        assert snapshot(world.space) == before
    small = ShadowSpace(world.driver, device_budget=1 << 60, pool=world.space.pool)
    with pytest.raises(OutOfMemory, match="host"):
        small.allocate("b", 1 << 59, options=LAZY)
    assert small.host_used == 0
    small.close()


@pytest.mark.parametrize("state", ["newer on the device", "read in place", "untouched"])
def test_closing_a_buffer_gives_its_pages_back(world: World, state: str) -> None:
    registered = registrations(world.driver).nbytes
    buffer = world.space.allocate("own", partitions=[SIZE, 100], options=LAZY)
    if state == "newer on the device":
        world.write(buffer[0], 5)
    elif state == "read in place":
        with buffer[0].acquire(Place.MAPPED, Mode.READ, stream=world.stream) as view:
            world.driver.copy(world.machine.device(SIZE), view.ptr, SIZE, stream=world.stream)
    world.moves.since()
    buffer.close()
    buffer.close()
    assert buffer.closed
    assert world.moves.since() == (0, 0)  # nobody could see what would come home
    assert registrations(world.driver).nbytes == registered
    assert (world.space.host_used, world.space.device_used) == (0, 0)
    for part in buffer:
        assert part.closed
        for call in (part.prefetch, part.evict, part.write_back, part.settle, part.pin, part.unpin):
            with pytest.raises(ClosedError, match=r"own\[\d\].*make a new one"):
                call()
    assert np.array_equal(world.read(world.part, Place.DEVICE), pattern(SIZE))  # the others are as they were


def test_closing_a_buffer_over_the_caller_s_pages_brings_them_up_to_date(world: World) -> None:
    world.write(world.part, 5)
    host = world.part.host
    world.buffer.close()
    assert set(world.arena.array(host)) == {5}
    again = world.space.buffer("again", [host])  # the pages are free for another
    assert set(world.read(again[0], Place.DEVICE)) == {5}


def test_a_close_that_fails_can_be_tried_again(world: World) -> None:
    for value, part in enumerate(world.buffer, start=1):
        world.write(part, value)
    world.moves.broken = True
    for call in (world.buffer.close, world.space.close):
        with refused("INVALID_VALUE"):
            call()
    world.moves.broken = False
    assert not world.space.closed
    assert not world.buffer.closed
    for value, part in enumerate(world.buffer, start=1):
        assert set(world.read(part)) == {value}
    world.space.close()
    assert world.buffer.closed


def test_spaces_and_buffers_are_context_managers(machine: Machine) -> None:
    with ShadowSpace(machine.driver, device_budget="4KiB", host_budget="1MiB") as space:
        assert (space.device_budget, space.host_budget) == (4096, 1 << 20)
        with space.allocate("b", "2KiB") as buffer:
            assert not buffer.closed
        assert buffer.closed
        assert not space.closed
        kept = space.allocate("c", 1)
    assert space.closed
    assert kept.closed
    calls: list[Callable[[], object]] = [
        lambda: space.allocate("d", 1),
        lambda: space.buffer("d", []),
        lambda: space.resize(4096),
        lambda: setattr(space, "eviction", LeastRecentlyUsed()),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="make a new one"):
            call()
    assert registrations(machine.driver).nbytes == 0
    assert machine.driver.memory_info(0).free == machine.driver.memory_info(0).total


# -- memory of somebody else ------------------------------------------------------------------------------------
class Plain(MemoryResource):
    """Driver memory, block by block: the least that a resource is."""

    def __init__(self, driver: EmulatedDriver) -> None:
        self.driver, self.device = driver, 0
        self.live: dict[int, int] = {}

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        ptr = self.driver.malloc(self.device, nbytes)
        self.live[ptr] = nbytes
        return ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        assert self.live.pop(ptr) == nbytes
        stream.synchronize()  # whose last use it was
        self.driver.free(self.device, ptr)


@pytest.mark.parametrize("kind", ["plain", "larger pool"])
@pytest.mark.parametrize("seed", range(3))
def test_memory_may_come_from_any_resource(emulate: Callable[..., Machine], kind: str, seed: int) -> None:
    """No more than the budget of it, in stream order, and all of it comes back."""
    machine = emulate(seed=seed, eagerness=0.2)
    driver: EmulatedDriver = machine.driver  # type: ignore[assignment]
    pool = Plain(driver) if kind == "plain" else DevicePool(driver, 0, 64 * SIZE)
    with ShadowSpace(driver, device_budget=2 * SIZE, pool=pool) as space:
        assert space.pool is pool
        buffer = space.allocate("b", 5 * SIZE, partition_nbytes=SIZE, options=LAZY)
        streams = [machine.stream() for _ in range(3)]
        for turn in range(30):
            part, stream = buffer[turn * 7 % 5], streams[turn % 3]
            with part.acquire(Place.DEVICE, Mode.READ_WRITE, stream=stream) as view:
                driver.fill(view.ptr + turn, turn, 1, stream=stream)
            assert space.device_used == sum(part.reserved for part in buffer if part.resident) <= 2 * SIZE
        views = [buffer[index].acquire(Place.DEVICE, Mode.READ, stream=streams[0]) for index in (0, 1)]
        with pytest.raises(OutOfMemory) as caught:
            buffer[2].prefetch()
        assert (caught.value.budget, caught.value.limit) == ("device budget", 2 * SIZE)
        for view in views:
            view.release()
        space.resize(3 * SIZE)
        for index in range(5):
            with buffer[index].acquire(Place.HOST, Mode.READ) as view:
                for turn in range(index * 3 % 5, 30, 5):
                    assert view.array()[turn] == turn
    if isinstance(pool, Plain):
        assert pool.live == {}
    else:
        assert pool.used == 0
        pool.close()


def test_memory_of_another_device(emulate: Callable[..., Machine]) -> None:
    driver = emulate(device_count=2).driver
    other = emulate().driver
    for pool in (DevicePool(driver, 1, SIZE), DevicePool(other, 0, SIZE)):
        with pytest.raises(InvalidRequestError, match="same device"):
            ShadowSpace(driver, device_budget=SIZE, pool=pool)
        pool.close()


def test_a_partition_that_is_never_copied_may_be_larger_than_the_budget(world: World) -> None:
    span = world.arena.cut(4 * SIZE)
    with pytest.raises(InvalidRequestError, match="at most the device budget"):
        world.space.buffer("large", [span])
    (large,) = world.space.buffer("large", [span], fitting=False)
    with large.acquire(Place.MAPPED, Mode.WRITE, stream=world.stream) as view:
        world.driver.fill(view.ptr, 7, 4 * SIZE, stream=world.stream)
    with large.acquire(Place.HOST, Mode.READ):
        assert (world.arena.array(span) == 7).all()
    with pytest.raises(OutOfMemory):
        large.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    world.space.resize(SIZE)
    with pytest.raises(InvalidRequestError, match="empty"):
        world.space.buffer("none", [Span(span.ptr, 0)], fitting=False)
