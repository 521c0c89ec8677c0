"""A pool that grows from a source, gives back what it does not need, and lives with captures and finalisers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from memferry_allocator import (
    CaptureError,
    DevicePool,
    DriverMemory,
    DriverOutOfMemory,
    EmulatedDriver,
    EmulatedOptions,
    InvalidRequestError,
    LimitedMemory,
    MemoryResource,
    OutOfMemory,
    RaceError,
    Stream,
    VirtualMemory,
)
from memferry_allocator.device.blocks import MANY_USES, Block, FreeBlocks
from memferry_allocator.device.growth import segment_size
from memferry_allocator.device.marks import Mark

from .blocks import Blocks
from .machine import Machine
from .test_open_driver import in_a_process

KIB, MIB = 1 << 10, 1 << 20
GRANULE = 2 * MIB


@pytest.fixture
def virtual(machine: Machine) -> Iterator[DevicePool]:
    """16 MiB at most, in one piece."""
    source = VirtualMemory(machine.driver, 0, 64 * MIB)
    pool = DevicePool(machine.driver, 0, 0, maximum=16 * MIB, source=source)
    yield pool
    pool.close()
    source.close()


def take_and_give(pool: DevicePool, nbytes: int, stream: Stream) -> int:
    ptr = pool.allocate(nbytes, stream=stream)
    pool.driver.fill(ptr, 1, nbytes, stream=stream)
    pool.deallocate(ptr, nbytes, stream=stream)
    return ptr


# -- growth ------------------------------------------------------------------------------------------------
def test_a_slab_never_changes(machine: Machine) -> None:
    pool, stream = DevicePool(machine.driver, 0, MIB), machine.stream()
    take_and_give(pool, KIB, stream)
    assert pool.trim() == 0
    with pytest.raises(OutOfMemory):
        pool.allocate(MIB + 1, stream=stream)
    assert (pool.nbytes, pool.maximum, pool.reserved, pool.reserved_peak) == (MIB, MIB, MIB, MIB)
    pool.close()
    assert pool.reserved == 0


def test_virtual_memory_grows_by_what_is_lacking(machine: Machine, virtual: DevicePool) -> None:
    stream, blocks = machine.stream(), Blocks(virtual)
    assert virtual.reserved == 0
    first = blocks.take(3 * MIB, stream)
    assert virtual.reserved == 4 * MIB
    second = blocks.take(3 * MIB, stream)  # 1 MiB is there already
    assert (second.ptr, virtual.reserved) == (first.ptr + 3 * MIB, 6 * MIB)
    blocks.give(first, stream)
    third = blocks.take(7 * MIB, stream)
    assert (third.ptr, virtual.reserved) == (second.ptr + 3 * MIB, 14 * MIB)
    blocks.give_all(stream)
    assert virtual.largest_free == 14 * MIB  # no seams


def test_segments_are_shared_by_small_blocks_and_not_by_large_ones(machine: Machine) -> None:
    pool, stream = DevicePool(machine.driver, 0, 0, maximum=64 * MIB), machine.stream()
    blocks = Blocks(pool)
    for _ in range(4):
        blocks.take(100 * KIB, stream)
    assert pool.reserved == 2 * MIB
    blocks.take(12 * MIB + 1, stream)
    assert pool.reserved == 16 * MIB
    for _ in range(4):
        blocks.take(5 * MIB, stream)
    assert pool.reserved == 36 * MIB
    assert blocks.disjoint()
    blocks.give_all(stream)
    assert pool.largest_free == 20 * MIB  # segments do not join
    pool.close()


@pytest.mark.parametrize("granularity", [256, GRANULE])
@pytest.mark.parametrize("size", [256, MIB, MIB + 256, 10 * MIB, 10 * MIB + 256, 100 * MIB])
@pytest.mark.parametrize("joins", [False, True])
def test_segment_sizes(size: int, granularity: int, joins: bool) -> None:
    nbytes = segment_size(size, granularity, joins=joins)
    assert nbytes >= size
    assert nbytes % granularity == 0
    if joins:
        assert nbytes - size < granularity


def test_a_last_segment_that_is_smaller_than_it_would_like_to_be(machine: Machine) -> None:
    pool, stream = DevicePool(machine.driver, 0, 0, maximum=MIB + 300), machine.stream()
    ptr = pool.allocate(KIB, stream=stream)
    assert pool.reserved == MIB + 256
    pool.deallocate(ptr, KIB, stream=stream)
    pool.close()


def test_the_maximum_holds(machine: Machine, virtual: DevicePool) -> None:
    stream, blocks = machine.stream(), Blocks(virtual)
    for _ in range(4):
        blocks.take(4 * MIB, stream)
    with pytest.raises(OutOfMemory, match=r"16.00 MiB of 16.00 MiB in use.*16.00 MiB reserved") as caught:
        virtual.allocate(1, stream=stream)
    assert (caught.value.size, caught.value.limit, caught.value.budget) == (256, 16 * MIB, "device pool")
    blocks.give_all(stream)


def test_a_source_that_has_no_more_is_named_as_the_cause(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_memory=4 * MIB)
    pool, stream = DevicePool(machine.driver, 0, 0, maximum=64 * MIB), machine.stream()
    ptr = pool.allocate(3 * MIB, stream=stream)  # a segment of 20 MiB is not to be had, one of 3 is
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate(2 * MIB, stream=stream)
    assert isinstance(caught.value.__cause__, DriverOutOfMemory)
    pool.deallocate(ptr, 3 * MIB, stream=stream)
    pool.close()


def test_a_source_of_another_device(emulate: Callable[..., Machine]) -> None:
    driver = emulate(device_count=2).driver
    for source in (DriverMemory(driver, 1), DriverMemory(EmulatedDriver(), 0)):
        with pytest.raises(InvalidRequestError, match="another device"):
            DevicePool(driver, 0, MIB, source=source)


class OnItsStreamOnly(DriverMemory):
    """Memory whose last use by somebody else is still under way on the stream it is given for."""

    host_ordered = False

    def _take(self, nbytes: int, stream: Stream) -> int:
        ptr = super()._take(nbytes, stream)
        self.driver.fill(ptr, 0, nbytes, stream=stream)
        return ptr


def test_a_source_that_is_ordered_on_one_stream(machine: Machine) -> None:
    """Without an event, the second stream's write to the rest of the segment would be a race."""
    source = OnItsStreamOnly(machine.driver, 0)
    pool, streams = (
        DevicePool(machine.driver, 0, 0, maximum=4 * MIB, source=source),
        [machine.stream(), machine.stream()],
    )
    blocks = Blocks(pool)
    held = [blocks.take(KIB, stream) for stream in streams]
    assert pool.reserved == 2 * MIB
    for block, stream in zip(held, streams, strict=True):
        blocks.give(block, stream)
    pool.close()


