"""The device pool: no two live blocks share a byte, and reuse is in the order of the work on the memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memferry_allocator import (
    ClosedError,
    DevicePool,
    DriverError,
    DriverMemory,
    DriverOutOfMemory,
    EmulatedDriver,
    EmulatedOptions,
    Event,
    InvalidRequestError,
    LimitedMemory,
    OutOfMemory,
    SizeOnlyDriver,
    Span,
    Stream,
    VirtualMemory,
)

from ..threads import in_threads
from .machine import Bytes, Machine, address, refused

KIB, MIB = 1 << 10, 1 << 20
ALIGNMENT = 256


class Listening(EmulatedDriver):
    """Notes every wait of a stream."""

    def __init__(self, options: EmulatedOptions | None = None) -> None:
        super().__init__(options)
        self.waits: list[tuple[Stream, Event]] = []
        self.refused = False

    def stream_wait(self, stream: Stream, event: Event) -> None:
        if self.refused:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "stream_wait", "refused on purpose")
        self.waits.append((stream, event))
        super().stream_wait(stream, event)


@pytest.fixture
def pool(machine: Machine) -> Iterator[DevicePool]:
    pool = DevicePool(machine.driver, 0, 4 * KIB)
    yield pool
    machine.driver.synchronize(0)
    pool.close()


# -- any sequence of calls ---------------------------------------------------------------------------------
def round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass
class Live:
    """An allocation, what is in it, and who used it last."""

    ptr: int
    nbytes: int
    value: int
    writer: Stream
    readers: set[Stream] = field(default_factory=set)


class PoolMachine(RuleBasedStateMachine):
    """Against the list of live blocks: everything else is free, and free neighbours are one block.

    A pool whose largest block is looked at after every call has always merged; one that is left alone keeps
    blocks by size.
    """

    unit = 1  # bytes are drawn in these

    blocks = st.integers(0, 100)
    streams = st.integers(0, 2)

    @initialize(
        seed=st.integers(0, 1000),
        eagerness=st.sampled_from([0.0, 0.3]),
        odd=st.integers(0, 255),
        watched=st.booleans(),
    )
    def begin(self, seed: int, eagerness: float, odd: int, watched: bool) -> None:
        self.machine = Machine(EmulatedDriver(EmulatedOptions(seed=seed, eagerness=eagerness)))
        self.driver = self.machine.driver
        self.free = self.driver.memory_info(0).free
        self.pool = self.make_pool(odd)
        owner = self.machine.stream()
        borrowed = self.driver.stream_from_handle(0, int(owner.handle))
        self.stream = [self.machine.stream(), self.machine.stream(), borrowed]
        self.live: list[Live] = []
        self.base = self.pool.allocate(1, stream=self.stream[0])
        self.pool.deallocate(self.base, 1, stream=self.stream[0])
        self.peak = ALIGNMENT
        self.value = 0
        self.sinks: list[tuple[Bytes, int]] = []
        self.watched = watched

    def make_pool(self, odd: int) -> DevicePool:
        return DevicePool(self.driver, 0, 8 * KIB + odd)

    # -- the model --------------------------------------------------------------------------------------
    def gaps(self) -> list[tuple[int, int]]:
        """Start and size of every free block."""
        gaps, start = [], self.base
        for block in sorted(self.live, key=lambda block: block.ptr):
            gaps.append((start, block.ptr - start))
            start = block.ptr + round_up(block.nbytes)
        gaps.append((start, self.base + self.pool.nbytes - start))
        return [gap for gap in gaps if gap[1]]

    def used(self) -> int:
        return sum(round_up(block.nbytes) for block in self.live)

    def pick(self, which: int) -> Live:
        return self.live[which % len(self.live)]

    def write(self, block: Live, stream: Stream) -> None:
        """Head and tail of a block get a new value."""
        self.value = self.value % 250 + 1
        block.value, block.writer, block.readers = self.value, stream, set()
        for start in (0, max(0, block.nbytes - 16)):
            self.driver.fill(block.ptr + start, block.value, min(16, block.nbytes), stream=stream)

    # -- the rules --------------------------------------------------------------------------------------
    @rule(nbytes=st.integers(1, 3000), s=streams)
    def allocate(self, nbytes: int, s: int) -> None:
        nbytes *= self.unit
        refusal = None
        try:
            ptr = self.pool.allocate(nbytes, stream=self.stream[s])
        except OutOfMemory as error:
            refusal = error
        if refusal is not None:
            assert refusal.size == round_up(nbytes)
            assert (refusal.used, refusal.limit) == (self.used(), self.pool.maximum)
            self.check_refused(round_up(nbytes))
            return
        assert ptr % ALIGNMENT == 0
        self.check_place(ptr, round_up(nbytes))
        self.live.append(Live(ptr, nbytes, 0, self.stream[s]))
        self.write(self.live[-1], self.stream[s])
        self.peak = max(self.peak, self.used())

    def check_refused(self, size: int) -> None:
        assert all(room < size for _, room in self.gaps())

    def check_place(self, ptr: int, size: int) -> None:
        fitting = [(start, room) for start, room in self.gaps() if room >= size]
        if self.watched:
            assert (ptr, min(room for _, room in fitting)) in fitting  # the tightest, at its start
        else:
            assert any(start <= ptr and ptr + size <= start + room for start, room in fitting)

    @precondition(lambda self: self.live)
    @rule(which=blocks, s=streams)
    def use_elsewhere(self, which: int, s: int) -> None:
        """Write on a stream that has waited for the uses so far."""
        block, stream = self.pick(which), self.stream[s]
        for other in {block.writer, *block.readers}:
            stream.wait(other.record())
        self.write(block, stream)

    @precondition(lambda self: self.live)
    @rule(which=blocks, s=streams)
    def read(self, which: int, s: int) -> None:
        block, stream = self.pick(which), self.stream[s]
        stream.wait(block.writer.record())
        block.readers.add(stream)
        for start in (0, max(0, block.nbytes - 16)):
            sink = self.machine.pinned(16)[: min(16, block.nbytes)]
            self.driver.copy(address(sink), block.ptr + start, len(sink), stream=stream)
            self.sinks.append((sink, block.value))

    @precondition(lambda self: self.live)
    @rule(which=blocks, recorded=st.booleans())
    def deallocate(self, which: int, recorded: bool) -> None:
        block = self.pick(which)
        if recorded:
            uses = {stream: stream.record() for stream in block.readers or {block.writer}}
            self.pool.deallocate(block.ptr, block.nbytes, stream=block.writer, uses=uses)
        else:
            for reader in block.readers:
                block.writer.wait(reader.record())
            self.pool.deallocate(block.ptr, block.nbytes, stream=block.writer)
        self.live.remove(block)

    @precondition(lambda self: len(self.live) > 1)
    @rule(which=blocks, other=blocks)
    def deallocate_two_in_the_order_of_their_uses_reversed(self, which: int, other: int) -> None:
        """Events that were recorded earlier may come in later."""
        first, second = self.pick(which), self.pick(other)
        if first is second:
            return
        uses = []
        for block in (first, second):
            uses.append({stream: stream.record() for stream in block.readers or {block.writer}})
            self.live.remove(block)
        for block, events in ((second, uses[1]), (first, uses[0])):
            self.pool.deallocate(block.ptr, block.nbytes, stream=block.writer, uses=events)

    @precondition(lambda self: self.live)
    @rule(which=blocks, s=streams, kind=st.sampled_from(["size", "interior", "foreign"]))
    def misuse(self, which: int, s: int, kind: str) -> None:
        block = self.pick(which)
        ptr = {"size": block.ptr, "interior": block.ptr + ALIGNMENT, "foreign": self.base - 4096}[kind]
        if any(other.ptr == ptr for other in self.live if other is not block):
            return
        nbytes = block.nbytes + ALIGNMENT if kind == "size" else block.nbytes
        with pytest.raises(InvalidRequestError, match="not a live allocation"):
            self.pool.deallocate(ptr, nbytes, stream=self.stream[s])

    @rule(s=streams)
    def synchronize(self, s: int) -> None:
        self.stream[s].synchronize()

    @invariant()
    def accounts(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.used == self.used()
            assert self.pool.peak == self.peak
            assert self.pool.used <= self.pool.reserved <= self.pool.reserved_peak <= self.pool.maximum
            if self.watched:
                self.check_largest()

    def check_largest(self) -> None:
        assert self.pool.largest_free == max((size for _, size in self.gaps()), default=0)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.live:
            self.deallocate(0, False)
        self.check_whole()
        assert self.driver.memory_info(0).free == self.free - self.pool.reserved
        self.pool.close()  # waits for what still uses the memory
        assert self.driver.memory_info(0).free == self.free
        self.driver.synchronize(0)
        for sink, value in self.sinks:
            assert set(sink) == {value}
        self.machine.close()

    def check_whole(self) -> None:
        assert self.pool.largest_free == self.pool.nbytes  # one block again


class GrowingPoolMachine(PoolMachine):
    """A pool on virtual memory: what is free may be given back, and its place need not be filled again."""

    unit = KIB

    def make_pool(self, odd: int) -> DevicePool:
        source = VirtualMemory(self.driver, 0, 64 * MIB)
        return DevicePool(self.driver, 0, odd % 2 * MIB, maximum=8 * MIB, source=source)

    @rule()
    def trim(self) -> None:
        before = self.pool.reserved
        assert self.pool.trim() == before - self.pool.reserved

    def check_place(self, ptr: int, size: int) -> None:
        assert all(ptr + size <= block.ptr or block.ptr + round_up(block.nbytes) <= ptr for block in self.live)

    def check_refused(self, size: int) -> None:
        """No granule that is wholly free was held back."""
        assert self.pool.largest_free < size
        granules = {
            granule
            for block in self.live
            for granule in range(block.ptr // (2 * MIB), (block.ptr + block.nbytes - 1) // (2 * MIB) + 1)
        }
        assert 2 * MIB * len(granules) + size > 8 * MIB - 2 * MIB

    def check_largest(self) -> None:
        assert self.pool.largest_free <= self.pool.reserved - self.pool.used

    def check_whole(self) -> None:
        self.pool.trim()
        assert self.pool.reserved == self.pool.nbytes
        assert self.pool.largest_free == self.pool.nbytes


PoolMachine.TestCase.settings = settings(stateful_step_count=40, max_examples=2 * settings.default.max_examples)
TestPoolMachine = PoolMachine.TestCase
GrowingPoolMachine.TestCase.settings = settings(
    stateful_step_count=40, max_examples=2 * settings.default.max_examples
)
TestGrowingPoolMachine = GrowingPoolMachine.TestCase


# -- reuse in stream order ---------------------------------------------------------------------------------
def test_reuse_on_the_same_stream_waits_for_nothing() -> None:
    driver = Listening()
    pool, stream = DevicePool(driver, 0, 4 * KIB), driver.create_stream(0)
    for value in range(5):
        ptr = pool.allocate(4 * KIB, stream=stream)
        driver.fill(ptr, value, 4 * KIB, stream=stream)
        pool.deallocate(ptr, 4 * KIB, stream=stream)
    assert driver.waits == []


def test_reuse_on_another_stream_waits_for_the_last_use() -> None:
    driver = Listening()
    pool = DevicePool(driver, 0, 4 * KIB)
    one, other = driver.create_stream(0), driver.create_stream(0)
    ptr = pool.allocate(KIB, stream=one)
    driver.fill(ptr, 1, KIB, stream=one)
    pool.deallocate(ptr, KIB, stream=one)
    assert pool.allocate(4 * KIB, stream=other) == ptr
    driver.fill(ptr, 2, 4 * KIB, stream=other)
    assert [stream for stream, _ in driver.waits] == [other]


def test_only_uses_before_the_deallocation_are_waited_for() -> None:
    """With `uses`, what the stream got since does not count."""
    driver = Listening(EmulatedOptions(eagerness=0.0))
    pool = DevicePool(driver, 0, 4 * KIB)
    one, other = driver.create_stream(0), driver.create_stream(0)
    ptr = pool.allocate(KIB, stream=one)
    driver.fill(ptr, 1, KIB, stream=one)
    event = one.record()
    late = driver.malloc(0, KIB)
    driver.fill(late, 1, KIB, stream=one)
    pool.deallocate(ptr, KIB, stream=one, uses={one: event})
    pool.allocate(KIB, stream=other)
    assert driver.waits == [(other, event)]
    other.synchronize()
    assert set(driver.host_bytes(late, KIB) or b"") == {0xFF}


def test_a_block_that_came_back_with_events_serves_any_stream() -> None:
    """As it is, behind its own uses and no neighbour's; a wait that is refused leaves it free."""
    driver = Listening(EmulatedOptions(eagerness=0.0))
    pool = DevicePool(driver, 0, 4 * KIB)
    one, other = driver.create_stream(0), driver.create_stream(0)
    blocks = [pool.allocate(KIB, stream=one) for _ in range(4)]
    events = []
    for ptr in blocks:
        driver.fill(ptr, 1, KIB, stream=one)
        events.append(one.record())
    for ptr, event in zip(blocks, events, strict=True):
        pool.deallocate(ptr, KIB, stream=one, uses={one: event})
    driver.refused = True
    with refused("INVALID_VALUE"):
        pool.allocate(KIB, stream=other)
    driver.refused = False
    assert (pool.used, driver.waits) == (0, [])
    assert pool.allocate(KIB, stream=other) == blocks[3]
    assert driver.waits == [(other, events[3])]
    driver.fill(blocks[3], 2, KIB, stream=other)
    assert (pool.used, pool.largest_free) == (KIB, 3 * KIB)
    pool.deallocate(blocks[3], KIB, stream=other)
    assert pool.largest_free == 4 * KIB
    other.synchronize()
    pool.close()


