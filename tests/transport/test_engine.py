"""The transfer engine: in the consumer's order, beside its work, both directions at once, and byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import (
    Copier,
    Direction,
    EmulatedDriver,
    EmulatedOptions,
    HostArena,
    InvalidRequestError,
    MemFerryError,
    Mode,
    Place,
    RaceError,
    RegistrationMap,
    ShadowSpace,
    Span,
    Stream,
    registrations,
)
from memferry_allocator.driver import LinkModel
from memferry_transport import InvalidTransferError, Transfer, TransferEngine, TransportError

from ..allocator.machine import Bytes, Machine, address, pages, pattern, refused
from ..threads import in_threads

N = 8192
IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


class Noting(EmulatedDriver):
    """Notes what reaches the driver: copies, waits and recordings."""

    def __init__(self, options: EmulatedOptions | None = None) -> None:
        super().__init__(options)
        self.calls: list[tuple[Any, ...]] = []

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        super().copy(dst, src, nbytes, stream=stream)
        self.calls.append(("copy", dst, src, nbytes))

    def stream_wait(self, stream: Stream, event: Any) -> None:
        super().stream_wait(stream, event)
        self.calls.append(("wait", stream))

    def event_record(self, event: Any, stream: Stream) -> None:
        super().event_record(event, stream)
        self.calls.append(("record", stream))


class Bench:
    """An engine with registered and device memory at its two ends."""

    def __init__(self, **options: Any) -> None:
        self.driver = Noting(EmulatedOptions(**options))
        self.machine = Machine(self.driver)
        self.engine = TransferEngine(self.driver, 0)
        self.home, self.ptr = self.machine.pinned(N), self.machine.device(N)
        self.stream = self.machine.stream()
        self.home[:] = pattern(N)

    @property
    def host(self) -> Span:
        return Span(address(self.home), N)

    @property
    def device(self) -> Span:
        return Span(self.ptr, N)

    def move(self, direction: Direction, stream: Stream | None = None) -> Transfer:
        dst, src = (self.device, self.host) if direction is IN else (self.host, self.device)
        return self.engine.copy(dst, src, direction, stream=stream or self.stream)

    def on_device(self) -> Bytes:
        return self.machine.read(self.ptr, N)

    def close(self) -> None:
        self.engine.close()
        self.machine.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(eagerness=0.0)
    yield bench
    bench.close()


# -- order -------------------------------------------------------------------------------------------------
def test_a_kernel_right_behind_sees_the_bytes(bench: Bench) -> None:
    bench.move(IN)
    with bench.driver.launch(bench.stream, reads=[bench.device], writes=[bench.device]):
        memory = np.frombuffer(bench.driver.host_bytes(bench.ptr, N), np.uint8)  # type: ignore[arg-type]
        assert np.array_equal(memory, pattern(N))


def test_what_a_kernel_wrote_before_goes_home(bench: Bench) -> None:
    bench.driver.fill(bench.ptr, 7, N, stream=bench.stream)
    bench.move(OUT)
    bench.driver.fill(bench.ptr, 8, N, stream=bench.stream)  # not before the copy has read it
    bench.stream.synchronize()
    assert set(bench.home) == {7}


def test_what_a_kernel_wrote_to_the_host_goes_in(bench: Bench) -> None:
    bench.driver.fill(bench.machine.mapped(bench.home), 7, N, stream=bench.stream)
    bench.move(IN)
    bench.driver.fill(bench.machine.mapped(bench.home), 8, N, stream=bench.stream)
    bench.stream.synchronize()
    assert set(bench.on_device()) == {7}
    assert set(bench.home) == {8}


def test_there_and_back(bench: Bench) -> None:
    away = bench.machine.pinned(N)
    bench.move(IN)
    bench.engine.copy(Span(address(away), N), bench.device, OUT, stream=bench.stream)
    bench.stream.synchronize()
    assert np.array_equal(away, pattern(N))


@pytest.mark.parametrize("direction", Direction)
def test_only_the_consumer_is_ordered(bench: Bench, direction: Direction) -> None:
    bench.move(direction)
    other = bench.machine.stream()
    with pytest.raises(RaceError):
        bench.driver.fill(bench.ptr if direction is IN else bench.machine.mapped(bench.home), 0, N, stream=other)
    with pytest.raises(RaceError), bench.driver.host_access(writes=[bench.host]):
        pass


def test_a_transfer_on_its_lane_needs_no_events_around_it(bench: Bench) -> None:
    lane = bench.engine.lane(IN)
    bench.driver.calls.clear()
    bench.move(IN, lane)
    assert bench.driver.calls == [("copy", bench.ptr, address(bench.home), N), ("record", lane)]


def test_a_transfer_on_another_stream_needs_two(bench: Bench) -> None:
    lane = bench.engine.lane(OUT)
    bench.driver.calls.clear()
    bench.move(OUT)
    assert [call[:2] for call in bench.driver.calls] == [
        ("record", bench.stream),
        ("wait", lane),
        ("copy", address(bench.home)),
        ("record", lane),
        ("wait", bench.stream),
    ]


def test_each_direction_has_a_lane(bench: Bench) -> None:
    assert bench.engine.lane(IN) is bench.engine.lane(IN)
    assert bench.engine.lane(IN) is not bench.engine.lane(OUT)
    bench.move(IN, bench.engine.lane(OUT))  # a lane is a stream like any other
    bench.move(OUT, bench.engine.lane(IN))
    bench.driver.synchronize(0)
    assert np.array_equal(bench.home, pattern(N))


# -- time --------------------------------------------------------------------------------------------------
@pytest.fixture
def timed() -> Iterator[Bench]:
    """A copy takes a second."""
    second = LinkModel(0.0, N)
    bench = Bench(host_to_device=second, device_to_host=second, on_device=LinkModel(0.0, 1e18))
    yield bench
    bench.close()


def test_both_directions_overlap(timed: Bench) -> None:
    away, other = timed.machine.pinned(N), timed.machine.device(N)
    timed.move(IN)
    timed.engine.copy(Span(address(away), N), Span(other, N), OUT, stream=timed.machine.stream())
    timed.driver.synchronize(0)
    assert timed.driver.now == pytest.approx(1)


def test_one_direction_is_in_line(timed: Bench) -> None:
    ptrs = [timed.machine.device(N) for _ in range(3)]
    for ptr in ptrs:
        timed.engine.copy(Span(ptr, N), timed.host, IN, stream=timed.machine.stream())
    timed.driver.synchronize(0)
    assert timed.driver.now == pytest.approx(3)


def test_the_consumer_works_on_beside_a_transfer_on_the_lane(timed: Bench) -> None:
    """A prefetch is asked for on the lane, and the compute stream meets it by its event alone."""
    lane = timed.engine.lane(IN)
    transfer = timed.move(IN, lane)
    away, other = timed.machine.pinned(N), timed.machine.device(N)
    timed.driver.copy(address(away), other, N, stream=timed.stream)  # stands for a second of work
    transfer.wait(timed.stream)
    with timed.driver.launch(timed.stream, reads=[timed.device]):
        pass
    timed.stream.synchronize()
    assert timed.driver.now == pytest.approx(1)


# -- pieces ------------------------------------------------------------------------------------------------
def test_two_registrations_take_two_pieces(bench: Bench) -> None:
    data = pages(2000)
    data[:] = pattern(2000)
    known = registrations(bench.driver)
    held = [known.register(address(data), 1200), known.register(address(data) + 1200, 800)]
    bench.driver.calls.clear()
    transfer = bench.engine.copy(Span(bench.ptr, 1500), Span(address(data) + 300, 1500), IN, stream=bench.stream)
    copies = [call[1:] for call in bench.driver.calls if call[0] == "copy"]
    assert copies == [(bench.ptr, address(data) + 300, 900), (bench.ptr + 900, address(data) + 1200, 600)]
    assert (transfer.pieces, transfer.nbytes) == (2, 1500)
    assert "1500 bytes h2d" in transfer.explain()
    assert "2 driver copies" in transfer.explain()
    bench.stream.synchronize()
    assert np.array_equal(bench.on_device()[:1500], pattern(2000)[300:1800])
    for registration in held:
        registration.close()


def test_regions_are_one_transfer(bench: Bench) -> None:
    start, ptr = address(bench.home), bench.ptr
    regions = [
        (Span(ptr + to, size), Span(start + of, size)) for to, of, size in ((0, 5000, 10), (10, 0, 0), (50, 7, 99))
    ]
    transfer = bench.engine.copy_regions(regions, IN, stream=bench.stream)
    assert (transfer.nbytes, transfer.pieces, transfer.direction) == (109, 2, IN)
    transfer.synchronize()
    found = bench.on_device()
    assert np.array_equal(found[:10], pattern(N)[5000:5010])
    assert set(found[10:50]) == {0xFF}
    assert np.array_equal(found[50:149], pattern(N)[7:106])
    assert bench.engine.bytes_moved == {IN: 109, OUT: 0}


def test_a_transfer_of_nothing(bench: Bench) -> None:
    for transfer in (
        bench.engine.copy_regions([], OUT, stream=bench.stream),
        bench.engine.copy(Span(bench.ptr, 0), Span(12345, 0), IN, stream=bench.stream),
    ):
        assert (transfer.nbytes, transfer.pieces) == (0, 0)
        transfer.synchronize()
    assert bench.engine.bytes_moved == {IN: 0, OUT: 0}


# -- refusals ----------------------------------------------------------------------------------------------
REFUSALS: dict[str, Callable[[Bench], tuple[Any, Any, str]]] = {
    "pageable": lambda b: (b.device, Span(address(np.zeros(N, np.uint8)), N), "not all registered"),
    "one byte beyond": lambda b: (Span(b.ptr, 11), Span(address(b.home) + N - 10, 11), "not all registered"),
    "one byte before": lambda b: (Span(b.ptr, 11), Span(address(b.home) - 1, 11), "not all registered"),
    "sizes differ": lambda b: (
        Span(b.ptr, 10),
        Span(address(b.home), 11),
        "source has 11 bytes and destination 10",
    ),
    "negative": lambda b: (Span(b.ptr, -1), Span(address(b.home), -1), "-1"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("direction", Direction)
def test_what_is_refused_is_not_begun(bench: Bench, direction: Direction, name: str) -> None:
    """Neither is a good region that comes before a bad one."""
    device, host, match = REFUSALS[name](bench)
    if direction is OUT and name == "sizes differ":
        match = "source has 10 bytes and destination 11"
    bad = (device, host) if direction is IN else (host, device)
    good = (Span(bench.ptr, 5), Span(address(bench.home), 5))
    bench.driver.calls.clear()
    with pytest.raises(InvalidTransferError, match=match) as caught:
        bench.engine.copy_regions([good if direction is IN else good[::-1], bad], direction, stream=bench.stream)
    assert isinstance(caught.value, (TransportError, ValueError))
    assert isinstance(caught.value, MemFerryError)
    assert bench.driver.calls == []
    assert bench.engine.bytes_moved == {IN: 0, OUT: 0}


@pytest.mark.parametrize("stream", [None, 0, "default"])
def test_only_streams_are_streams(bench: Bench, stream: Any) -> None:
    with pytest.raises(InvalidRequestError, match="create_stream"):
        bench.engine.copy(bench.device, bench.host, IN, stream=stream)


def test_only_streams_of_the_device() -> None:
    driver = EmulatedDriver(EmulatedOptions(device_count=2))
    engine, machine = TransferEngine(driver, 1), Machine(driver)
    home, ptr = machine.pinned(16), machine.device(16, 1)
    with pytest.raises(InvalidRequestError, match="on device 0"):
        engine.copy(Span(ptr, 16), Span(address(home), 16), IN, stream=machine.stream(0))
    engine.copy(Span(ptr, 16), Span(address(home), 16), IN, stream=machine.stream(1))
    engine.close()
    machine.close()


@pytest.mark.parametrize("direction", ["h2d", 1])
def test_only_directions_are_directions(bench: Bench, direction: Any) -> None:
    with pytest.raises(InvalidTransferError, match="not a Direction"):
        bench.engine.copy(bench.device, bench.host, direction, stream=bench.stream)


def test_pieces_before_a_refused_one_are_waited_for(bench: Bench) -> None:
    """What the driver refuses half-way leaves both ranges usable in the consumer's order."""
    regions = [
        (Span(bench.ptr, 100), Span(address(bench.home), 100)),
        (Span(bench.ptr + N, 8), Span(address(bench.home), 8)),
    ]
    with refused("INVALID_VALUE"):
        bench.engine.copy_regions(regions, IN, stream=bench.stream)
    assert bench.engine.bytes_moved == {IN: 0, OUT: 0}
    bench.driver.fill(bench.ptr, 1, N, stream=bench.stream)
    bench.driver.fill(bench.machine.mapped(bench.home), 2, N, stream=bench.stream)
    bench.stream.synchronize()
    assert set(bench.on_device()) == {1}


