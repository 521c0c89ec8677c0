"""Random programs on the emulated device: it raises `RaceError` for exactly the accesses that race.

A program is a list of steps by two host threads on three streams with events.  A reference that shares
nothing with the device keeps the graph of what happens before what, closed transitively, and says of every
access whether something unordered conflicts with it.  The device must refuse those and only those, must
forget a refused access without a trace, and must leave the bytes of the program's order in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st

from memferry_allocator import EmulatedDriver, EmulatedOptions, Event, RaceError, Span, Stream

from .machine import address, pages

CELLS, CELL = 6, 8  # ranges are whole cells
STREAMS, EVENTS, THREADS, SLOTS = 3, 3, 2, 2


@dataclass
class Held:
    """A bracket that is open: who holds which cells, and since when."""

    cells: range
    write: bool
    actor: object
    known: int
    bracket: Any = None


@dataclass
class Order:
    """What happens before what.  A set of nodes is the bits of an integer; node 0 is the beginning."""

    before: list[int] = field(default_factory=lambda: [0])
    stream: list[int] = field(default_factory=lambda: [0] * STREAMS)
    thread: list[int] = field(default_factory=lambda: [0] * THREADS)
    event: list[int] = field(default_factory=lambda: [0] * EVENTS)
    slot: list[int] = field(default_factory=lambda: [0] * SLOTS)
    accesses: list[tuple[int, range, bool]] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def closure(self, *nodes: int) -> int:
        """Everything up to and including `nodes`."""
        bits = 0
        for node in nodes:
            bits |= self.before[node] | 1 << node
        return bits

    def node(self, *after: int) -> int:
        self.before.append(self.closure(*after))
        return len(self.before) - 1

    def races(self, known: int, actor: object, *touches: tuple[range, bool]) -> bool:
        """Whether an access by `actor`, who comes after `known`, conflicts with an unordered one."""
        for cells, write in touches:
            for held in self.held:
                if held.actor != actor and (write or held.write) and _overlap(cells, held.cells):
                    return True
            for node, others, wrote in self.accesses:
                if (write or wrote) and not known >> node & 1 and _overlap(cells, others):
                    return True
        return False


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


class Counting(EmulatedDriver):
    """Counts the waits that reach the driver."""

    waits = 0

    def stream_wait(self, stream: Stream, event: Event) -> None:
        self.waits += 1
        super().stream_wait(stream, event)


class Program:
    """Runs the steps on the device, in the reference and on plain bytes, and compares at every step."""

    def __init__(self, seed: int, eagerness: float, threads: list[ThreadPoolExecutor]) -> None:
        self.driver = Counting(EmulatedOptions(seed=seed, eagerness=eagerness))
        self.threads = threads
        self.memory = pages(CELLS * CELL)
        self.driver.host_register(address(self.memory), self.memory.nbytes)
        self.model = np.zeros(CELLS * CELL, np.uint8)
        self.streams = [self.driver.create_stream(0) for _ in range(STREAMS)]
        self.events = [self.driver.create_event(0) for _ in range(EVENTS)]
        self.tokens: list[Any] = [{}] * SLOTS
        self.order = Order()
        self.value = 0
        self.sinks, self.seen = pages(60 * CELLS * CELL), np.zeros(0, np.uint8)
        self.driver.host_register(address(self.sinks), self.sinks.nbytes)

    def on(self, thread: int, action: Callable[[], Any]) -> Any:
        return self.threads[thread].submit(action).result()

    def check(self, races: bool, thread: int, action: Callable[[], Any]) -> Any:
        """Do it, and expect a race or none."""
        try:
            result = self.on(thread, action)
        except RaceError:
            assert races, "a race was reported where everything is ordered"
            return None
        assert not races, "a race was not noticed"
        return result

    def new_value(self) -> int:
        self.value = self.value % 250 + 1
        return self.value

    # -- streams ------------------------------------------------------------------------------------
    def enqueue(
        self, t: int, s: int, action: Callable[[], Any], *touches: tuple[range, bool], after: int = 0
    ) -> bool:
        """Enqueue `action`, which touches cells; whether it was accepted."""
        order = self.order
        known = order.closure(order.stream[s], order.thread[t], after)
        races = order.races(known, ("stream", s), *touches)
        self.check(races, t, action)
        if not races:
            order.stream[s] = node = order.node(order.stream[s], order.thread[t], after)
            order.accesses += [(node, cells, write) for cells, write in touches]
        return not races

    def fill(self, t: int, s: int, cells: range, other: range) -> None:
        """Set cells on a stream, by the device's pointer."""
        value, start = self.new_value(), self.driver.host_device_pointer(address(self.memory), 0)
        where, nbytes = start + cells.start * CELL, len(cells) * CELL
        if self.enqueue(
            t, s, lambda: self.driver.fill(where, value, nbytes, stream=self.streams[s]), (cells, True)
        ):
            self.model[cells.start * CELL : cells.stop * CELL] = value

    def copy(self, t: int, s: int, source: range, target: range) -> None:
        """Copy cells on a stream, by the host's pointer."""
        count = min(len(source), len(target))
        source, target = range(source.start, source.start + count), range(target.start, target.start + count)
        if _overlap(source, target):
            return
        of, to = (address(self.memory) + cells.start * CELL for cells in (source, target))
        action = lambda: self.driver.copy(to, of, count * CELL, stream=self.streams[s])  # noqa: E731
        if self.enqueue(t, s, action, (source, False), (target, True)):
            data = self.model[source.start * CELL : source.stop * CELL]
            self.model[target.start * CELL : target.stop * CELL] = data

    def read(self, t: int, s: int, cells: range) -> None:
        """Copy cells on a stream to where nobody else is."""
        sink = self.sinks[len(self.seen) : len(self.seen) + len(cells) * CELL]
        of, to = address(self.memory) + cells.start * CELL, address(sink)
        action = lambda: self.driver.copy(to, of, sink.nbytes, stream=self.streams[s])  # noqa: E731
        if self.enqueue(t, s, action, (cells, False)):
            self.seen = np.concatenate([self.seen, self.model[cells.start * CELL : cells.stop * CELL]])

    def record(self, t: int, s: int, e: int) -> None:
        self.enqueue(t, s, lambda: self.streams[s].record(self.events[e]))
        self.order.event[e] = self.order.stream[s]

    def wait(self, t: int, s: int, e: int) -> None:
        """A wait that the stream leaves out must be one for what it comes after already."""
        order, waits = self.order, self.driver.waits
        self.on(t, lambda: self.streams[s].wait(self.events[e]))
        if self.driver.waits > waits:
            order.stream[s] = order.node(order.stream[s], order.thread[t], order.event[e])
        else:
            assert order.closure(order.stream[s]) >> order.event[e] & 1

    def record_and_wait(self, t: int, one: int, other: int, e: int) -> None:
        self.record(t, one, e)
        self.wait(t, other, e)

    # -- the host -----------------------------------------------------------------------------------
    def knows(self, t: int, *nodes: int) -> None:
        self.order.thread[t] = self.order.node(self.order.thread[t], *nodes)

    def synchronize_stream(self, t: int, s: int) -> None:
        self.on(t, self.streams[s].synchronize)
        self.knows(t, self.order.stream[s])

    def synchronize_event(self, t: int, e: int) -> None:
        self.on(t, self.events[e].synchronize)
        self.knows(t, self.order.event[e])

    def synchronize_device(self, t: int) -> None:
        self.on(t, lambda: self.driver.synchronize(0))
        self.knows(t, *self.order.stream)

    def query_stream(self, t: int, s: int) -> None:
        if self.on(t, self.streams[s].query):
            self.knows(t, self.order.stream[s])

    def query_event(self, t: int, e: int) -> None:
        if self.on(t, self.events[e].query):
            self.knows(t, self.order.event[e])

    def publish(self, t: int, slot: int) -> None:
        self.tokens[slot] = self.on(t, self.driver.publish)
        self.order.slot[slot] = self.order.thread[t]

    def observe(self, t: int, slot: int) -> None:
        self.on(t, lambda: self.driver.observe(self.tokens[slot]))
        self.knows(t, self.order.slot[slot])

    # -- brackets -----------------------------------------------------------------------------------
    def touch(self, cells: range, write: bool) -> None:
        """What happens inside a bracket: the host sees, and sets, the bytes themselves."""
        where = slice(cells.start * CELL, cells.stop * CELL)
        assert np.array_equal(self.memory[where], self.model[where])
        if write:
            self.memory[where] = self.model[where] = self.new_value()

    def begin_launch(self, t: int, s: int, cells: range, write: bool) -> None:
        order = self.order
        known = order.closure(order.stream[s], order.thread[t])
        races = order.races(known, ("stream", s), (cells, write))
        start = self.driver.host_device_pointer(address(self.memory), 0)
        spans = {"writes" if write else "reads": [Span(start + cells.start * CELL, len(cells) * CELL)]}
        bracket = self.check(races, t, lambda: self.driver.launch(self.streams[s], **spans))
        if not races:
            order.stream[s] = order.node(order.stream[s], order.thread[t])
            order.held.append(Held(cells, write, ("stream", s), 0, bracket))
            self.touch(cells, write)

    def begin_host(self, t: int, cells: range, write: bool) -> None:
        order = self.order
        races = order.races(order.closure(order.thread[t]), ("thread", t), (cells, write))
        spans = {
            "writes" if write else "reads": [Span(address(self.memory) + cells.start * CELL, len(cells) * CELL)]
        }
        bracket = self.check(races, t, lambda: self.driver.host_access(**spans))
        if not races:
            order.held.append(Held(cells, write, ("thread", t), order.thread[t], bracket))
            self.touch(cells, write)

    def end(self, t: int, which: int) -> None:
        """End a bracket, from any thread."""
        order = self.order
        if not order.held:
            return
        held = order.held.pop(which % len(order.held))
        kind, number = held.actor  # type: ignore[misc]
        touch = (held.cells, held.write)
        if kind == "stream":
            self.on(t, held.bracket.end)
            order.stream[number] = node = order.node(order.stream[number], order.thread[t])
        else:
            handed = number != t
            known = order.closure(order.thread[t], held.known)
            races = handed and order.races(known, ("thread", t), touch)
            self.check(races, t, held.bracket.end)
            if handed:
                self.knows(t, held.known)
            if races:
                order.held.append(held)
                return
            self.knows(t)
            node = order.thread[t]
        order.accesses.append((node, *touch))

    def finish(self) -> None:
        while self.order.held:
            held = self.order.held[-1]
            kind, number = held.actor  # type: ignore[misc]
            self.end(number if kind == "thread" else 0, len(self.order.held) - 1)
        self.synchronize_device(0)
        assert np.array_equal(self.memory, self.model)
        assert np.array_equal(self.sinks[: len(self.seen)], self.seen)