def test_merging_keeps_the_later_use_of_every_stream(machine: Machine, pool: DevicePool) -> None:
    """The block between two free ones is freed last, on a stream of its own; the right one was used first."""
    driver, (one, other, third) = machine.driver, [machine.stream() for _ in range(3)]
    left, middle, right = (pool.allocate(KIB, stream=one) for _ in range(3))
    rest = pool.allocate(KIB, stream=one)
    driver.fill(right, 1, KIB, stream=one)
    pool.deallocate(right, KIB, stream=one)
    driver.fill(left, 2, KIB, stream=one)
    pool.deallocate(left, KIB, stream=one)
    other.wait(one.record())
    driver.fill(middle, 3, KIB, stream=other)
    pool.deallocate(middle, KIB, stream=other)
    ptr = pool.allocate(3 * KIB, stream=third)
    assert ptr == left
    driver.fill(ptr, 4, 3 * KIB, stream=third)
    pool.deallocate(ptr, 3 * KIB, stream=third)
    pool.deallocate(rest, KIB, stream=one)


@pytest.mark.parametrize("earlier", ["left", "right"])
def test_merging_with_events_that_are_older_than_the_neighbour_s(
    machine: Machine, pool: DevicePool, earlier: str
) -> None:
    driver, one, other = machine.driver, machine.stream(), machine.stream()
    blocks = dict(zip(("left", "right"), (pool.allocate(KIB, stream=one) for _ in range(2)), strict=True))
    uses = {}
    later = "left" if earlier == "right" else "right"
    for name in (earlier, later):
        driver.fill(blocks[name], 1, KIB, stream=one)
        uses[name] = {one: one.record()}
    for name in (later, earlier):  # the older event comes in last
        pool.deallocate(blocks[name], KIB, stream=one, uses=uses[name])
    ptr = pool.allocate(2 * KIB, stream=other)
    driver.fill(ptr, 2, 2 * KIB, stream=other)
    pool.deallocate(ptr, 2 * KIB, stream=other)