# -- giving memory back ------------------------------------------------------------------------------------
def test_trim_gives_back_whole_unused_segments(machine: Machine, virtual: DevicePool) -> None:
    stream, blocks, free = machine.stream(), Blocks(virtual), machine.driver.memory_info(0).free
    held = [blocks.take(2 * MIB, stream) for _ in range(4)]
    for index in (1, 3):
        blocks.held.remove(held[index])
        machine.driver.fill(held[index].ptr, 7, 2 * MIB, stream=stream)  # under way while it is trimmed
        virtual.deallocate(held[index].ptr, 2 * MIB, stream=stream)
    assert virtual.trim() == 4 * MIB
    assert virtual.trim() == 0
    assert (virtual.reserved, virtual.reserved_peak) == (4 * MIB, 8 * MIB)
    assert machine.driver.memory_info(0).free == free - 4 * MIB
    blocks.give_all(stream)
    assert virtual.trim() == 4 * MIB


def test_room_is_made_out_of_segments_that_are_unused(machine: Machine, virtual: DevicePool) -> None:
    """Free bytes that do not lie side by side do, once they were given back and taken anew."""
    stream, blocks = machine.stream(), Blocks(virtual)
    held = [blocks.take(2 * MIB, stream) for _ in range(8)]
    for block in held[::2]:
        blocks.held.remove(block)
        machine.driver.fill(block.ptr, 7, block.nbytes, stream=stream)
        virtual.deallocate(block.ptr, block.nbytes, stream=stream)
    blocks.take(8 * MIB, stream)
    assert virtual.reserved == 16 * MIB
    assert blocks.disjoint()
    blocks.give_all(stream)