threads = st.integers(0, THREADS - 1)
streams, events, slots = st.integers(0, STREAMS - 1), st.integers(0, EVENTS - 1), st.integers(0, SLOTS - 1)
ranges = st.integers(0, CELLS - 1).flatmap(
    lambda start: st.integers(start + 1, min(start + 3, CELLS)).map(lambda stop: range(start, stop))
)
work = st.one_of(
    st.tuples(st.just("fill"), threads, streams, ranges, ranges),
    st.tuples(st.just("copy"), threads, streams, ranges, ranges),
    st.tuples(st.just("read"), threads, streams, ranges),
)
ordering = st.one_of(
    st.tuples(st.just("record"), threads, streams, events),
    st.tuples(st.just("wait"), threads, streams, events),
    st.tuples(st.just("record_and_wait"), threads, streams, streams, events),
)
waiting = st.one_of(
    st.tuples(st.sampled_from(["synchronize_stream", "query_stream"]), threads, streams),
    st.tuples(st.sampled_from(["synchronize_event", "query_event"]), threads, events),
    st.tuples(st.just("synchronize_device"), threads),
    st.tuples(st.sampled_from(["publish", "observe"]), threads, slots),
)
brackets = st.one_of(
    st.tuples(st.just("begin_launch"), threads, streams, ranges, st.booleans()),
    st.tuples(st.just("begin_host"), threads, ranges, st.booleans()),
    st.tuples(st.just("end"), threads, st.integers(0, 3)),
)
programs = st.lists(st.one_of(work, work, ordering, ordering, waiting, brackets), min_size=20, max_size=60)


@contextmanager
def _two_threads() -> Iterator[list[ThreadPoolExecutor]]:
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        yield [one, other]


@settings(max_examples=4 * settings.default.max_examples)
@given(program=programs, seed=st.integers(0, 1000), eagerness=st.sampled_from([0.0, 0.25, 1.0]))
def test_races_are_reported_exactly(program: list[tuple[Any, ...]], seed: int, eagerness: float) -> None:
    with _two_threads() as pair:
        run = Program(seed, eagerness, pair)
        for name, *arguments in program:
            note(f"{name}{tuple(arguments)}")
            getattr(run, name)(*arguments)
        run.finish()