def test_what_the_host_has_waited_for_needs_no_event(machine: Machine, pool: DevicePool) -> None:
    one, other = machine.stream(), machine.stream()
    ptr = pool.allocate(KIB, stream=one)
    machine.driver.fill(ptr, 1, KIB, stream=one)
    one.synchronize()
    pool.deallocate(ptr, KIB, stream=one, uses={})
    ptr = pool.allocate(KIB, stream=other)
    machine.driver.fill(ptr, 2, KIB, stream=other)
    pool.deallocate(ptr, KIB, stream=other)


# -- misuse ------------------------------------------------------------------------------------------------
def test_the_budget_is_exact(machine: Machine) -> None:
    before = machine.driver.memory_info(0).free
    pool = DevicePool(machine.driver, 0, 12_345)
    assert before - machine.driver.memory_info(0).free == pool.nbytes == 12_345
    pool.close()
    assert machine.driver.memory_info(0).free == before


@pytest.mark.parametrize(("nbytes", "maximum"), [(0, None), (-1, None), (-1, MIB), (0, 0), (MIB, KIB)])
def test_pools_of_nothing(machine: Machine, nbytes: int, maximum: int | None) -> None:
    with pytest.raises(InvalidRequestError, match="not more than zero bytes"):
        DevicePool(machine.driver, 0, nbytes, maximum=maximum)