def test_a_race_is_not_begun(bench: Bench) -> None:
    rogue = bench.machine.stream()
    bench.driver.fill(bench.ptr, 1, N, stream=rogue)
    with pytest.raises(RaceError):
        bench.move(IN)
    assert bench.engine.bytes_moved == {IN: 0, OUT: 0}
    rogue.synchronize()
    bench.move(IN).synchronize()
    assert np.array_equal(bench.on_device(), pattern(N))


# -- transfers ---------------------------------------------------------------------------------------------
def test_a_transfer(bench: Bench) -> None:
    transfer = bench.move(IN)
    assert isinstance(transfer, Transfer)
    assert (transfer.direction, transfer.nbytes, transfer.pieces) == (IN, N, 1)
    assert not transfer.done
    other = bench.machine.stream()
    transfer.wait(other)
    bench.driver.fill(bench.ptr, 3, N, stream=other)
    transfer.synchronize()
    assert transfer.done
    other.synchronize()
    assert set(bench.on_device()) == {3}
    assert "direct path" in transfer.explain()


def test_the_host_may_write_after_synchronising(bench: Bench) -> None:
    transfer = bench.move(IN)
    with pytest.raises(RaceError), bench.driver.host_access(writes=[bench.host]):
        pass
    transfer.synchronize()
    with bench.driver.host_access(writes=[bench.host]):
        bench.home[:] = 0
    assert np.array_equal(bench.on_device(), pattern(N))


