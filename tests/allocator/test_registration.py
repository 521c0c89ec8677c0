"""The registration map: whole or not at all, in chunks, and by exact bytes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import (
    Driver,
    DriverError,
    EmulatedDriver,
    InvalidRequestError,
    RaceError,
    RegistrationMap,
    Span,
    registrations,
)
from memferry_allocator.host.registration import MAX_CHUNK, Registration

from ..threads import in_threads
from .driver_cases import PAGE, map_pages, unmap_pages
from .machine import Machine, address, pages, pattern, refused


class Counting(EmulatedDriver):
    """Counts the calls, and refuses those that a test wants refused."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []
        self.refuse: set[tuple[str, int]] = set()

    def _called(self, call: str, where: int, nbytes: int = 0) -> None:
        self.calls.append((call, where, nbytes))
        if (call, where) in self.refuse:
            raise DriverError("CUDA_ERROR_OPERATING_SYSTEM", call, "not today")

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        self._called("register", address, nbytes)
        super().host_register(address, nbytes, read_only=read_only)

    def host_unregister(self, address: int) -> None:
        self._called("unregister", address)
        super().host_unregister(address)


def test_a_range_is_registered_in_chunks() -> None:
    driver, data = Counting(), pages(1000)
    known, start = RegistrationMap(driver, max_chunk=300), address(data)
    held = known.register(start, 1000)
    assert driver.calls == [
        ("register", start + at, size) for at, size in ((0, 300), (300, 300), (600, 300), (900, 100))
    ]
    assert held.chunks == tuple(Span(where, size) for _, where, size in driver.calls)
    assert (held.address, held.nbytes, held.closed) == (start, 1000, False)
    assert known.nbytes == driver.registered == 1000
    held.close()
    held.close()
    assert held.closed
    assert (known.nbytes, driver.registered) == (0, 0)
    assert len(driver.calls) == 8


@pytest.mark.parametrize(("nbytes", "chunks"), [(1, 1), (299, 1), (300, 1), (301, 2), (600, 2)])
def test_the_fewest_chunks(nbytes: int, chunks: int) -> None:
    data = pages(600)
    known = RegistrationMap(EmulatedDriver(), max_chunk=300)
    held = known.register(address(data), nbytes)
    assert len(held.chunks) == chunks
    held.close()


def test_the_largest_chunk_is_below_what_drivers_refuse() -> None:
    assert RegistrationMap(EmulatedDriver()).max_chunk == MAX_CHUNK == 64 << 30


@pytest.mark.parametrize("max_chunk", [0, -1])
def test_chunks_have_a_size(max_chunk: int) -> None:
    with pytest.raises(InvalidRequestError, match="max_chunk"):
        RegistrationMap(EmulatedDriver(), max_chunk=max_chunk)


def test_an_empty_range_takes_no_driver_call() -> None:
    driver = Counting()
    known = RegistrationMap(driver)
    held = known.register(4096, 0)
    assert known.covers(4096, 0)
    assert held.closed
    held.close()
    assert driver.calls == []
    with pytest.raises(InvalidRequestError, match="-1 bytes"):
        known.register(4096, -1)


@pytest.mark.parametrize("failing", range(4))
def test_a_refused_chunk_undoes_those_before(failing: int) -> None:
    driver, data = Counting(), pages(1200)
    known, start = RegistrationMap(driver, max_chunk=300), address(data)
    driver.refuse.add(("register", start + failing * 300))
    with refused("OPERATING_SYSTEM"):
        known.register(start, 1200)
    assert (known.nbytes, driver.registered) == (0, 0)
    undone = [where - start for call, where, _ in driver.calls if call == "unregister"]
    assert undone == [at * 300 for at in reversed(range(failing))]
    driver.refuse.clear()
    known.register(start, 1200).close()


def test_a_failing_undo_is_told_and_hides_nothing() -> None:
    driver, data = Counting(), pages(900)
    known, start = RegistrationMap(driver, max_chunk=300), address(data)
    driver.refuse |= {("register", start + 600), ("unregister", start + 300)}
    with pytest.raises(DriverError, match="CUDA_ERROR_OPERATING_SYSTEM") as caught:
        known.register(start, 900)
    assert caught.value.call == "register"
    assert "undoing it failed: unregister: CUDA_ERROR_OPERATING_SYSTEM" in str(caught.value)
    assert driver.registered == 300  # what could be undone was