def test_a_budget_that_the_device_does_not_have(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_memory=MIB)
    with refused("OUT_OF_MEMORY", DriverOutOfMemory):
        DevicePool(machine.driver, 0, MIB + 1)
    assert machine.driver.memory_info(0).free == MIB


def test_out_of_memory_says_what_is_left(machine: Machine, pool: DevicePool) -> None:
    stream = machine.stream()
    blocks = [pool.allocate(KIB, stream=stream) for _ in range(4)]
    for ptr in (blocks[0], blocks[2]):
        pool.deallocate(ptr, KIB, stream=stream)
    before = (pool.used, pool.peak, pool.largest_free)
    with pytest.raises(OutOfMemory) as caught:
        pool.allocate(KIB + 1, stream=stream)
    assert (pool.used, pool.peak, pool.largest_free) == before
    error = caught.value
    assert (error.size, error.used, error.limit, error.budget) == (KIB + 256, 2 * KIB, 4 * KIB, "device pool")
    assert "2.00 KiB of 4.00 KiB in use, largest free block 1.00 KiB" in str(error)
    for ptr in (blocks[1], blocks[3]):
        pool.deallocate(ptr, KIB, stream=stream)


def test_a_double_free(machine: Machine, pool: DevicePool) -> None:
    stream = machine.stream()
    ptr = pool.allocate(100, stream=stream)
    pool.deallocate(ptr, 100, stream=stream)
    with pytest.raises(InvalidRequestError, match="freed twice"):
        pool.deallocate(ptr, 100, stream=stream)
    assert (pool.used, pool.largest_free) == (0, 4 * KIB)