def test_bytes_are_counted(bench: Bench) -> None:
    assert bench.engine.bytes_moved == {IN: 0, OUT: 0}
    bench.move(IN)
    bench.move(OUT)
    bench.move(OUT)
    counts = bench.engine.bytes_moved
    assert counts == {IN: N, OUT: 2 * N}
    counts[IN] = 0  # a copy
    assert bench.engine.bytes_moved[IN] == N


def test_closing_waits_and_happens_once(bench: Bench) -> None:
    bench.driver.fill(bench.ptr, 7, N, stream=bench.engine.lane(OUT))
    bench.move(OUT, bench.engine.lane(OUT))
    bench.engine.close()
    bench.engine.close()
    assert set(bench.home) == {7}
    with refused("INVALID_HANDLE"):
        bench.move(IN)


# -- byte for byte -----------------------------------------------------------------------------------------
WORLD = 3000
regions = st.lists(
    st.tuples(st.integers(0, WORLD), st.integers(0, WORLD), st.integers(0, WORLD)).filter(
        lambda region: region[0] + region[2] <= WORLD and region[1] + region[2] <= WORLD
    ),
    max_size=5,
)


@given(
    transfers=st.lists(st.tuples(st.sampled_from(Direction), regions, st.integers(0, 3)), min_size=1, max_size=4),
    max_chunk=st.integers(1, WORLD + 1),
    seed=st.integers(0, 99),
    eagerness=st.sampled_from([0.0, 0.3]),
)
def test_any_regions_arrive_byte_for_byte(
    transfers: list[tuple[Direction, list[tuple[int, int, int]], int]], max_chunk: int, seed: int, eagerness: float
) -> None:
    """Regions of a transfer follow one another; transfers are in the order of the streams that asked."""
    driver = EmulatedDriver(EmulatedOptions(seed=seed, eagerness=eagerness))
    max_chunk = max(max_chunk, WORLD // 40)
    driver._registration_map = RegistrationMap(driver, max_chunk=max_chunk)  # type: ignore[attr-defined]
    machine, engine, home = Machine(driver), TransferEngine(driver, 0), pages(WORLD)
    held, ptr = registrations(driver).register(address(home), WORLD), machine.device(WORLD)
    home[:] = pattern(WORLD)
    model = {IN: pattern(WORLD), OUT: pattern(WORLD, 1)}  # by direction: what is copied from
    machine.write(ptr, model[OUT])
    driver.synchronize(0)
    streams = [machine.stream(), machine.stream(), engine.lane(IN), engine.lane(OUT)]
    last: Transfer | None = None
    total = dict.fromkeys(Direction, 0)
    for direction, parts, which in transfers:
        back = OUT if direction is IN else IN
        spans = []
        for to, of, nbytes in parts:
            ends = (ptr + to, address(home) + of) if direction is IN else (address(home) + to, ptr + of)
            spans.append((Span(ends[0], nbytes), Span(ends[1], nbytes)))
            model[back][to : to + nbytes] = model[direction][of : of + nbytes]
            total[direction] += nbytes
        if last is not None:
            last.wait(streams[which])
        last = engine.copy_regions(spans, direction, stream=streams[which])
        assert last.nbytes == sum(nbytes for _, _, nbytes in parts)
    assert last is not None
    last.synchronize()
    with driver.host_access(reads=[Span(address(home), WORLD)]):
        assert np.array_equal(home, model[IN])
    assert np.array_equal(machine.read(ptr, WORLD), model[OUT])
    assert engine.bytes_moved == total
    engine.close()
    held.close()
    machine.close()


@pytest.mark.parametrize("seed", range(3))
def test_threads(seed: int) -> None:
    """Eight threads, each with memory and a stream of its own, on one engine."""
    driver = EmulatedDriver(EmulatedOptions(seed=seed, eagerness=0.2))
    engine = TransferEngine(driver, 0)

    def work(number: int) -> None:
        machine = Machine(driver)
        arena, stream = HostArena(driver, 4 * N), machine.stream()
        there, back, ptr = arena.cut(N), arena.cut(N), machine.device(N)
        for turn in range(15):
            data = pattern(N, number * 100 + turn)
            arena.array(there)[:] = data
            engine.copy(Span(ptr, N), there, IN, stream=stream)
            engine.copy(back, Span(ptr, N), OUT, stream=stream)
            stream.synchronize()
            with driver.host_access(reads=[back]):
                assert np.array_equal(arena.array(back), data)
        arena.close()
        machine.close()

    in_threads(8, work)
    assert engine.bytes_moved == dict.fromkeys(Direction, 8 * 15 * N)
    engine.close()


# -- as the copier of a shadow space -----------------------------------------------------------------------
def test_a_shadow_space_moves_its_bytes_by_it() -> None:
    driver = EmulatedDriver(EmulatedOptions(eagerness=0.0))
    engine: TransferEngine = TransferEngine(driver, 0)
    copier: Copier = engine
    arena, stream = HostArena(driver, 4 * N), driver.create_stream(0)
    space = ShadowSpace(driver, device_budget=2 * N, copier=copier)
    buffer = space.buffer("b", [arena.cut(N) for _ in range(4)])
    for value, part in enumerate(buffer):
        arena.array(part.host)[:] = value
        with part.acquire(Place.DEVICE, Mode.READ_WRITE, stream=stream) as view:
            driver.fill(view.ptr, value + 10, N // 2, stream=stream)
    space.close()
    for value, part in enumerate(buffer):
        assert list(arena.array(part.host)[:: N // 2]) == [value + 10, value]
    assert engine.bytes_moved == {IN: 4 * N, OUT: 4 * N}
    engine.lane(IN).synchronize()  # it is not the space's to close
    engine.close()
    arena.close()