def test_an_interruption_undoes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, data = Counting(), pages(600)
    known, start, register = RegistrationMap(driver, max_chunk=300), address(data), driver.host_register

    def interrupted(where: int, nbytes: int, *, read_only: bool = False) -> None:
        if where > start:
            raise KeyboardInterrupt
        register(where, nbytes, read_only=read_only)

    monkeypatch.setattr(driver, "host_register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        known.register(start, 600)
    assert (known.nbytes, driver.registered) == (0, 0)


def test_only_the_gaps_reach_the_driver() -> None:
    driver, data = Counting(), pages(1200)
    known, start = RegistrationMap(driver, max_chunk=300), address(data)
    inner = known.register(start + 700, 100)
    driver.calls.clear()
    whole = known.register(start, 1200)
    assert [(where - start, size) for _, where, size in driver.calls] == [
        (0, 300), (300, 300), (600, 100), (800, 300), (1100, 100),
    ]  # fmt: skip
    assert [chunk.ptr - start for chunk in whole.chunks] == [0, 300, 600, 700, 800, 1100]
    inner.close()
    assert known.nbytes == driver.registered == 1200  # the whole one still needs it
    whole.close()
    assert known.nbytes == driver.registered == 0


@pytest.mark.parametrize(
    ("first", "second", "gaps"),
    [
        ((100, 200), (100, 200), []),  # the same
        ((100, 200), (150, 50), []),  # inside
        ((100, 200), (100, 100), []),
        ((100, 200), (200, 100), []),
        ((100, 200), (50, 300), [(50, 50), (300, 50)]),  # containing
        ((100, 200), (50, 100), [(50, 50)]),  # overlapping
        ((100, 200), (250, 100), [(300, 50)]),
        ((100, 200), (300, 100), [(300, 100)]),  # adjacent
        ((100, 200), (0, 100), [(0, 100)]),
        ((16, 64), (128, 64), [(128, 64)]),  # neighbours in one page
    ],
)
@pytest.mark.parametrize("first_closed_first", [True, False])
def test_ranges_are_counted(
    any_driver: Driver,
    first: tuple[int, int],
    second: tuple[int, int],
    gaps: list[tuple[int, int]],
    first_closed_first: bool,
) -> None:
    data = pages(PAGE)
    known, start = RegistrationMap(any_driver), address(data)
    one = known.register(start + first[0], first[1])
    before = known.nbytes
    other = known.register(start + second[0], second[1])
    assert known.nbytes - before == sum(size for _, size in gaps)
    assert known.covers(start + first[0], first[1])
    assert known.covers(start + second[0], second[1])
    for held in (one, other) if first_closed_first else (other, one):
        assert any_driver.host_registration(held.address) is not None
        held.close()
        assert held.closed
        left = {one: first, other: second}
        for still, (at, size) in left.items():
            assert still.closed or known.covers(start + at, size)
    assert known.nbytes == 0
    assert any_driver.host_registration(start + second[0]) is None


def test_the_end_of_a_mapping() -> None:
    start, driver = map_pages(4), Counting()
    unmap_pages(start + 2 * PAGE, 2)
    known = RegistrationMap(driver, max_chunk=PAGE)
    with refused("INVALID_VALUE"):
        known.register(start, 4 * PAGE)
    assert driver.registered == 0
    unmap_pages(start, 2)


def test_closing_waits_for_nobody_and_can_be_repeated(machine: Machine) -> None:
    """Work on the range must be over; where it is not, the rest stays registered until it is."""
    driver, data = machine.driver, pages(900)
    known, start = RegistrationMap(driver, max_chunk=300), address(data)
    held = known.register(start, 900)
    ptr, stream = machine.device(300), machine.stream()
    driver.copy(start + 300, ptr, 300, stream=stream)
    with pytest.raises(RaceError):
        held.close()
    assert not held.closed
    assert known.covers(start, 600)
    assert not known.covers(start + 600, 1)
    stream.synchronize()
    held.close()
    assert held.closed
    assert known.nbytes == 0


def test_one_map_a_driver(machine: Machine) -> None:
    assert registrations(machine.driver) is registrations(machine.driver)
    assert registrations(machine.driver) is not registrations(EmulatedDriver())


def test_read_only_ranges(machine: Machine) -> None:
    data, known = pages(PAGE), registrations(machine.driver)
    held = known.register(address(data), PAGE, read_only=True)
    with refused("INVALID_VALUE"):
        machine.driver.copy(address(data), machine.device(16), 16, stream=machine.stream())
    held.close()


# -- against a plain list of bytes -------------------------------------------------------------------------
WORLD = 60
ranges = st.tuples(st.integers(0, WORLD - 1), st.integers(0, WORLD)).filter(lambda r: r[0] + r[1] <= WORLD)


@given(
    registered=st.lists(ranges, max_size=8),
    closed=st.lists(st.integers(0, 7), max_size=3),
    max_chunk=st.integers(1, 25),
    asked=ranges,
)
def test_split_and_covers(
    registered: list[tuple[int, int]], closed: list[int], max_chunk: int, asked: tuple[int, int]
) -> None:
    """Pieces are the range, in order and without gaps, and each lies in one chunk or in none."""
    data, driver = pages(WORLD), EmulatedDriver()
    known, start = RegistrationMap(driver, max_chunk=max_chunk), address(data)
    chunk_of: list[int] = [0] * WORLD  # which chunk each byte is in
    holders: dict[int, set[int]] = {}
    held: list[Registration] = []
    for index, (at, nbytes) in enumerate(registered):
        held.append(known.register(start + at, nbytes))
        room = 0
        for byte in range(at, at + nbytes):
            if chunk_of[byte] == 0:
                if room == 0 or chunk_of[byte - 1] != len(holders):
                    holders[len(holders) + 1], room = set(), max_chunk
                chunk_of[byte] = len(holders)
                room -= 1
            holders[chunk_of[byte]].add(index)
    for index in closed:
        if index < len(held):
            held[index].close()
            for holding in holders.values():
                holding.discard(index)
    chunk_of = [chunk if holders.get(chunk) else 0 for chunk in chunk_of]

    at, nbytes = asked
    pieces = [(piece.ptr - start, piece.nbytes) for piece in known.split(start + at, nbytes)]
    cuts = [byte for byte in range(at, at + nbytes) if byte == at or chunk_of[byte] != chunk_of[byte - 1]]
    ends = [*cuts[1:], at + nbytes]
    assert pieces == [(low, high - low) for low, high in zip(cuts, ends, strict=False)]
    assert list(known.pieces(Span(start + at, nbytes))) == known.split(start + at, nbytes)
    assert known.covers(start + at, nbytes) == all(chunk_of[at : at + nbytes])
    assert known.is_whole(start + at, nbytes) == (len(cuts) == 1 and chunk_of[at] != 0)
    assert known.nbytes == driver.registered == sum(map(bool, chunk_of))


def test_a_range_in_one_chunk_is_its_own_piece() -> None:
    data, known = pages(600), RegistrationMap(EmulatedDriver(), max_chunk=300)
    held = known.register(address(data), 600)
    whole, cut = Span(address(data), 300), Span(address(data), 301)
    assert known.pieces(whole)[0] is whole
    assert len(known.pieces(cut)) == 2
    held.close()
    assert list(known.pieces(cut)) == [cut]
    with pytest.raises(InvalidRequestError, match="no range"):
        known.pieces(Span(address(data), -1))


# -- threads and the garbage collector ---------------------------------------------------------------------
def test_threads_register_and_close(machine: Machine) -> None:
    known = registrations(machine.driver)

    def work(number: int) -> None:
        data = pages(PAGE)
        for turn in range(30):
            held = known.register(address(data) + turn, 100 + number)
            assert known.covers(address(data) + turn, 100 + number)
            assert known.split(address(data) + turn, 100 + number) == [Span(address(data) + turn, 100 + number)]
            held.close()

    in_threads(8, work)
    assert known.nbytes == 0


def test_pieces_are_told_while_another_thread_registers() -> None:
    """Pinning takes long, and a copy elsewhere does not wait for it."""
    told = []

    class Asking(Counting):
        def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
            super().host_register(address, nbytes, read_only=read_only)
            asking = threading.Thread(target=lambda: told.append(list(known.pieces(mine))), daemon=True)
            asking.start()
            asking.join(60)

    data, known = pages(600), RegistrationMap(Asking(), max_chunk=300)
    mine = Span(address(data), 200)
    held = known.register(*mine)
    known.register(mine.ptr + 200, 400).close()
    held.close()
    assert told == [[mine]] * 3


def test_a_registration_may_be_closed_by_a_collection_inside_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, data, more = Counting(), pages(PAGE), pages(PAGE)
    known = RegistrationMap(driver)
    held = known.register(address(more), PAGE)
    called = driver._called

    def collect(*arguments: object) -> None:
        monkeypatch.undo()
        gc.collect()  # as if this was when somebody's finaliser ran
        held.close()
        called(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(driver, "_called", collect)
    kept = known.register(address(data), PAGE)
    assert known.nbytes == driver.registered == PAGE
    assert known.covers(address(data), PAGE)
    assert not kept.closed


def test_copies_go_where_the_pieces_are(emulate: Callable[..., Machine]) -> None:
    machine = emulate()
    data, nbytes = pages(3 * PAGE), 3 * PAGE
    known = RegistrationMap(machine.driver, max_chunk=1000)
    held, ptr, stream = known.register(address(data), nbytes), machine.device(nbytes), machine.stream()
    data[:] = pattern(nbytes)
    for piece in known.split(address(data) + 5, nbytes - 10):
        machine.driver.copy(ptr + piece.ptr - address(data), piece.ptr, piece.nbytes, stream=stream)
    stream.synchronize()
    assert bytes(machine.read(ptr, nbytes))[5:-5] == bytes(data)[5:-5]
    held.close()