def test_pointers_of_another_pool(machine: Machine, pool: DevicePool) -> None:
    stream, other = machine.stream(), DevicePool(machine.driver, 0, 4 * KIB)
    ptr = other.allocate(100, stream=stream)
    with pytest.raises(InvalidRequestError, match="not a live allocation"):
        pool.deallocate(ptr, 100, stream=stream)
    other.deallocate(ptr, 100, stream=stream)
    other.close()


@pytest.mark.parametrize("stream", [None, 0, "default"])
def test_the_default_stream_is_never_meant(machine: Machine, pool: DevicePool, stream: Any) -> None:
    ptr = pool.allocate(100, stream=(mine := machine.stream()))
    for call in (
        lambda: pool.allocate(100, stream=stream),
        lambda: pool.deallocate(ptr, 100, stream=stream),
    ):
        with pytest.raises(InvalidRequestError, match="expected a memferry_allocator Stream"):
            call()
    assert pool.used == 256
    pool.deallocate(ptr, 100, stream=mine)


def test_streams_of_another_device(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_count=2)
    pool, here, there = DevicePool(machine.driver, 1, KIB), machine.stream(1), machine.stream(0)
    ptr = pool.allocate(100, stream=here)
    for call in (lambda: pool.allocate(100, stream=there), lambda: pool.deallocate(ptr, 100, stream=there)):
        with pytest.raises(InvalidRequestError, match="on device 0, this memory is on device 1"):
            call()
    pool.deallocate(ptr, 100, stream=here)
    pool.close()


