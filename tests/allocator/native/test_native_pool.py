"""The pool in C: no two live blocks share a byte, and reuse is behind the last use by every stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ...threads import in_threads
from .bound import Device, Native, Pool, Refused

KIB, ALIGNMENT = 1 << 10, 256


def round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Order:
    """Which work of other streams each stream is behind, read off the log of the stand-in."""

    def __init__(self, native: Native) -> None:
        self.native = native
        self.read = self._length()
        self.clocks: dict[int, dict[int, int]] = {}
        self.events: dict[int, dict[int, int]] = {}

    def _length(self) -> int:
        return int(self.native.stub.stub_log(self.native.stub_ffi.new("const struct entry **")))

    def number(self, stream: Any) -> int:
        out = self.native.stub_ffi.new("unsigned long long *")
        context = self.native.stub_ffi.new("void **")
        self.native.stub.cuCtxPushCurrent_v2(self.native.stub_ffi.cast("void *", 1))
        self.native.stub.cuStreamGetId(self.native.stub_ffi.cast("void *", stream), out)
        self.native.stub.cuCtxPopCurrent_v2(context)
        return int(out[0])

    def catch_up(self) -> None:
        out = self.native.stub_ffi.new("const struct entry **")
        for index in range(self.read, self.native.stub.stub_log(out)):
            entry = out[0][index]
            clock = self.clocks.setdefault(entry.stream, {})
            if entry.kind == 0:
                self.events[entry.event] = dict(clock)
            else:
                for stream, time in self.events[entry.event].items():
                    clock[stream] = max(clock.get(stream, 0), time)
        self.read = self._length()

    def work(self, stream: int) -> tuple[int, int]:
        """Something is enqueued; its stamp."""
        self.catch_up()
        clock = self.clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return stream, clock[stream]

    def is_behind(self, stream: int, stamp: tuple[int, int]) -> bool:
        self.catch_up()
        return self.clocks.get(stream, {}).get(stamp[0], 0) >= stamp[1]


class PoolMachine(RuleBasedStateMachine):
    """Against the list of live blocks and, for every granule, the last work on it."""

    native: Native  # set by the test
    which, streams = st.integers(0, 100), st.integers(0, 2)

    @initialize(odd=st.integers(0, 255))
    def begin(self, odd: int) -> None:
        self.device = self.native.open()
        self.budget = 8 * KIB + odd
        self.pool = self.device.pool(self.budget)
        self.stream = [self.device.stream() for _ in range(3)]
        self.order = Order(self.native)
        self.number = [self.order.number(stream) for stream in self.stream]
        self.live: dict[int, tuple[int, int]] = {}  # pointer: bytes, stream of its work
        self.shared: dict[int, set[int]] = {}
        self.last: dict[int, list[tuple[int, int]]] = {}  # granule: stamps of its last work
        self.base = self.pool.allocate(1, self.stream[0])
        self.pool.free(self.base, 1, self.stream[0])
        self.peak = ALIGNMENT

    def granules(self, pointer: int, nbytes: int) -> range:
        return range((pointer - self.base) // ALIGNMENT, (pointer - self.base + round_up(nbytes)) // ALIGNMENT)

    def gaps(self) -> list[tuple[int, int]]:
        gaps, start = [], self.base
        for pointer in sorted(self.live):
            gaps.append((start, pointer - start))
            start = pointer + round_up(self.live[pointer][0])
        gaps.append((start, self.base + self.budget - start))
        return [gap for gap in gaps if gap[1]]

    def used(self) -> int:
        return sum(round_up(nbytes) for nbytes, _ in self.live.values())

    def pick(self, which: int) -> int:
        return sorted(self.live)[which % len(self.live)]

    @rule(nbytes=st.integers(1, 3000), s=streams)
    def allocate(self, nbytes: int, s: int) -> None:
        fits = [size for _, size in self.gaps() if size >= round_up(nbytes)]
        if not fits:
            with pytest.raises(Refused, match="largest free block") as caught:
                self.pool.allocate(nbytes, self.stream[s])
            assert caught.value.status == "OUT_OF_MEMORY"
            return
        pointer = self.pool.allocate(nbytes, self.stream[s])
        assert pointer % ALIGNMENT == 0
        assert any(start <= pointer and pointer + round_up(nbytes) <= start + size for start, size in self.gaps())
        for granule in self.granules(pointer, nbytes):
            for stamp in self.last.get(granule, []):
                assert self.order.is_behind(self.number[s], stamp)
        self.live[pointer], self.shared[pointer] = (nbytes, s), set()
        self.peak = max(self.peak, self.used())

    @precondition(lambda self: self.live)
    @rule(which=which, s=streams)
    def free(self, which: int, s: int) -> None:
        pointer = self.pick(which)
        nbytes, _ = self.live.pop(pointer)
        stamps = [self.order.work(self.number[user]) for user in {s, *self.shared.pop(pointer)}]
        for granule in self.granules(pointer, nbytes):
            self.last[granule] = stamps
        self.pool.free(pointer, nbytes, self.stream[s])

    @precondition(lambda self: self.live)
    @rule(which=which, s=streams)
    def share(self, which: int, s: int) -> None:
        self.pool.record_use(self.pick(which), self.stream[s])
        self.shared[self.pick(which)].add(s)

    @precondition(lambda self: self.live)
    @rule(which=which, kind=st.sampled_from(["size", "interior", "foreign"]), s=streams)
    def misuse(self, which: int, kind: str, s: int) -> None:
        pointer = self.pick(which)
        nbytes = self.live[pointer][0] + (ALIGNMENT if kind == "size" else 0)
        wrong = {"size": pointer, "interior": pointer + ALIGNMENT, "foreign": self.base - 4096}[kind]
        if kind != "size" and wrong in self.live:
            return
        with pytest.raises(Refused, match="belong together" if kind == "size" else "not a live allocation"):
            self.pool.free(wrong, nbytes, self.stream[s])

    @rule(s=streams)
    def forget(self, s: int) -> None:
        """The host has waited for the stream: what it did is behind everybody."""
        self.pool.forget(self.stream[s])
        for stamps in self.last.values():
            stamps[:] = [stamp for stamp in stamps if stamp[0] != self.number[s]]
        for users in self.shared.values():
            users.discard(s)

    @precondition(lambda self: self.live)
    @rule(nbytes=st.integers(1, 3000), s=streams)
    def allocate_after_a_join(self, nbytes: int, s: int) -> None:
        """With all that is free joined, it is the tightest gap, at its start."""
        assert self.pool.trim() == 0
        fits = [size for _, size in self.gaps() if size >= round_up(nbytes)]
        if fits:
            self.allocate(nbytes, s)
            pointer = next(reversed(self.live))
            size = self.live.pop(pointer)
            assert (pointer, min(fits)) in self.gaps()
            self.live[pointer] = size

    @precondition(lambda self: not self.live)
    @rule()
    def trim(self) -> None:
        assert self.pool.trim() == self.budget
        assert self.pool.statistics.reserved == 0
        self.base = self.pool.allocate(1, self.stream[0])
        self.pool.free(self.base, 1, self.stream[0])
        self.last = {}

    @invariant()
    def accounts(self) -> None:
        if hasattr(self, "pool"):
            counts = self.pool.statistics
            assert (counts.used, counts.peak, counts.live) == (self.used(), self.peak, len(self.live))
            largest = max((size for _, size in self.gaps()), default=0)
            assert counts.largest_free == largest // ALIGNMENT * ALIGNMENT
            assert counts.cached <= counts.budget - counts.used

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.live:
            self.free(0, 0)
        self.pool.close()
        for stream in self.stream:
            self.device.call("stream_destroy", stream)
        self.device.close()


def test_any_sequence_of_calls(native: Native) -> None:
    PoolMachine.native = native
    from hypothesis.stateful import run_state_machine_as_test

    examples = 3 * settings.default.max_examples
    run_state_machine_as_test(PoolMachine, settings=settings(stateful_step_count=40, max_examples=examples))  # type: ignore[no-untyped-call]


# -- single rules ------------------------------------------------------------------------------------------
@pytest.fixture
def pool(device: Device) -> Iterator[Pool]:
    pool = device.pool(4 * KIB)
    yield pool
    pool.close()


def test_reuse_on_the_same_stream_needs_no_event(native: Native, device: Device, pool: Pool) -> None:
    stream = device.stream()
    order = Order(native)
    pointers = set()
    for _ in range(5):
        pointers.add(pool.allocate(4 * KIB, stream))
        pool.free(pointers.copy().pop(), 4 * KIB, stream)
    assert len(pointers) == 1
    assert order._length() == order.read  # neither recorded nor waited
    assert (pool.statistics.hits, pool.statistics.waits) == (4, 0)


@pytest.mark.parametrize(
    ("strict", "calls"),
    [(False, ["capturing", "identity"]), (True, ["refused", "current", "push", "capturing", "identity"])],
    ids=["streams have contexts", "a context must be current"],
)
def test_a_cached_pair_takes_the_same_few_driver_calls(
    native: Native, device: Device, pool: Pool, strict: bool, calls: list[str]
) -> None:
    """Who the stream is and whether it is captured, under the context if need be: nothing else, however often."""
    native.stub.stub_strict_streams(strict)
    stream = device.stream()
    pool.free(pool.allocate(KIB, stream), KIB, stream)
    native.stub.stub_count_calls(1)
    before = native.stub.stub_calls()
    for _ in range(10):
        pool.free(pool.allocate(KIB, stream), KIB, stream)
    native.stub.stub_count_calls(0)
    assert native.stub.stub_calls() - before == 10 * 2 * len(calls)


def test_one_event_serves_everything_freed_before_it(device: Device, pool: Pool, native: Native) -> None:
    one, other = device.stream(), device.stream()
    blocks = [pool.allocate(KIB, one) for _ in range(4)]
    for pointer in blocks:
        pool.free(pointer, KIB, one)
    order = Order(native)
    again = [pool.allocate(KIB, other) for _ in range(4)]
    out = native.stub_ffi.new("const struct entry **")
    kinds = [out[0][i].kind for i in range(order.read, native.stub.stub_log(out))]
    assert kinds.count(0) == 1
    for pointer in again:
        pool.free(pointer, KIB, other)


def test_joined_memory_waits_for_what_was_freed_last(native: Native, device: Device, pool: Pool) -> None:
    """The event that covers the left half, and was recorded for another block, does not cover the right half."""
    one, other = device.stream(), device.stream()
    order = Order(native)
    numbers = [order.number(stream) for stream in (one, other)]
    left, right, third = (pool.allocate(nbytes, one) for nbytes in (KIB, KIB, 2 * KIB))
    pool.free(left, KIB, one)
    pool.free(third, 2 * KIB, one)
    assert pool.allocate(2 * KIB, other) == third
    last = order.work(numbers[0])
    pool.free(right, KIB, one)
    assert pool.allocate(2 * KIB, other) == left
    assert order.is_behind(numbers[1], last)
    for pointer in (left, third):
        pool.free(pointer, 2 * KIB, other)


def test_the_same_stream_waits_for_others_that_used_the_memory(device: Device, pool: Pool) -> None:
    one, other = device.stream(), device.stream()
    pointer = pool.allocate(KIB, one)
    pool.record_use(pointer, other)
    pool.free(pointer, KIB, one)
    pool.free(pool.allocate(4 * KIB, one), 4 * KIB, one)
    pointer = pool.allocate(KIB, one)
    pool.record_use(pointer, other)
    pool.free(pointer, KIB, one)
    pool.free(pool.allocate(KIB, one), KIB, one)
    assert pool.statistics.waits >= 2


def test_the_legacy_stream_is_one_under_both_its_names(native: Native, device: Device, pool: Pool) -> None:
    null, legacy = native.ffi.NULL, native.ffi.cast("void *", 1)
    pool.free(pool.allocate(KIB, null), KIB, null)
    pool.free(pool.allocate(KIB, legacy), KIB, legacy)
    assert (pool.statistics.waits, pool.statistics.hits) == (0, 1)
    with pytest.raises(Refused, match="UNSUPPORTED: allocate: the per-thread default stream"):
        pool.allocate(KIB, native.ffi.cast("void *", 2))


def test_out_of_memory_says_what_is_left_and_changes_nothing(device: Device, pool: Pool) -> None:
    stream = device.stream()
    blocks = [pool.allocate(KIB, stream) for _ in range(4)]
    for pointer in (blocks[0], blocks[2]):
        pool.free(pointer, KIB, stream)
    with pytest.raises(Refused, match=r"asked for 1\.25 KiB, 2\.00 KiB of 4\.00 KiB in use, largest free block 1"):
        pool.allocate(KIB + 1, stream)
    assert (pool.statistics.used, pool.statistics.largest_free) == (2 * KIB, KIB)
    pool.free(blocks[1], KIB, stream)
    big = pool.allocate(3 * KIB, stream)
    for pointer, nbytes in ((big, 3 * KIB), (blocks[3], KIB)):
        pool.free(pointer, nbytes, stream)


@pytest.mark.parametrize("nbytes", [4 * KIB + 1, 1 << 63, (1 << 64) - 1])
def test_sizes_beyond_the_budget(device: Device, pool: Pool, nbytes: int) -> None:
    with pytest.raises(Refused, match="OUT_OF_MEMORY"):
        pool.allocate(nbytes, device.stream())


def test_nothing_is_a_valid_size(device: Device, pool: Pool) -> None:
    stream = device.stream()
    assert pool.allocate(0, stream) == 0
    pool.free(0, 0, stream)
    assert pool.statistics.allocations == 0


def test_a_double_free_and_foreign_pointers(device: Device, pool: Pool) -> None:
    stream, other = device.stream(), device.pool(4 * KIB)
    pointer, foreign = pool.allocate(100, stream), other.allocate(100, stream)
    pool.free(pointer, 100, stream)
    for wrong in (pointer, foreign, 0):
        with pytest.raises(Refused, match=r"INVALID: free: .* freed twice"):
            pool.free(wrong, 100, stream)
    with pytest.raises(Refused, match="INVALID: record use"):
        pool.record_use(pointer, stream)
    assert (pool.statistics.used, pool.statistics.frees) == (0, 1)
    other.free(foreign, 100, stream)
    other.close()


def test_live_allocations_keep_a_pool_open(device: Device, pool: Pool) -> None:
    stream = device.stream()
    pointer = pool.allocate(1, stream)
    with pytest.raises(Refused, match=r"BUSY: .* 1 allocations are still live"):
        pool.close()
    with pytest.raises(Refused, match="BUSY: close: device 0 still has open pools"):
        device.close()
    assert pool.trim() == 0
    pool.free(pointer, 1, stream)


def test_the_device_may_have_less_than_the_budget(native: Native, device: Device) -> None:
    native.stub.stub_capacity(native.stub.stub_used() + 4 * KIB)
    with pytest.raises(Refused, match=r"OUT_OF_MEMORY: device pool: asked device 0 for 4\.25 KiB, 4\.00 KiB"):
        device.pool(4 * KIB + 256)
    pool = device.pool(4 * KIB)
    pool.trim()
    native.stub.stub_capacity(native.stub.stub_used())
    with pytest.raises(Refused, match="OUT_OF_MEMORY"):
        pool.allocate(1, device.stream())
    assert pool.statistics.used == 0
    pool.close()


def test_a_handle_that_is_used_again_is_another_stream(native: Native, device: Device, pool: Pool) -> None:
    """Without being told: the device is waited for, and nothing is recorded on the old stream."""
    stream = device.stream()
    pool.free(pool.allocate(4 * KIB, stream), 4 * KIB, stream)
    native.stub.stub_reuse_handle(native.stub_ffi.cast("void *", stream))
    native.stub.stub_fail(b"cuCtxSynchronize", 0, 700)
    with pytest.raises(Refused, match="DEVICE_LOST"):  # so it was waited for
        pool.allocate(4 * KIB, stream)
    pool.free(pool.allocate(4 * KIB, stream), 4 * KIB, stream)
    assert (pool.statistics.waits, pool.statistics.hits) == (0, 0)


def test_more_streams_than_a_pool_keeps_apart(device: Device, pool: Pool) -> None:
    for _ in range(600):
        stream = device.stream()
        pool.free(pool.allocate(KIB, stream), KIB, stream)
    assert pool.statistics.used == 0


@pytest.mark.parametrize("call", ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuStreamIsCapturing"])
def test_a_wait_that_fails_changes_nothing(native: Native, device: Device, pool: Pool, call: str) -> None:
    one, other = device.stream(), device.stream()
    pool.free(pool.allocate(4 * KIB, one), 4 * KIB, one)
    native.stub.stub_fail(call.encode(), 1 if call == "cuStreamIsCapturing" else 0, 304)
    with pytest.raises(Refused, match="DRIVER: allocate: CUDA_ERROR_OPERATING_SYSTEM"):
        pool.allocate(KIB, other)
    assert (pool.statistics.used, pool.statistics.largest_free) == (0, 4 * KIB)
    pool.free(pool.allocate(4 * KIB, other), 4 * KIB, other)
    assert pool.statistics.waits == 1


# -- threads -----------------------------------------------------------------------------------------------
def test_threads_allocate_in_one_and_free_in_another(native: Native, device: Device) -> None:
    """Eight threads on streams of their own hand their blocks round; a block is never held twice."""
    pool, count, turns = device.pool(16 << 20), 8, 400
    streams = [device.stream() for _ in range(count)]
    shelves: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    held: dict[int, object] = {}

    def work(number: int) -> None:
        for turn in range(turns):
            nbytes = 100 + 977 * ((turn + number) % 7)
            pointer = pool.allocate(nbytes, streams[number])
            mine = object()
            assert held.setdefault(pointer, mine) is mine
            shelves[(number + 1) % count].append((pointer, nbytes))
            if shelves[number]:
                pointer, nbytes = shelves[number].pop()
                del held[pointer]
                pool.free(pointer, nbytes, streams[number])
            if turn % 50 == 0:
                pool.trim()

    in_threads(count, work)
    for number, shelf in enumerate(shelves):
        for pointer, nbytes in shelf:
            pool.free(pointer, nbytes, streams[number])
    counts = pool.statistics
    assert (counts.used, counts.live, counts.allocations) == (0, 0, count * turns)
    assert counts.largest_free == 16 << 20
    pool.close()