def test_nothing_is_given_back_for_a_request_that_it_would_not_help(machine: Machine, virtual: DevicePool) -> None:
    stream, blocks = machine.stream(), Blocks(virtual)
    blocks.take(6 * MIB, stream)
    take_and_give(virtual, 10 * MIB, stream)
    with pytest.raises(OutOfMemory):
        virtual.allocate(11 * MIB, stream=stream)
    assert virtual.reserved == 16 * MIB
    blocks.give_all(stream)


def test_memory_of_a_segment_that_could_not_be_given_back_is_not_lost(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, stream, free = (
        DevicePool(machine.driver, 0, 0, maximum=MIB),
        machine.stream(),
        machine.driver.memory_info(0).free,
    )
    take_and_give(pool, KIB, stream)

    def refuse(resource: MemoryResource, ptr: int, nbytes: int, *, stream: Stream) -> None:
        raise InvalidRequestError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(DriverMemory, "deallocate", refuse)
        with pytest.raises(InvalidRequestError, match="not now"):
            pool.trim()
    pool.close()
    assert machine.driver.memory_info(0).free == free


def test_a_limit_under_a_pool(machine: Machine) -> None:
    limited = LimitedMemory(VirtualMemory(machine.driver, 0, 64 * MIB), 8 * MIB)
    pool, stream = DevicePool(machine.driver, 0, 0, maximum=64 * MIB, source=limited), machine.stream()
    take_and_give(pool, 8 * MIB, stream)
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate(8 * MIB + 1, stream=stream)
    assert isinstance(caught.value.__cause__, OutOfMemory)
    assert limited.used == pool.reserved
    pool.close()
    assert limited.used == 0


# -- order -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("uses", [False, True])
def test_leaving_out_the_wait_is_a_race(
    machine: Machine, virtual: DevicePool, monkeypatch: pytest.MonkeyPatch, uses: bool
) -> None:
    one, other = machine.stream(), machine.stream()
    ptr = virtual.allocate(MIB, stream=one)
    machine.driver.fill(ptr, 1, MIB, stream=one)
    virtual.deallocate(ptr, MIB, stream=one, uses={one: one.record()} if uses else None)
    monkeypatch.setattr(Mark, "before", lambda mark, stream: None)
    ptr = virtual.allocate(MIB, stream=other)
    with pytest.raises(RaceError):
        machine.driver.fill(ptr, 2, MIB, stream=other)
    virtual.deallocate(ptr, MIB, stream=other)
    one.synchronize()


def test_no_event_is_recorded_for_a_stream_that_keeps_its_memory(
    machine: Machine, virtual: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, recorded = machine.stream(), machine.stream(), []
    record = EmulatedDriver.event_record
    monkeypatch.setattr(
        EmulatedDriver,
        "event_record",
        lambda driver, event, stream: recorded.append(stream) or record(driver, event, stream),
    )
    for nbytes in (MIB, 100, 3 * MIB, MIB, 100):
        take_and_give(virtual, nbytes, one)
    assert recorded == []
    take_and_give(virtual, 4 * MIB, other)
    assert recorded == [one]


def test_uses_stay_few_and_still_cover_everything(machine: Machine) -> None:
    free, driver, streams = FreeBlocks(), machine.driver, [machine.stream() for _ in range(3)]
    for index in range(4 * MANY_USES):
        start, stream = 4096 + 256 * index, streams[index % 3]
        free.add(Block(start, 256, 0, [(start, start + 256, Mark(driver, stream, stream.record()))]))
    (block,) = free
    assert len(block.uses) <= MANY_USES
    for index in range(4 * MANY_USES):
        marks = block.marks(4096 + 256 * index, 4096 + 256 * index + 256)
        assert streams[index % 3] in {mark.stream for mark in marks}
        assert all(mark.event is not None for mark in marks)


# -- captures ----------------------------------------------------------------------------------------------
def test_memory_of_a_captured_stream_is_left_alone(machine: Machine, virtual: DevicePool) -> None:
    """Its event cannot be recorded now; the memory beside it can be had, and all of it afterwards."""
    stream, captured = machine.stream(), machine.stream()
    held = virtual.allocate(2 * MIB, stream=stream)
    theirs = take_and_give(virtual, 12 * MIB, captured)
    machine.driver.begin_capture(captured)
    ptr = virtual.allocate(2 * MIB, stream=stream)
    assert ptr + 2 * MIB <= theirs or theirs + 12 * MIB <= ptr
    assert virtual.trim() == 0
    with pytest.raises(OutOfMemory):
        virtual.allocate(4 * MIB, stream=stream)
    virtual.deallocate(held, 2 * MIB, stream=stream)
    virtual.deallocate(ptr, 2 * MIB, stream=stream)
    with pytest.raises(CaptureError, match="close it afterwards"):
        virtual.close()
    machine.driver.end_capture(captured)
    virtual.deallocate(virtual.allocate(16 * MIB, stream=stream), 16 * MIB, stream=stream)


# -- finalisers, threads and processes ---------------------------------------------------------------------
def test_a_finaliser_gives_memory_back_in_the_middle_of_a_call(
    machine: Machine, virtual: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A garbage collection may start anywhere in the pool's own code."""
    stream, blocks = machine.stream(), [virtual.allocate(KIB, stream=machine.stream()) for _ in range(20)]
    add = FreeBlocks.add

    def collect(free: FreeBlocks, block: Block) -> None:
        if blocks:
            uses = {} if len(blocks) % 2 else None
            virtual.deallocate(blocks.pop(), KIB, stream=stream, uses=uses)
        add(free, block)

    monkeypatch.setattr(FreeBlocks, "add", collect)
    while blocks:
        take_and_give(virtual, KIB, stream)
        virtual.largest_free  # noqa: B018  # merges
    assert virtual.used == 0
    assert virtual.largest_free == virtual.reserved


def test_a_forked_child_is_refused() -> None:
    said = in_a_process(
        "import os\n"
        "from memferry_allocator import DevicePool, DriverMemory, EmulatedDriver, ForkedError, VirtualMemory\n"
        "driver = EmulatedDriver()\n"
        "stream = driver.create_stream(0)\n"
        "pool, virtual = DevicePool(driver, 0, 1 << 20), VirtualMemory(driver, 0, 1 << 20)\n"
        "resources = [pool, DriverMemory(driver, 0), virtual]\n"
        "held = [resource.allocate(256, stream=stream) for resource in resources]\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    refused = 0\n"
        "    for resource, ptr in zip(resources, held):\n"
        "        for call in (\n"
        "            lambda: resource.allocate(256, stream=stream),\n"
        "            lambda: resource.deallocate(ptr, 256, stream=stream),\n"
        "        ):\n"
        "            try: call()\n"
        "            except ForkedError: refused += 1\n"
        "    del pool, virtual, resource, resources\n"
        "    os._exit(refused)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert said == "6"


def test_a_growing_pool_that_nobody_closes() -> None:
    machine = Machine(EmulatedDriver(EmulatedOptions(eagerness=0.0)))
    free, stream = machine.driver.memory_info(0).free, machine.stream()
    source = VirtualMemory(machine.driver, 0, 64 * MIB)
    pool = DevicePool(machine.driver, 0, 0, maximum=16 * MIB, source=source)
    machine.driver.fill(pool.allocate(3 * MIB, stream=stream), 1, 3 * MIB, stream=stream)
    del pool
    assert machine.driver.memory_info(0).free == free
    source.close()
    machine.close()