def test_a_closed_stream_changes_nothing(machine: Machine, pool: DevicePool) -> None:
    stream, closed = machine.stream(), machine.driver.create_stream(0)
    ptr = pool.allocate(100, stream=stream)
    closed.close()
    with refused("INVALID_HANDLE"):
        pool.deallocate(ptr, 100, stream=closed)
    assert pool.used == 256
    pool.deallocate(ptr, 100, stream=stream)
    with refused("INVALID_HANDLE"):
        pool.allocate(100, stream=closed)
    assert (pool.used, pool.largest_free) == (0, 4 * KIB)


def test_recorded_uses_outlive_their_stream(machine: Machine, pool: DevicePool) -> None:
    stream, other = machine.driver.create_stream(0), machine.stream()
    for uses in (True, False):
        ptr = pool.allocate(KIB, stream=stream)
        machine.driver.fill(ptr, 1, KIB, stream=stream)
        event = stream.record()
        stream.close()
        pool.deallocate(ptr, KIB, stream=stream, uses={stream: event} if uses else {})
        assert pool.allocate(KIB, stream=other) == ptr
        machine.driver.fill(ptr, 2, KIB, stream=other)
        pool.deallocate(ptr, KIB, stream=other)
        stream = machine.driver.create_stream(0)


def test_what_one_thread_has_waited_for_another_may_reuse(machine: Machine, pool: DevicePool) -> None:
    one, other = machine.stream(), machine.stream()
    ptr = pool.allocate(KIB, stream=one)
    machine.driver.fill(ptr, 1, KIB, stream=one)

    def give_back(_: int) -> None:
        one.synchronize()
        pool.deallocate(ptr, KIB, stream=one, uses={})

    in_threads(1, give_back)
    assert pool.allocate(KIB, stream=other) == ptr
    machine.driver.fill(ptr, 2, KIB, stream=other)
    pool.deallocate(ptr, KIB, stream=other)


# -- life --------------------------------------------------------------------------------------------------
def test_closing(machine: Machine) -> None:
    pool, stream = DevicePool(machine.driver, 0, KIB), machine.stream()
    free = machine.driver.memory_info(0).free
    ptr = pool.allocate(100, stream=stream)
    with pytest.raises(InvalidRequestError, match="1 allocations are still live"):
        pool.close()
    machine.driver.fill(ptr, 1, 100, stream=stream)  # it is still a pool
    pool.deallocate(ptr, 100, stream=stream)
    pool.close()
    pool.close()
    assert machine.driver.memory_info(0).free - free == KIB
    with pytest.raises(ClosedError):
        pool.allocate(100, stream=stream)


