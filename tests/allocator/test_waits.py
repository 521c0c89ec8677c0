"""A test of the tests: whichever wait of a shadow space is left out, it is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memferry_allocator import (
    ArenaOptions,
    EmulatedDriver,
    EmulatedOptions,
    Event,
    HostArena,
    Mode,
    OutOfMemory,
    Partition,
    Place,
    PlannedOrder,
    RaceError,
    ShadowSpace,
    Stream,
)
from memferry_allocator.device.resource import MemoryResource

SIZE, PARTS = 512, 5
LAZY = ArenaOptions(touch=False)


class Forgetful(EmulatedDriver):
    """Leaves out the n-th wait for an event, be it of a stream or of the host.

    A source of memory also waits for the stream that gives it back; the pool has waited for every use by then.
    """

    def __init__(self, forget: int | None, **options: Any) -> None:
        super().__init__(EmulatedOptions(**options))
        self.forget = forget
        self.waits: list[str] = []

    def _unless_forgotten(self, name: str, wait: Callable[[], None]) -> None:
        self.waits.append(name)
        if len(self.waits) - 1 != self.forget:
            wait()

    def stream_wait(self, stream: Stream, event: Event) -> None:
        self._unless_forgotten("stream_wait", lambda: super(Forgetful, self).stream_wait(stream, event))

    def event_synchronize(self, event: Event) -> None:
        self._unless_forgotten("event_synchronize", lambda: super(Forgetful, self).event_synchronize(event))


class Work:
    """A buffer of which three fifths fit.  Every use is on a stream of its own, which knows of no other use."""

    def __init__(self, driver: EmulatedDriver, pool: MemoryResource | None = None) -> None:
        self.driver = driver
        self.arena = HostArena(driver, PARTS * SIZE, ArenaOptions(touch=False))
        self.space = ShadowSpace(driver, device_budget=3 * SIZE, pool=pool)
        self.buffer = self.space.buffer("weights", [self.arena.cut(SIZE) for _ in range(PARTS)])
        self.homes = [self.arena.array(part.host) for part in self.buffer]
        for index, home in enumerate(self.homes):
            home[:] = index
        self.sinks = HostArena(driver, 64 * SIZE, ArenaOptions(touch=False))
        self.seen: list[np.ndarray] = []

    def write(self, index: int, place: Place, value: int, *, part: bool = False) -> None:
        """A kernel that replaces the bytes, or the second half of them."""
        stream = None if place is Place.HOST else self.driver.create_stream(0)
        mode, start = (Mode.READ_WRITE, SIZE // 2) if part else (Mode.WRITE, 0)
        with self.buffer[index].acquire(place, mode, stream=stream) as view:
            if stream is None:
                self.homes[index][start:] = value
            else:
                self.driver.fill(view.ptr + start, value, SIZE - start, stream=stream)

    def read(self, index: int, place: Place, streams: int = 1) -> None:
        """Kernels that keep what they see."""
        if place is Place.HOST:
            with self.buffer[index].acquire(place, Mode.READ):
                self.seen.append(self.homes[index].copy())
            return
        users = [self.driver.create_stream(0) for _ in range(streams)]
        with self.buffer[index].acquire(place, Mode.READ, stream=users[0]) as view:
            for user in users:
                view.record_stream(user)
                sink = self.sinks.cut(SIZE)
                self.driver.copy(sink.ptr, view.ptr, SIZE, stream=user)
                self.seen.append(self.sinks.array(sink))

    def read_through(self, partition: Partition, place: Place) -> None:
        """A kernel on a stream of its own that keeps what it sees of any partition."""
        user, sink = self.driver.create_stream(0), self.sinks.cut(partition.nbytes)
        with partition.acquire(place, Mode.READ, stream=user) as view:
            self.driver.copy(sink.ptr, view.ptr, partition.nbytes, stream=user)
        self.seen.append(self.sinks.array(sink))

    def finish(self) -> list[np.ndarray]:
        self.space.close()
        self.driver.synchronize(0)
        result = [home.copy() for home in (*self.homes, *self.seen)]
        self.arena.close()
        self.sinks.close()
        return result


def work(driver: EmulatedDriver) -> list[np.ndarray]:
    """Loads, evictions, mapped and host accesses, in an order in which nearly every wait is the only one."""
    job = Work(driver)
    for turn in (0, 100):
        job.read(0, Place.MAPPED)
        job.write(0, Place.DEVICE, turn + 1)  # replaces what the mapped read has seen
        job.read(0, Place.DEVICE, streams=2)
        job.write(0, Place.DEVICE, turn + 2, part=True)
        job.buffer[1].prefetch()
        job.read(1, Place.DEVICE)
        job.read(2, Place.DEVICE, streams=2)
        job.write(3, Place.DEVICE, turn + 3)  # in the place of the first, which goes home
        job.read(0, Place.HOST)
        job.write(0, Place.MAPPED, turn + 4)
        job.read(0, Place.MAPPED, streams=2)
        job.write(0, Place.HOST, turn + 5)
        job.write(4, Place.DEVICE, turn + 6)  # in the place of one that was only read
        job.write(3, Place.MAPPED, turn + 7, part=True)
        job.write(3, Place.MAPPED, turn + 8)
        job.read(1, Place.DEVICE)  # in the place of one that went home
        job.write(3, Place.HOST, turn + 9, part=True)
        job.space.resize((3 if turn else 2) * SIZE)
    return job.finish()


def pins_and_pages(driver: EmulatedDriver) -> list[np.ndarray]:
    """Copies that are brought up to date in their place, and buffers that end while they are in use."""
    job = Work(driver)
    for turn in (0, 100):
        with job.buffer[0].pinned():
            job.write(0, Place.MAPPED, turn + 1)
            job.write(0, Place.DEVICE, turn + 2)  # in the place of the old copy, without a load
            job.read(0, Place.DEVICE, streams=2)
            job.buffer[0].write_back()
            job.read(0, Place.MAPPED)
        with job.buffer[4].pinned():
            job.read(4, Place.DEVICE, streams=2)
            job.write(4, Place.MAPPED, turn + 3)
            job.read(4, Place.DEVICE)  # over what those have read
            job.write(4, Place.HOST, turn + 4, part=True)
            job.read(4, Place.DEVICE)
        own = job.space.allocate("own", 2 * SIZE, partition_nbytes=SIZE, options=LAZY)
        for partition in own:
            with partition.acquire(Place.HOST, Mode.WRITE) as view:
                view.array()[:] = turn + 6
        job.read_through(own[0], Place.DEVICE)
        job.read_through(own[1], Place.MAPPED)
        own.close()  # while both are read
        job.write(1, Place.DEVICE, turn + 7)  # in the place of what was closed
        job.space.eviction = PlannedOrder([job.buffer[index] for index in (1, 3, 2)])
        for index in (1, 3, 2):
            job.read(index, Place.DEVICE)
        job.space.resize((3 if turn else 2) * SIZE)
    job.write(0, Place.HOST, 1)
    return job.finish()


class Single(MemoryResource):
    """One block of memory for everybody in turn; whoever gives it back has named the stream of its last use."""

    def __init__(self, driver: EmulatedDriver) -> None:
        self.driver, self.device = driver, 0
        self.ptr = driver.malloc(0, SIZE)
        self.last: Stream | None = None
        self.taken = False

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        if self.taken:
            raise OutOfMemory("taken", size=nbytes, used=SIZE, limit=SIZE, budget="single")
        if self.last is not None:
            stream.wait(self.last.record())
        self.taken = True
        return self.ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        self.last, self.taken = stream, False


def memory_of_others(driver: EmulatedDriver) -> list[np.ndarray]:
    """A resource that knows of one stream only, the one that gives memory back."""
    single = Single(driver)
    job = Work(driver, single)
    for turn in (0, 100):
        job.read(0, Place.DEVICE, streams=2)
        job.write(1, Place.DEVICE, turn + 1)
        job.read(2, Place.DEVICE, streams=2)
        job.read(3, Place.DEVICE)
        job.buffer[3].evict()
        stream = driver.create_stream(0)
        driver.fill(single.allocate(SIZE, stream=stream), 0, SIZE, stream=stream)
        single.deallocate(single.ptr, SIZE, stream=stream)
    return job.finish()


JOBS = [work, pins_and_pages, memory_of_others]


def _same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("work", JOBS)
@pytest.mark.parametrize("seed", range(5))
def test_the_work_has_one_result(work: Callable[[EmulatedDriver], list[np.ndarray]], seed: int) -> None:
    assert _same(work(Forgetful(None, seed=seed, eagerness=0.3)), work(Forgetful(None, eagerness=0.0)))


@pytest.mark.parametrize("work", JOBS)
def test_every_wait_counts(work: Callable[[EmulatedDriver], list[np.ndarray]]) -> None:
    complete = Forgetful(None, eagerness=0.0)
    expected = work(complete)
    assert set(complete.waits) <= {"stream_wait", "event_synchronize"}
    assert len(complete.waits) > 20
    unnoticed = []
    for number, wait in enumerate(complete.waits):
        try:
            noticed = not _same(work(Forgetful(number, eagerness=0.0)), expected)
        except RaceError:
            noticed = True
        if not noticed:
            unnoticed.append((number, wait))
    assert unnoticed == []
