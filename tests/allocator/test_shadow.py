"""The shadow space, case by case: what moves, who waits, what is refused, and that refusals lose nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from memferry_allocator import (
    ArenaOptions,
    ClosedError,
    DirectCopier,
    Direction,
    DriverError,
    DriverOutOfMemory,
    EmulatedDriver,
    EmulatedOptions,
    HostArena,
    InvalidRequestError,
    MemFerryError,
    Mode,
    OutOfMemory,
    Partition,
    Place,
    RaceError,
    ShadowBuffer,
    ShadowSpace,
    Span,
    Stream,
)

from ..threads import in_threads
from .machine import Bytes, Machine, address, pages, pattern, refused

SIZE = 1024
LAZY = ArenaOptions(touch=False)


class Moves(DirectCopier):
    """Counts the copies of each direction, and refuses them while `broken`."""

    def __init__(self, driver: EmulatedDriver, device: int) -> None:
        super().__init__(driver, device)
        self.made: list[Direction] = []
        self.broken = False

    def copy(self, dst: Span, src: Span, direction: Direction, *, stream: Stream) -> Any:
        if self.broken:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "copy", "broken on purpose")
        self.made.append(direction)
        return super().copy(dst, src, direction, stream=stream)

    def since(self) -> tuple[int, int]:
        """Copies in and out since the last question."""
        counts = (self.made.count(Direction.HOST_TO_DEVICE), self.made.count(Direction.DEVICE_TO_HOST))
        self.made.clear()
        return counts


class World:
    """A space with room for two of the three partitions of a buffer."""

    def __init__(self, machine: Machine, *, budget: int = 2 * SIZE, parts: int = 3) -> None:
        self.machine = machine
        self.driver: EmulatedDriver = machine.driver  # type: ignore[assignment]
        self.arena = HostArena(self.driver, 16 * SIZE, LAZY)
        self.moves = Moves(self.driver, 0)
        self.space = ShadowSpace(self.driver, device_budget=budget, copier=self.moves)
        self.buffer: ShadowBuffer = self.space.buffer("weights", [self.arena.cut(SIZE) for _ in range(parts)])
        self.part: Partition = self.buffer[0]
        self.stream, self.other = machine.stream(), machine.stream()
        for index, part in enumerate(self.buffer):
            self.home(part)[:] = pattern(SIZE, index)

    def home(self, part: Partition) -> Bytes:
        """The host pages, whoever may be writing them."""
        return self.arena.array(part.host)

    def write(
        self, part: Partition, value: int, *, place: Place = Place.DEVICE, stream: Stream | None = None
    ) -> None:
        """Replace every byte by a kernel that runs late."""
        stream = stream or self.stream
        with part.acquire(place, Mode.WRITE, stream=stream) as view:
            self.driver.fill(view.ptr, value, SIZE, stream=stream)

    def read(self, part: Partition, place: Place = Place.HOST, stream: Stream | None = None) -> Bytes:
        """The bytes as seen in a place."""
        if place is Place.HOST:
            with part.acquire(place, Mode.READ) as view:
                assert view.ptr == part.host.ptr
                return self.home(part).copy()
        with part.acquire(place, Mode.READ, stream=stream or self.stream) as view:
            memory = self.driver.host_bytes(view.ptr, SIZE)
            assert memory is not None
            return np.frombuffer(memory, np.uint8).copy()

    def close(self) -> None:
        self.driver.synchronize(0)
        self.space.close()
        self.moves.close()
        self.arena.close()


@pytest.fixture
def world(machine: Machine) -> Iterator[World]:
    world = World(machine)
    yield world
    world.close()


# -- bytes move only if they must ----------------------------------------------------------------------------
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


# -- who waits -----------------------------------------------------------------------------------------------
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


# -- views ---------------------------------------------------------------------------------------------------
def test_a_view_ends_once_and_for_all(world: World) -> None:
    view = world.part.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    assert view.span == Span(view.ptr, SIZE)
    assert not view.released
    assert world.part.in_use
    view.release()
    view.release()
    assert view.released
    assert not world.part.in_use
    uses: list[Callable[[], object]] = [
        lambda: view.ptr,
        lambda: view.span,
        lambda: view.record_stream(world.other),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match=r"weights\[0\].*acquire it again"):
            use()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("held", Mode)
@pytest.mark.parametrize(
    "places", [(a, b) for a in Place for b in Place], ids=lambda p: f"{p[0].value}-{p[1].value}"
)
def test_readers_share_and_writers_do_not(
    world: World, places: tuple[Place, Place], held: Mode, mode: Mode
) -> None:
    streams = [None if place is Place.HOST else world.stream for place in places]
    view = world.part.acquire(places[0], held, stream=streams[0])
    if held.writes or mode.writes:
        with pytest.raises(InvalidRequestError, match=r"weights\[0\].*open"):
            world.part.acquire(places[1], mode, stream=streams[1])
        view.release()
    world.part.acquire(places[1], mode, stream=streams[1]).release()
    view.release()


@pytest.mark.parametrize("place", [Place.DEVICE, Place.MAPPED])
@pytest.mark.parametrize("mode", [Mode.WRITE, Mode.READ_WRITE])
def test_a_writing_view_has_one_stream(world: World, place: Place, mode: Mode) -> None:
    with world.part.acquire(place, mode, stream=world.stream) as view:
        view.record_stream(world.stream)
        with pytest.raises(InvalidRequestError, match="one user"):
            view.record_stream(world.other)
        assert view.streams == (world.stream,)


def test_a_host_view_has_no_stream(world: World) -> None:
    with world.part.acquire(Place.HOST, Mode.READ) as view:
        assert view.streams == ()
        with pytest.raises(InvalidRequestError, match="one user"):
            view.record_stream(world.stream)


@pytest.mark.parametrize(
    ("place", "mode", "stream", "match"),
    [
        (Place.HOST, Mode.READ, "stream", "takes no stream"),
        (Place.DEVICE, Mode.READ, None, "create_stream"),
        (Place.MAPPED, Mode.WRITE, None, "create_stream"),
        (Place.DEVICE, Mode.READ, "foreign", "on device 1"),
        ("device", Mode.READ, "stream", "not a Place and a Mode"),
        (Place.DEVICE, "read", "stream", "not a Place and a Mode"),
    ],
)
def test_what_cannot_be_acquired(
    emulate: Callable[..., Machine], place: Any, mode: Any, stream: str | None, match: str
) -> None:
    world = World(emulate(device_count=2))
    streams = {"stream": world.stream, "foreign": world.machine.stream(1), None: None}
    with pytest.raises(InvalidRequestError, match=match):
        world.part.acquire(place, mode, stream=streams[stream])
    assert not world.part.in_use
    assert not world.part.resident
    world.close()


def test_a_host_view_can_be_released_by_who_was_handed_it(world: World) -> None:
    view, errors = world.part.acquire(Place.HOST, Mode.WRITE), []
    world.home(world.part)[:] = 1

    def work() -> None:
        try:
            world.home(world.part)[:] = 2
            view.release()
        except MemFerryError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert set(world.read(world.part, Place.DEVICE)) == {2}


def test_a_release_that_is_refused_leaves_the_view_open(world: World) -> None:
    """Another thread releases it while the one that acquired it goes on using the bytes."""
    view, errors = world.part.acquire(Place.HOST, Mode.WRITE), []
    with world.driver.host_access(writes=[world.part.host]):
        world.home(world.part)[:] = 1

    def work() -> None:
        try:
            view.release()
        except RaceError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert not view.released
    assert world.part.in_use
    assert view.ptr == world.part.host.ptr
    view.release()
    assert not world.part.in_use
    assert set(world.read(world.part, Place.DEVICE)) == {1}


# -- refusals lose nothing -----------------------------------------------------------------------------------
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


def test_mapped_views_of_pages_that_are_not_registered(world: World) -> None:
    data = pages(SIZE)
    part = world.space.buffer("loose", [Span(address(data), SIZE)])[0]
    world.write(part, 7)
    with refused("INVALID_VALUE"):
        part.acquire(Place.MAPPED, Mode.WRITE, stream=world.stream)
    assert part.dirty
    part.evict()
    assert set(data) == {7}


# -- the budget ----------------------------------------------------------------------------------------------
def test_the_least_recently_used_copy_goes_first(world: World) -> None:
    first, second, third = world.buffer
    world.read(first, Place.DEVICE)
    world.read(second, Place.DEVICE)
    world.read(first, Place.HOST)  # a use, too
    world.read(third, Place.DEVICE)
    assert [part.resident for part in world.buffer] == [True, False, True]
    third.prefetch()
    first.prefetch()
    world.read(second, Place.DEVICE)
    assert [part.resident for part in world.buffer] == [True, True, False]


def test_copies_in_use_stay(world: World) -> None:
    first, second, third = world.buffer
    with first.acquire(Place.DEVICE, Mode.READ, stream=world.stream):
        world.read(second, Place.DEVICE)
        world.read(third, Place.DEVICE)
        assert [part.resident for part in world.buffer] == [True, False, True]


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
    with pytest.raises(ClosedError):
        world.part.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    assert set(world.read(world.part)) == {1}  # the pages are still there
    world.moves.close()
    world.arena.close()


def test_a_buffer_is_a_sequence(world: World) -> None:
    assert len(world.buffer) == 3
    assert world.buffer.nbytes == 3 * SIZE
    assert list(world.buffer) == [world.buffer[0], world.buffer[1], world.buffer[2]]
    assert world.buffer[-1].name == "weights[2]"
    with pytest.raises(IndexError):
        _ = world.buffer[3]


# -- threads -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
def test_threads_share_a_space(emulate: Callable[..., Machine], seed: int) -> None:
    """Each counts up in partitions of its own, in all places, while all compete for the budget."""
    world = World(emulate(seed=seed, eagerness=0.2), budget=4 * SIZE, parts=8)

    def work(number: int) -> None:
        stream = world.driver.create_stream(0)
        for turn in range(25):
            part = world.buffer[number * 2 + turn % 2]
            place = list(Place)[(turn + number) % 3]
            with part.acquire(place, Mode.WRITE, stream=None if place is Place.HOST else stream) as view:
                if place is Place.HOST:
                    world.home(part)[:] = turn
                else:
                    world.driver.fill(view.ptr, turn, SIZE, stream=stream)
            assert set(world.read(part, list(Place)[turn % 3], stream)) == {turn}
        stream.close()

    in_threads(4, work)
    world.space.close()
    for index, part in enumerate(world.buffer):
        assert set(world.home(part)) == {24 - index % 2}
    world.close()


@pytest.mark.parametrize("seed", range(10))
def test_seeds_change_nothing(emulate: Callable[..., Machine], seed: int) -> None:
    """A longer program whose budget is half of its memory."""
    world = World(emulate(seed=seed, eagerness=0.1), parts=4)
    model = [pattern(SIZE, index).astype(np.int64) for index in range(4)]
    for turn in range(40):
        index, stream = turn * 7 % 4, [world.stream, world.other][turn % 2]
        place = list(Place)[turn % 3]
        part = world.buffer[index]
        with part.acquire(place, Mode.READ_WRITE, stream=None if place is Place.HOST else stream) as view:
            if place is Place.HOST:
                world.home(part)[: turn + 1] = turn
            else:
                world.driver.fill(view.ptr, turn, turn + 1, stream=stream)
        model[index][: turn + 1] = turn
    world.space.close()
    for index, part in enumerate(world.buffer):
        assert np.array_equal(world.home(part), model[index])
    world.close()


def test_a_space_without_memory_makes_nothing() -> None:
    driver = EmulatedDriver(EmulatedOptions(device_memory=SIZE))
    with pytest.raises(DriverOutOfMemory):
        ShadowSpace(driver, device_budget=2 * SIZE)
    assert not driver._streams