def test_closing_waits_for_work_on_free_blocks(machine: Machine) -> None:
    pool, streams = DevicePool(machine.driver, 0, 4 * KIB), [machine.stream() for _ in range(3)]
    for stream in streams:
        ptr = pool.allocate(KIB, stream=stream)
        machine.driver.fill(ptr, 1, KIB, stream=stream)
        pool.deallocate(ptr, KIB, stream=stream)
    pool.close()


def test_a_pool_that_nobody_closes(machine: Machine) -> None:
    free = machine.driver.memory_info(0).free
    pool = DevicePool(machine.driver, 0, MIB)
    del pool
    gc.collect()
    assert machine.driver.memory_info(0).free == free


def test_a_pool_that_nobody_closes_while_it_is_used(machine: Machine) -> None:
    free = machine.driver.memory_info(0).free
    pool, stream, data = DevicePool(machine.driver, 0, KIB), machine.stream(), machine.pinned(KIB)
    ptr = pool.allocate(KIB, stream=stream)
    machine.driver.fill(ptr, 1, KIB, stream=stream)
    machine.driver.copy(address(data), ptr, KIB, stream=stream)
    del pool
    gc.collect()
    assert machine.driver.memory_info(0).free == free
    assert set(data) == {1}  # its work was waited for


def test_a_pool_that_nobody_closes_and_that_never_comes_to_rest(machine: Machine) -> None:
    """Its memory is lost rather than given to somebody else; a finaliser has nobody to tell."""
    pool, stream = DevicePool(machine.driver, 0, KIB), machine.stream()
    free = machine.driver.memory_info(0).free
    bracket = machine.driver.launch(stream, writes=[Span(pool.allocate(KIB, stream=stream), KIB)])
    del pool
    gc.collect()
    assert machine.driver.memory_info(0).free == free
    bracket.end()


def test_threads_on_streams_of_their_own(emulate: Callable[..., Machine]) -> None:
    machine = emulate(eagerness=0.2)
    driver, pool = machine.driver, DevicePool(machine.driver, 0, 256 * KIB)

    def work(number: int) -> None:
        mine = Machine(driver)
        stream, out = mine.stream(), np.zeros(2000, np.uint8)
        for turn in range(40):
            sizes = [100 + 37 * (turn % 7), 2000, 5000 + number]
            blocks = [(pool.allocate(size, stream=stream), size) for size in sizes]
            for ptr, size in blocks:
                driver.fill(ptr, number + 1, size, stream=stream)
            driver.copy(address(out), blocks[1][0], 2000, stream=stream)
            stream.synchronize()
            assert set(out) == {number + 1}
            for ptr, size in blocks:
                pool.deallocate(ptr, size, stream=stream)
        mine.close()

    in_threads(8, work)
    assert (pool.used, pool.largest_free) == (0, 256 * KIB)
    driver.synchronize(0)
    pool.close()


