"""The shadow space under any sequence of calls: whatever moves, all see the bytes of the program's order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from memferry_allocator import (
    ArenaOptions,
    ClosedError,
    DirectCopier,
    Direction,
    DriverError,
    EmulatedDriver,
    EmulatedOptions,
    HostArena,
    InvalidRequestError,
    Mode,
    OutOfMemory,
    Partition,
    Place,
    PlannedOrder,
    ShadowSpace,
    Span,
    Stream,
    View,
)

from .machine import Bytes, Machine, address
from .test_pool import round_up

LAZY = ArenaOptions(touch=False)


@dataclass(eq=False)
class Open:
    """A view that is open, and which partition it is of."""

    view: View
    part: int
    streams: list[Stream] = field(default_factory=list)

    @property
    def place(self) -> Place:
        return self.view.place


class Broken(DriverError):
    """A copy that failed on purpose."""


class Flaky(DirectCopier):
    """Fails once after so many copies, when some share of the bytes is on its way."""

    fails_after = -1
    begun = 0.0

    def copy(self, dst: Span, src: Span, direction: Direction, *, stream: Stream) -> Any:
        self.fails_after -= 1
        if self.fails_after == -1:
            part = int(self.begun * dst.nbytes)
            super().copy(Span(dst.ptr, part), Span(src.ptr, part), direction, stream=stream)
            raise Broken("CUDA_ERROR_INVALID_VALUE", "copy", "broken on purpose")
        return super().copy(dst, src, direction, stream=stream)


def _bytes_of(part: Partition) -> Bytes:
    assert part.pages is not None
    return part.pages.array(part.host)


class ShadowMachine(RuleBasedStateMachine):
    """Against a plain byte array a partition.

    Kernels are stood in for in two ways: at once, through the memory behind the pointer (as a framework does
    that computes on the host), and late, as fills and copies enqueued on the stream of the view.
    """

    views = Bundle("views")
    parts = st.integers(0, 5)
    streams = st.integers(0, 2)
    late = st.booleans()

    @initialize(
        seed=st.integers(0, 1000),
        eagerness=st.sampled_from([0.0, 0.2, 1.0]),
        sizes=st.lists(st.integers(1, 2000) | st.integers(900, 1024), min_size=4, max_size=4),
        own=st.lists(st.integers(1, 1000), min_size=2, max_size=2),
        share=st.one_of(st.just(0.0), st.floats(0, 0.8)),
        plan=st.none() | st.lists(parts, max_size=12),
    )
    def begin(
        self,
        seed: int,
        eagerness: float,
        sizes: list[int],
        own: list[int],
        share: float,
        plan: list[int] | None,
    ) -> None:
        self.machine = Machine(EmulatedDriver(EmulatedOptions(seed=seed, eagerness=eagerness)))
        self.driver = self.machine.driver
        self.stream = [self.machine.stream() for _ in range(3)]
        self.thread = ThreadPoolExecutor(1)
        self.arena = HostArena(self.driver, 16_384, LAZY)
        self.smallest = max(map(round_up, [*sizes, *own]))
        self.total = sum(map(round_up, [*sizes, *own]))
        budget = self.smallest + int(share * (self.total - self.smallest))
        self.moves = Flaky(self.driver, 0)
        self.space = ShadowSpace(self.driver, device_budget=budget, host_budget=4096, copier=self.moves)
        self.buffer = list(self.space.buffer("buffer", [self.arena.cut(size) for size in sizes]))
        self.home = [self.arena.array(part.host) for part in self.buffer]
        self.model = [np.arange(size, dtype=np.int64).astype(np.uint8) for size in sizes]
        for home, model in zip(self.home, self.model, strict=True):
            home[:] = model
        self.take_pages(own)
        if plan is not None:
            self.space.eviction = PlannedOrder([self.buffer[part] for part in plan], cyclic=True)
        self.open: list[Open] = []
        self.value = 0
        self.sinks: list[tuple[Bytes, Bytes]] = []

    def take_pages(self, sizes: list[int]) -> None:
        """Two more partitions, over pages of the space's own."""
        self.own = self.space.allocate("own", partitions=sizes, options=LAZY)
        self.buffer[4:] = self.own
        self.home[4:] = [_bytes_of(part) for part in self.own]
        self.model[4:] = [np.zeros(size, np.uint8) for size in sizes]

    # -- what may be asked --------------------------------------------------------------------------------
    def of(self, part: int) -> list[Open]:
        return [held for held in self.open if held.part == part]

    def writing(self, part: int) -> bool:
        return any(held.view.mode.writes for held in self.of(part))

    def conflicts(self, part: int, mode: Mode) -> bool:
        return bool(self.of(part)) if mode.writes else self.writing(part)

    def may_be_full(self, part: int) -> bool:
        """Whether copies in use or pinned can leave no room for another."""
        used = {held.part for held in self.open}
        return any(
            other.copy_address and (other.pins or n in used) for n, other in enumerate(self.buffer) if n != part
        )

    @staticmethod
    def succeeds(call: Callable[[], object]) -> bool:
        """Whether no copy failed that was meant to."""
        try:
            call()
        except Broken:
            return False
        return True

    # -- touching the bytes -------------------------------------------------------------------------------
    def touch(self, held: Open, stream: Stream | None, late: bool, data: Bytes) -> None:
        view, model = held.view, self.model[held.part]
        if stream is None:
            memory = self.home[held.part]
            assert view.ptr == address(memory)
        else:
            if not late:  # a kernel runs after what its stream holds
                self.driver.launch(stream, reads=[view.span]).end()
            memory = np.frombuffer(self.driver.host_bytes(view.ptr, view.nbytes), np.uint8)  # type: ignore[arg-type]
        if view.mode.reads:
            if late and stream is not None:
                sink = self.machine.pinned(len(model))
                self.driver.copy(address(sink), view.ptr, len(model), stream=stream)
                self.sinks.append((sink, model.copy()))
            else:
                assert np.array_equal(memory, model)
        if view.mode.writes:
            whole = view.mode is Mode.WRITE
            start, stop = (0, len(model)) if whole else (len(model) // 3, len(model) // 3 * 2)
            if late and stream is not None:
                self.value = self.value % 255 + 1
                self.driver.fill(view.ptr + start, self.value, stop - start, stream=stream)
                model[start:stop] = self.value
            else:
                fresh = np.resize(data, stop - start)
                memory[start:stop] = fresh
                model[start:stop] = fresh

    # -- the rules ----------------------------------------------------------------------------------------
    @rule(
        target=views,
        part=parts,
        place=st.sampled_from(Place),
        mode=st.sampled_from(Mode),
        s=streams,
        late=late,
        data=st.binary(min_size=1, max_size=8),
    )
    def acquire(self, part: int, place: Place, mode: Mode, s: int, late: bool, data: bytes) -> Any:
        partition, stream = self.buffer[part], None if place is Place.HOST else self.stream[s]
        before = (partition.resident, partition.dirty)
        if self.conflicts(part, mode):
            with pytest.raises(InvalidRequestError, match=r"(buffer|own)\[\d\]: .*open"):
                partition.acquire(place, mode, stream=stream)
            assert (partition.resident, partition.dirty) == before
            return multiple()
        try:
            view = partition.acquire(place, mode, stream=stream)
        except OutOfMemory:
            assert place is Place.DEVICE
            assert not before[0]
            assert self.may_be_full(part)
            return multiple()
        except Broken:
            assert partition.dirty == before[1]
            return multiple()
        held = Open(view, part, [] if stream is None else [stream])
        assert (view.place, view.mode, view.nbytes) == (place, mode, partition.nbytes)
        assert view.streams == tuple(held.streams)
        self.open.append(held)
        self.touch(held, stream, late, np.frombuffer(data, np.uint8))
        return held

    @rule(held=views, which=st.integers(0, 2), late=late, data=st.binary(min_size=1, max_size=8))
    def use(self, held: Open, which: int, late: bool, data: bytes) -> None:
        if held.view.released:
            with pytest.raises(ClosedError, match="acquire it again"):
                _ = held.view.ptr
            with pytest.raises(ClosedError):
                _ = held.view.span
            return
        if held.view.mode is not Mode.WRITE:  # which may replace the bytes only once without a fetch
            stream = held.streams[which % len(held.streams)] if held.streams else None
            self.touch(held, stream, late, np.frombuffer(data, np.uint8))

    @rule(held=views, s=streams, late=late)
    def record_stream(self, held: Open, s: int, late: bool) -> None:
        view, stream = held.view, self.stream[s]
        if view.released:
            with pytest.raises(ClosedError):
                view.record_stream(stream)
        elif stream in held.streams:
            view.record_stream(stream)
        elif view.mode.writes or view.place is Place.HOST:
            with pytest.raises(InvalidRequestError, match="one user"):
                view.record_stream(stream)
        else:
            view.record_stream(stream)
            held.streams.append(stream)
            self.touch(held, stream, late, np.zeros(1, np.uint8))
        if not view.released:
            assert view.streams == tuple(held.streams)

    @rule(held=consumes(views), twice=st.booleans())
    def release(self, held: Open, twice: bool) -> None:
        held.view.release()
        if held in self.open:
            self.open.remove(held)
        if twice:
            held.view.release()
        assert held.view.released

    @rule(part=parts)
    def prefetch(self, part: int) -> None:
        partition, resident = self.buffer[part], self.buffer[part].resident
        if self.writing(part):
            with pytest.raises(InvalidRequestError, match="open"):
                partition.prefetch()
            return
        try:
            partition.prefetch()
        except OutOfMemory:
            assert not resident
            assert self.may_be_full(part)
        except Broken:
            assert not resident
        else:
            assert partition.resident
            assert resident or not partition.dirty

    @rule(part=parts)
    def pin(self, part: int) -> None:
        partition, pins = self.buffer[part], self.buffer[part].pins
        if any(held.view.mode.writes and held.place is not Place.DEVICE for held in self.of(part)):
            with pytest.raises(InvalidRequestError, match="open"):
                partition.pin()
            return
        try:
            partition.pin()
        except Broken:
            assert partition.pins == pins
        except OutOfMemory:
            assert partition.pins == pins
            assert self.may_be_full(part)
        else:
            assert (partition.pins, partition.resident) == (pins + 1, True)

    @rule(part=parts)
    def unpin(self, part: int) -> None:
        partition, pins = self.buffer[part], self.buffer[part].pins
        if pins:
            partition.unpin()
            assert partition.pins == pins - 1
        else:
            with pytest.raises(InvalidRequestError, match="not pinned"):
                partition.unpin()

    @rule(copies=st.integers(0, 2), begun=st.sampled_from([0.0, 0.5, 1.0]))
    def a_copy_will_fail(self, copies: int, begun: float) -> None:
        self.moves.fails_after, self.moves.begun = copies, begun

    @rule(sizes=st.lists(st.integers(1, 1000), min_size=2, max_size=2))
    def exchange_pages(self, sizes: list[int]) -> None:
        """Close the buffer whose pages are the space's, and make another."""
        if any(part.in_use or part.pins for part in self.own):
            with pytest.raises(InvalidRequestError, match="close of buffer 'own'"):
                self.own.close()
            return
        gone = list(self.own)
        sizes = [min(size, self.smallest) for size in sizes]
        self.own.close()
        for part in gone:
            with pytest.raises(ClosedError):
                part.acquire(Place.HOST, Mode.READ)
        self.take_pages(sizes)

    @rule(part=parts)
    def evict(self, part: int) -> None:
        partition = self.buffer[part]
        if partition.pins or any(held.place is Place.DEVICE for held in self.of(part)):
            with pytest.raises(InvalidRequestError, match="open"):
                partition.evict()
        elif self.succeeds(partition.evict):
            assert not partition.resident
        else:
            assert partition.dirty

    @rule(part=parts)
    def write_back(self, part: int) -> None:
        partition, resident = self.buffer[part], self.buffer[part].resident
        if self.writing(part):
            with pytest.raises(InvalidRequestError, match="open"):
                partition.write_back()
        elif self.succeeds(partition.write_back):
            assert (partition.resident, partition.dirty) == (resident, False)
        else:
            assert partition.dirty

    @rule(part=parts)
    def settle(self, part: int) -> None:
        if self.of(part):
            with pytest.raises(InvalidRequestError, match="open"):
                self.buffer[part].settle()
            return
        self.buffer[part].settle()
        with self.space.lock, self.driver.host_access(writes=[self.buffer[part].host]):
            pass  # nobody else is at it

    @rule(share=st.floats(0, 1))
    def resize(self, share: float) -> None:
        budget = self.smallest + int(share * (self.total - self.smallest))
        if self.open or any(part.pins for part in self.buffer):
            before = [part.resident for part in self.buffer]
            with pytest.raises(InvalidRequestError, match="resize: "):
                self.space.resize(budget)
            assert [part.resident for part in self.buffer] == before
        elif self.succeeds(lambda: self.space.resize(budget)):
            assert self.space.pool.nbytes == budget
            assert not any(part.resident for part in self.buffer)

    @rule(part=parts, mode=st.sampled_from(Mode), data=st.binary(min_size=1, max_size=8))
    def host_access_in_another_thread(self, part: int, mode: Mode, data: bytes) -> None:
        """What the space orders between threads needs no other token."""
        if self.conflicts(part, mode):
            return

        def work() -> None:
            with self.buffer[part].acquire(Place.HOST, mode) as view:
                self.touch(Open(view, part), None, False, np.frombuffer(data, np.uint8))

        self.succeeds(lambda: self.thread.submit(work).result())

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "space"):
            return
        copied = [part for part in self.buffer if part.copy_address]
        held = sum(round_up(part.nbytes) for part in copied)
        assert self.space.device_used == self.space.pool.used == held <= self.space.device_budget
        assert all(part.resident or part.pins for part in copied)
        assert set(self.space.room.idle) == {part for part in copied if not part.in_use and not part.pins}
        assert self.space.room.idle_bytes == sum(part.reserved for part in self.space.room.idle)
        assert all(part.resident or not part.dirty for part in self.buffer)
        for index, part in enumerate(self.buffer):
            assert part.in_use == bool(self.of(index))

    def teardown(self) -> None:
        if not hasattr(self, "space"):
            return
        self.moves.fails_after = -1
        if self.open:
            with pytest.raises(InvalidRequestError, match="close: "):
                self.space.close()
        for held in list(self.open):
            held.view.release()
        for index, part in enumerate(self.buffer):
            for _ in range(part.pins):
                part.unpin()
            with part.acquire(Place.HOST, Mode.READ) as view:
                assert np.array_equal(view.array(), self.model[index])
        self.home[4:] = self.model[4:] = []
        self.space.close()
        self.space.close()
        self.thread.shutdown()
        for home, model in zip(self.home, self.model, strict=True):
            assert np.array_equal(home, model)
        self.driver.synchronize(0)
        for sink, expected in self.sinks:
            assert np.array_equal(sink, expected)
        self.machine.close()
        self.moves.close()
        self.arena.close()
        assert self.driver.memory_info(0).free == self.driver.memory_info(0).total


ShadowMachine.TestCase.settings = settings(stateful_step_count=40, max_examples=3 * settings.default.max_examples)
TestShadowMachine = ShadowMachine.TestCase


def test_spans_are_what_a_view_covers() -> None:
    driver = EmulatedDriver()
    arena = HostArena(driver, 4096, LAZY)
    space = ShadowSpace(driver, device_budget=4096)
    partition: Partition = space.buffer("b", [arena.cut(1000)])[0]
    with partition.acquire(Place.DEVICE, Mode.READ, stream=driver.create_stream(0)) as view:
        assert view.span == Span(view.ptr, 1000)
    space.close()
    arena.close()