# -- giving back while another thread is in the pool ---------------------------------------------------------
class Slow(EmulatedDriver):
    """Stays in `stream_wait` until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go, self.was_told = threading.Event(), threading.Event(), False

    def stream_wait(self, stream: Stream, event: Event) -> None:
        self.inside.set()
        self.was_told = self.go.wait(timeout=10)
        super().stream_wait(stream, event)


@pytest.mark.parametrize("uses", [False, True])
def test_giving_back_does_not_wait_for_another_thread(uses: bool) -> None:
    driver = Slow()
    pool = DevicePool(driver, 0, 4 * KIB)
    one, other = driver.create_stream(0), driver.create_stream(0)
    used, mine, rest = (pool.allocate(nbytes, stream=one) for nbytes in (KIB, KIB, 2 * KIB))
    driver.fill(used, 1, KIB, stream=one)
    pool.deallocate(used, KIB, stream=one)

    def work(number: int) -> None:
        if number == 0:
            assert pool.allocate(KIB, stream=other) == used  # holds the pool meanwhile
            return
        try:
            assert driver.inside.wait(timeout=60)
            pool.deallocate(mine, KIB, stream=one, uses={} if uses else None)
            with pytest.raises(InvalidRequestError, match="freed twice"):
                pool.deallocate(mine, KIB, stream=one)
            with pytest.raises(InvalidRequestError, match="not a live allocation"):
                pool.deallocate(rest, KIB, stream=one)
        finally:
            driver.go.set()

    in_threads(2, work)
    assert driver.was_told
    assert (pool.used, pool.largest_free) == (3 * KIB, KIB)
    assert pool.allocate(KIB, stream=one) == mine
    for ptr, nbytes in ((used, KIB), (mine, KIB), (rest, 2 * KIB)):
        pool.deallocate(ptr, nbytes, stream=one)
    pool.close()


# -- arguments ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("uses", [0, "", [], {1: 2}, "stranger", "captured", "never recorded"])
def test_uses_that_prove_nothing(machine: Machine, pool: DevicePool, uses: Any) -> None:
    driver, stream = machine.driver, machine.stream()
    ptr = pool.allocate(100, stream=stream)
    if uses == "stranger":
        theirs = EmulatedDriver().create_stream(0)
        uses = {theirs: theirs.record()}
    elif uses == "captured":
        uses = {stream: driver.create_event(0)}
        driver.begin_capture(stream)
        stream.record(uses[stream])
        driver.end_capture(stream)
    elif uses == "never recorded":
        uses = {stream: driver.create_event(0)}
    with pytest.raises(InvalidRequestError, match="uses"):
        pool.deallocate(ptr, 100, stream=stream, uses=uses)
    assert pool.used == 256
    pool.deallocate(ptr, 100, stream=stream)


@pytest.mark.parametrize("ptr", [None, 1.5, [], "0", True])
def test_pointers_that_are_none(machine: Machine, pool: DevicePool, ptr: Any) -> None:
    stream = machine.stream()
    for uses in (None, {}):
        with pytest.raises(InvalidRequestError, match="pointer"):
            pool.deallocate(ptr, 100, stream=stream, uses=uses)


@pytest.mark.parametrize("size", [None, 1.0, "1MiB", float("nan"), True, pytest.param(1 << 1030, id="huge")])
def test_sizes_that_are_none(machine: Machine, pool: DevicePool, size: Any) -> None:
    driver, stream = machine.driver, machine.stream()
    calls: list[Callable[[], object]] = [
        lambda: pool.allocate(size, stream=stream),
        lambda: DevicePool(driver, 0, size),
        lambda: VirtualMemory(driver, 0, size),
        lambda: LimitedMemory(pool, size),
        lambda: SizeOnlyDriver(size),
        lambda: DriverMemory(driver, 0).allocate(size, stream=stream),
    ]
    if size is not None:
        calls.append(lambda: DevicePool(driver, 0, KIB, maximum=size))
    for call in calls:
        with pytest.raises(InvalidRequestError):
            call()


def test_sizes_of_numpy_s_kinds(machine: Machine) -> None:
    pool, stream = DevicePool(machine.driver, 0, np.int32(KIB), maximum=np.uint64(MIB)), machine.stream()
    assert (type(pool.nbytes), type(pool.maximum)) == (int, int)
    ptr = pool.allocate(np.int16(100), stream=stream)
    pool.deallocate(np.uint64(ptr), np.uint8(100), stream=stream)
    assert (type(pool.used), pool.used) == (int, 0)
    pool.close()


def test_what_is_no_driver_or_source(machine: Machine) -> None:
    nothing: Any = None
    stranger: Any = "memory"
    for call in (
        lambda: DevicePool(nothing, 0, KIB),
        lambda: DriverMemory(nothing, 0),
        lambda: VirtualMemory(nothing, 0, MIB),
        lambda: DevicePool(machine.driver, 0, KIB, source=stranger),
        lambda: LimitedMemory(stranger, KIB),
    ):
        with pytest.raises(InvalidRequestError):
            call()
