"""Host arenas: exact sizes, resident and registered once, and unmapped when nobody has a byte of them left."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import (
    ArenaOptions,
    ClosedError,
    DriverError,
    EmulatedDriver,
    HostArena,
    InvalidRequestError,
    OutOfMemory,
    RaceError,
    Span,
    registrations,
)
from memferry_allocator.host import libc, numa
from memferry_allocator.host.pages import HostPages

from ..threads import in_threads
from .machine import Machine, pattern, refused
from .test_open_driver import in_a_process
from .test_registration import Counting

PAGE, MIB = mmap.PAGESIZE, 1 << 20
HUGE = 2 * MIB
LAZY = ArenaOptions(touch=False)


def resident(where: int, nbytes: int) -> list[bool]:
    """For each page whether it is in memory."""
    found = (ctypes.c_ubyte * (-(-nbytes // PAGE)))()
    function = ctypes.CDLL(None, use_errno=True).mincore
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert function(where, nbytes, ctypes.addressof(found)) == 0, os.strerror(ctypes.get_errno())
    return [bool(page & 1) for page in found]


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """The ranges that were unmapped so far."""
    gc.collect()  # what earlier tests have left
    calls: list[Span] = []
    unmap = libc.unmap

    def spy(where: int, nbytes: int) -> None:
        calls.append(Span(where, nbytes))
        unmap(where, nbytes)

    monkeypatch.setattr(libc, "unmap", spy)
    return calls


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, HUGE - 1, HUGE + 1, 5 * MIB + 123])
def test_sizes_are_whole_pages_and_no_more(nbytes: int) -> None:
    driver = EmulatedDriver()
    arena = HostArena(driver, nbytes)
    assert arena.nbytes == -(-nbytes // PAGE) * PAGE
    assert arena.address % HUGE == 0
    assert driver.registered == arena.nbytes
    assert arena.cut(nbytes).nbytes == nbytes
    assert len(arena.array(Span(arena.address, arena.nbytes))) == arena.nbytes


def test_nothing_is_mapped_beside_it() -> None:
    driver, before = EmulatedDriver(), mapped_bytes()
    arena = HostArena(driver, 65 * MIB, LAZY)
    within = mapped_bytes()
    assert 65 * MIB <= within - before < 65 * MIB + HUGE
    del arena
    gc.collect()
    assert within - mapped_bytes() >= 64 * MIB


def test_neighbouring_arenas_are_apart() -> None:
    driver = EmulatedDriver()
    arenas = [HostArena(driver, 3 * MIB + PAGE) for _ in range(6)]
    spans = sorted(Span(arena.address, arena.nbytes) for arena in arenas)
    for one, other in itertools.pairwise(spans):
        assert one.ptr + one.nbytes <= other.ptr
    for value, arena in enumerate(arenas):
        arena.array(Span(arena.address, arena.nbytes))[:] = value
    for value, arena in enumerate(arenas):
        assert set(np.unique(arena.array(Span(arena.address, arena.nbytes)))) == {value}


@pytest.mark.parametrize("threads", [0, 1, 3, 64])
@pytest.mark.parametrize("huge_pages", [True, False])
def test_touched_pages_are_resident_and_zero(threads: int, huge_pages: bool) -> None:
    options = ArenaOptions(threads=threads, huge_pages=huge_pages)
    arena = HostArena(EmulatedDriver(), 7 * MIB + PAGE, options)
    assert all(resident(arena.address, arena.nbytes))
    assert not arena.array(Span(arena.address, arena.nbytes)).any()
    assert arena.huge_pages in (huge_pages, False)


def test_untouched_pages_are_not() -> None:
    arena = HostArena(EmulatedDriver(), 4 * MIB, LAZY)
    assert not any(resident(arena.address, arena.nbytes))


def test_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Span] = []

    def spy(where: int, nbytes: int) -> bool:
        asked.append(Span(where, nbytes))
        return True

    monkeypatch.setattr(libc, "advise_huge", spy)
    arena = HostArena(EmulatedDriver(), 3 * MIB, LAZY)
    assert asked == [Span(arena.address, 3 * MIB)]
    HostArena(EmulatedDriver(), 3 * MIB, ArenaOptions(huge_pages=False, touch=False))
    assert len(asked) == 1


def test_an_arena_is_registered_once() -> None:
    driver = Counting()
    arena = HostArena(driver, 3 * MIB, LAZY)
    spans = [arena.cut(1000) for _ in range(10)]
    assert [call for call, _, _ in driver.calls] == ["register"]
    assert all(registrations(driver).covers(*span) for span in spans)
    arena.close()
    arena.close()
    assert driver.registered == 0
    assert [call for call, _, _ in driver.calls] == ["register", "unregister"]


def test_without_registration() -> None:
    driver = Counting()
    arena = HostArena(driver, MIB, ArenaOptions(register=False, touch=False))
    assert arena.registration is None
    assert driver.calls == []
    with refused("INVALID_VALUE"):
        driver.host_device_pointer(arena.address, 0)
    arena.close()
    assert driver.calls == []


# -- slices ------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1, 2, 64, 256, 4096, 1 << 16])), max_size=40))
def test_slices_are_aligned_apart_and_inside(cuts: list[tuple[int, int]]) -> None:
    arena = HostArena(EmulatedDriver(), 16 * PAGE, LAZY)
    end = arena.address
    for nbytes, alignment in cuts:
        used = arena.used
        start = -(-end // alignment) * alignment
        if nbytes and start + nbytes > arena.address + arena.nbytes:
            with pytest.raises(OutOfMemory):
                arena.cut(nbytes, alignment=alignment)
            assert arena.used == used
            continue
        span = arena.cut(nbytes, alignment=alignment)
        assert span.nbytes == nbytes
        if nbytes:
            assert span.ptr == start  # the next that is aligned
            end = start + nbytes
        assert arena.used == end - arena.address


@pytest.mark.parametrize("alignment", [4 * MIB, 16 * MIB])
def test_alignments_beyond_a_huge_page(alignment: int) -> None:
    arenas = [HostArena(EmulatedDriver(), size * MIB, LAZY) for size in range(40, 140, 2)]
    assert any(arena.address % alignment for arena in arenas)  # whose start is not aligned so far
    for arena in arenas:
        arena.cut(1)
        assert arena.cut(100, alignment=alignment).ptr % alignment == 0


def test_the_whole_arena_can_be_cut() -> None:
    arena = HostArena(EmulatedDriver(), 10 * PAGE, LAZY)
    spans = [arena.cut(PAGE) for _ in range(10)]
    assert [span.ptr - arena.address for span in spans] == [index * PAGE for index in range(10)]
    with pytest.raises(OutOfMemory) as caught:
        arena.cut(1)
    error = caught.value
    assert (error.size, error.used, error.limit, error.budget) == (1, 10 * PAGE, 10 * PAGE, "host arena")
    assert "make the arena larger" in str(error)
    assert arena.cut(0).nbytes == 0
    assert len(arena.array(arena.cut(0))) == 0


@pytest.mark.parametrize(("nbytes", "alignment"), [(-1, 256), (1, 0), (1, -2), (1, 3), (1, 96)])
def test_cuts_that_cannot_be(nbytes: int, alignment: int) -> None:
    arena = HostArena(EmulatedDriver(), PAGE, LAZY)
    with pytest.raises(InvalidRequestError):
        arena.cut(nbytes, alignment=alignment)
    assert arena.used == 0


def test_arrays_are_the_bytes_of_a_slice() -> None:
    arena = HostArena(EmulatedDriver(), PAGE, LAZY)
    one, other = arena.cut(1000), arena.cut(1000)
    arena.array(one)[:] = pattern(1000)
    assert not arena.array(other).any()
    again = arena.array(Span(one.ptr + 10, 50))
    assert np.array_equal(again, pattern(1000)[10:60])
    again[0] = 0
    assert arena.array(one)[10] == 0


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, PAGE + 1), (PAGE, 1), (10, -1), (-PAGE, PAGE)])
def test_arrays_stay_inside(offset: int, nbytes: int) -> None:
    arena = HostArena(EmulatedDriver(), PAGE, LAZY)
    with pytest.raises(InvalidRequestError, match="not inside"):
        arena.array(Span(arena.address + offset, nbytes))


def test_threads_cut_different_slices() -> None:
    arena, spans = HostArena(EmulatedDriver(), 2 * MIB, LAZY), []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(200):
            spans.append(arena.cut(300))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({span.ptr for span in spans}) == 1600
    assert arena.used == 1600 * 512 - (512 - 300)


def test_threads_make_the_first_arenas_together() -> None:
    """In a fresh process, where the C library is not open yet."""
    said = in_a_process(
        "import sys, threading\n"
        "sys.setswitchinterval(1e-6)\n"
        "from memferry_allocator import ArenaOptions, EmulatedDriver, HostArena\n"
        "driver, start, made = EmulatedDriver(), threading.Barrier(8), []\n"
        "def work():\n"
        "    start.wait()\n"
        "    made.append(HostArena(driver, 4096, ArenaOptions(touch=False)))\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "print(len(made))\n"
    )
    assert said == "8"


# -- parts that are given back -----------------------------------------------------------------------------
def test_parts_are_used_again() -> None:
    arena = HostArena(EmulatedDriver(), 16 * PAGE, LAZY)
    one, other = arena.allocate(3 * PAGE), arena.allocate(PAGE)
    assert arena.used == arena.peak == 4 * PAGE
    arena.deallocate(one)
    assert arena.used == PAGE
    assert arena.allocate(2 * PAGE).ptr == one.ptr
    assert arena.allocate(PAGE).ptr == one.ptr + 2 * PAGE  # the smallest part that has it
    arena.deallocate(other)
    assert (arena.used, arena.peak, arena.largest_free) == (3 * PAGE, 4 * PAGE, 13 * PAGE)


def test_free_neighbours_merge() -> None:
    arena = HostArena(EmulatedDriver(), 8 * PAGE, LAZY)
    parts = [arena.allocate(PAGE) for _ in range(8)]
    assert arena.largest_free == 0
    for index in (1, 5, 3, 2, 4):
        arena.deallocate(parts[index])
    assert arena.largest_free == 5 * PAGE
    assert arena.allocate(5 * PAGE).ptr == parts[1].ptr


@pytest.mark.parametrize(
    "wrong",
    [
        lambda part, arena: part,  # twice
        lambda part, arena: Span(part.ptr + 256, 100),
        lambda part, arena: Span(part.ptr, 99),
        lambda part, arena: arena.cut(100),
        lambda part, arena: HostArena(EmulatedDriver(), PAGE, LAZY).allocate(100),
        lambda part, arena: Span(12345, 0),
    ],
    ids=["twice", "interior", "size", "cut", "another arena", "empty"],
)
def test_what_is_not_allocated_cannot_be_given_back(wrong: Callable[[Span, HostArena], Span]) -> None:
    arena = HostArena(EmulatedDriver(), 4 * PAGE, LAZY)
    part, kept = arena.allocate(1000), arena.allocate(2000)
    arena.deallocate(part)
    span = wrong(part, arena)
    used = arena.used
    with pytest.raises(InvalidRequestError, match="not allocated here"):
        arena.deallocate(span)
    assert arena.used == used
    arena.deallocate(kept)


def test_nothing_can_be_allocated_and_given_back() -> None:
    arena = HostArena(EmulatedDriver(), PAGE, LAZY)
    empty = arena.allocate(0)
    assert empty.nbytes == arena.used == 0
    arena.deallocate(empty)


@pytest.mark.parametrize(("nbytes", "alignment"), [(-1, 256), (1, 0), (1, 3), (1.5, 256), ("1", 256)])
def test_allocations_that_cannot_be(nbytes: int, alignment: int) -> None:
    arena = HostArena(EmulatedDriver(), PAGE, LAZY)
    with pytest.raises(InvalidRequestError):
        arena.allocate(nbytes, alignment=alignment)
    assert arena.used == 0


def test_reuse_waits_for_the_work_on_these_bytes(machine: Machine) -> None:
    """And for no other: a host that writes too early races with the device."""
    driver = machine.driver
    arena = HostArena(driver, 4 * PAGE, LAZY)
    busy, other = machine.stream(), machine.stream()
    one, two = arena.allocate(PAGE), arena.allocate(PAGE)
    ptr = machine.device(PAGE)
    arena.array(one)[:] = 5
    driver.copy(ptr, one.ptr, PAGE, stream=busy)
    arena.deallocate(one, uses={busy: busy.record()})
    driver.fill(driver.host_device_pointer(two.ptr, 0), 1, PAGE, stream=other)
    arena.deallocate(two, uses={other: other.record()})
    again = arena.allocate(PAGE)
    assert again == one
    with driver.host_access(writes=[again]):
        arena.array(again)[:] = 6
    with pytest.raises(RaceError), driver.host_access(reads=[two]):
        pass  # its own work is still under way
    both = arena.allocate(3 * PAGE)
    with driver.host_access(writes=[both]):
        pass
    assert set(machine.read(ptr, PAGE)) == {5}


def test_a_part_whose_work_cannot_be_waited_for_stays_free(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, stream = HostArena(machine.driver, PAGE, LAZY), machine.stream()
    arena.deallocate(arena.allocate(PAGE), uses={stream: stream.record()})

    def fail(event: object) -> None:
        raise DriverError("CUDA_ERROR_LAUNCH_FAILED", "event_synchronize")

    with monkeypatch.context() as patch:
        patch.setattr(machine.driver, "event_synchronize", fail)
        for take in (arena.allocate, arena.cut):
            with refused("LAUNCH_FAILED"):
                take(PAGE)
            assert arena.used == 0
    arena.deallocate(arena.allocate(PAGE))


def test_cuts_and_allocations_share_the_arena() -> None:
    arena = HostArena(EmulatedDriver(), 4 * PAGE, LAZY)
    cut, part = arena.cut(PAGE), arena.allocate(PAGE)
    after = arena.cut(PAGE)
    assert [cut.ptr, part.ptr, after.ptr] == [arena.address + at * PAGE for at in range(3)]
    arena.deallocate(part)
    assert arena.cut(PAGE).ptr == arena.address + 3 * PAGE  # cuts go on, allocations fill the holes
    with pytest.raises(OutOfMemory):
        arena.cut(PAGE)
    assert arena.allocate(PAGE) == part


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(1, 9000), st.sampled_from([1, 64, 256, 4096])),
            st.integers(0, 30),
        ),
        max_size=60,
    )
)
def test_parts_never_overlap_and_all_comes_back(steps: list[tuple[int, int] | int]) -> None:
    arena, live = HostArena(EmulatedDriver(), 16 * PAGE, LAZY), list[Span]()
    for step in steps:
        if isinstance(step, tuple):
            nbytes, alignment = step
            if arena.largest_free < nbytes:
                with pytest.raises(OutOfMemory) as caught:
                    arena.allocate(nbytes, alignment=alignment)
                assert (caught.value.size, caught.value.used) == (nbytes, arena.used)
                assert (caught.value.limit, caught.value.budget) == (arena.nbytes, "host arena")
                continue
            if arena.largest_free < nbytes + alignment:
                continue  # it depends on where the free part begins
            part = arena.allocate(nbytes, alignment=alignment)
            assert part.nbytes == nbytes
            assert part.ptr % alignment == 0
            assert arena.address <= part.ptr
            assert part.ptr + nbytes <= arena.address + arena.nbytes
            assert all(part.ptr + nbytes <= other.ptr or other.ptr + other.nbytes <= part.ptr for other in live)
            live.append(part)
        elif live:
            arena.deallocate(live.pop(step % len(live)))
        assert arena.used == sum(part.nbytes for part in live) <= arena.peak
    for part in live:
        arena.deallocate(part)
    assert arena.largest_free == arena.nbytes


def test_threads_allocate_and_give_back_each_others() -> None:
    arena, lock, shared = HostArena(EmulatedDriver(), 4 * MIB, LAZY), threading.Lock(), list[Span]()

    def work(number: int) -> None:
        for turn in range(150):
            part = arena.allocate(100 + 700 * number)
            arena.array(part)[:] = number
            assert set(arena.array(part)) == {number}
            with lock:
                shared.append(part)
                other = shared.pop(0) if turn % 2 else None
            if other is not None:
                arena.deallocate(other)

    in_threads(6, work)
    for part in shared:
        arena.deallocate(part)
    assert (arena.used, arena.largest_free) == (0, arena.nbytes)


# -- NUMA nodes and chunks ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("online", "nodes"), [("0", (0,)), ("0-1", (0, 1)), ("0,2-4", (0, 2, 3, 4)), (None, (0,))]
)
def test_online_nodes(tmp_path: Path, online: str | None, nodes: tuple[int, ...]) -> None:
    if online is not None:
        (tmp_path / "online").write_text(f"{online}\n")
    assert numa.online_nodes(tmp_path) == nodes


def test_one_node_needs_no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "online_nodes", lambda: (0,))
    monkeypatch.setattr(libc, "bind", None)
    arena = HostArena(EmulatedDriver(), PAGE, ArenaOptions(numa_node=0))
    assert any("only node 0" in note for note in arena.notes)
    assert not any("NUMA" in note for note in HostArena(EmulatedDriver(), PAGE).notes)


def test_pages_are_bound_before_they_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[Span, int, bool]] = []
    monkeypatch.setattr(numa, "online_nodes", lambda: (0, 1))

    def spy(where: int, nbytes: int, node: int) -> None:
        bound.append((Span(where, nbytes), node, any(resident(where, nbytes))))

    monkeypatch.setattr(libc, "bind", spy)
    arena = HostArena(EmulatedDriver(), 3 * PAGE, ArenaOptions(numa_node=1))
    assert bound == [(Span(arena.address, 3 * PAGE), 1, False)]
    with pytest.raises(InvalidRequestError, match="no node 7"):
        HostArena(EmulatedDriver(), PAGE, ArenaOptions(numa_node=7))


def test_binding_that_is_not_allowed_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "online_nodes", lambda: (0, 1))

    def forbidden(*_: int) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(libc, "bind", forbidden)
    arena = HostArena(EmulatedDriver(), PAGE, ArenaOptions(numa_node=1))
    assert any("not allowed" in note for note in arena.notes)


def test_the_kernel_binds() -> None:
    """Where it lets us: the real call, on the node that every machine has."""
    pages = HostPages(libc.map_anonymous(4 * PAGE), 4 * PAGE)
    said = ""
    for node in (0, 1000):
        try:
            libc.bind(pages.address, 4 * PAGE, node)
        except OSError as error:
            said += f"{node}: {errno.errorcode[error.errno or 0]} "
    assert said in ("1000: EINVAL ", "0: EPERM 1000: EPERM ", "0: ENOSYS 1000: ENOSYS ")


def test_large_arenas_are_registered_in_chunks() -> None:
    driver = Counting()
    arena = HostArena(driver, 10 * PAGE, ArenaOptions(touch=False, max_chunk=4 * PAGE))
    assert [nbytes for call, _, nbytes in driver.calls if call == "register"] == [4 * PAGE, 4 * PAGE, 2 * PAGE]
    assert registrations(driver).device_ptr(arena.address, 0, arena.nbytes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": -1}, {"threads": 1.5}, {"threads": None}, {"numa_node": -1}, {"numa_node": "0"},
        {"max_chunk": 0}, {"max_chunk": 1}, {"max_chunk": PAGE - 1}, {"max_chunk": None}, {"max_chunk": 1e6},
    ],
)  # fmt: skip
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="arena"):
        ArenaOptions(**wrong)


@pytest.mark.parametrize("nbytes", [1.0, "1", None, True])
def test_sizes_are_integers(nbytes: Any) -> None:
    arena = HostArena(EmulatedDriver(), PAGE)
    for call in (lambda size: HostArena(arena.driver, size), arena.cut, arena.allocate):
        with pytest.raises(InvalidRequestError, match="give an integer"):
            call(nbytes)
    with pytest.raises(InvalidRequestError, match="alignment"):
        arena.allocate(1, alignment=nbytes)


@pytest.mark.parametrize("bits", [64, 1024, 20_000])
def test_sizes_beyond_every_machine(bits: int) -> None:
    nbytes = 1 << bits  # the largest has more digits than Python writes out
    arena = HostArena(EmulatedDriver(), PAGE)
    for call in (lambda size: HostArena(arena.driver, size), arena.cut, arena.allocate):
        with pytest.raises(OutOfMemory):
            call(nbytes)
        with pytest.raises(InvalidRequestError):
            call(-nbytes)
    with pytest.raises(InvalidRequestError, match="aligned"):
        arena.allocate(1, alignment=1 << 20_000)
    with pytest.raises(OutOfMemory):
        HostArena(arena.driver, nbytes, LAZY)


@pytest.mark.parametrize("driver", [None, 1, EmulatedDriver])
def test_drivers_are_drivers(driver: Any) -> None:
    with pytest.raises(InvalidRequestError, match="Driver"):
        HostArena(driver, PAGE)


@pytest.mark.parametrize("options", [{}, {"touch": False}, 0, EmulatedDriver()])
def test_options_are_its_own(options: Any) -> None:
    with pytest.raises(InvalidRequestError, match="ArenaOptions"):
        HostArena(EmulatedDriver(), PAGE, options)


@pytest.mark.parametrize(
    "span", [None, 1, (1, 2), Span(None, None), Span(1, 2.0), Span(0, 1 << 20_000)]  # type: ignore[arg-type]
)  # fmt: skip
def test_spans_are_spans(span: Any) -> None:
    arena = HostArena(EmulatedDriver(), PAGE)
    for call in (arena.deallocate, arena.array):
        with pytest.raises(InvalidRequestError, match="arena: "):
            call(span)


# -- finalisers --------------------------------------------------------------------------------------------
def test_a_finaliser_gives_back_amid_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = HostArena(EmulatedDriver(), 4 * PAGE, LAZY)
    old, take = arena.allocate(2 * PAGE), arena._parts.take

    def interrupted(nbytes: int, alignment: int) -> Any:
        taken = take(nbytes, alignment)
        arena.deallocate(old)  # as a garbage collection may, right here
        with pytest.raises(InvalidRequestError, match="finaliser"):
            arena.allocate(1)
        return taken

    monkeypatch.setattr(arena._parts, "take", interrupted)
    new = arena.allocate(PAGE)
    monkeypatch.undo()
    assert arena.used == PAGE
    with pytest.raises(InvalidRequestError, match="twice"):
        arena.deallocate(old)
    arena.deallocate(new)
    assert (arena.used, arena.largest_free) == (0, 4 * PAGE)


def test_giving_back_never_waits_for_another_thread() -> None:
    arena = HostArena(EmulatedDriver(), 4 * PAGE, LAZY)
    span = arena.allocate(4 * PAGE)
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with arena._lock:
            inside.set()
            assert done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(60)
    arena.deallocate(span)
    with pytest.raises(InvalidRequestError, match="twice"):
        arena.deallocate(span)
    done.set()
    assert arena.allocate(4 * PAGE) == span  # what was put off is taken in before it is found too small
    holder.join()


def test_what_is_put_off_is_taken_in_before_memory_runs_out() -> None:
    arena = HostArena(EmulatedDriver(), 4 * PAGE, LAZY)
    span = arena.allocate(4 * PAGE)
    with arena._lock:
        arena.deallocate(span)
    for look in (lambda: arena.used == 0, lambda: arena.largest_free == 4 * PAGE):
        span = arena.allocate(4 * PAGE)
        arena._live.remove(span)
        arena._lock._late.append(lambda span=span: arena._parts.give(span, []))  # the holder has not looked yet
        assert look()
    span = arena.allocate(4 * PAGE)
    arena._live.remove(span)
    arena._lock._late.append(lambda: arena._parts.give(span, []))
    assert arena.allocate(4 * PAGE) == span


def test_objects_in_cycles_give_back_in_their_finalisers() -> None:
    arena = HostArena(EmulatedDriver(), 64 * MIB, LAZY)

    class Entry:
        def __init__(self) -> None:
            self.me = self
            weakref.finalize(self, arena.deallocate, arena.allocate(PAGE)).atexit = False

    threshold = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for _ in range(5000):
            Entry()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert arena.used == 0


@pytest.mark.parametrize("kind", ["list", "no event", "no stream", "captured", "another driver", "foreign stream"])
def test_uses_that_say_nothing(machine: Machine, kind: str) -> None:
    arena, stream, foreign = HostArena(machine.driver, PAGE), machine.stream(), EmulatedDriver().create_stream(0)
    captured = stream.record()
    captured.captured()
    uses: Any = {
        "list": [stream],
        "no event": {stream: None},
        "no stream": {1: stream.record()},
        "captured": {stream: captured},
        "another driver": {stream: foreign.record()},
        "foreign stream": {foreign: stream.record()},
    }[kind]
    span = arena.allocate(PAGE)
    with pytest.raises(InvalidRequestError, match="uses"):
        arena.deallocate(span, uses=uses)
    assert arena.used == PAGE
    arena.deallocate(span, uses={stream: stream.record()})
    stream.synchronize()
    assert arena.allocate(PAGE) == span


# -- life --------------------------------------------------------------------------------------------------
def test_pages_live_as_long_as_an_array_of_them(unmapped: list[Span]) -> None:
    driver = EmulatedDriver()
    arena = HostArena(driver, PAGE, LAZY)
    whole = Span(arena.address, PAGE)
    array = arena.array(arena.cut(1000))
    array[:] = 7
    part = array[100:200].view(np.uint32)
    unmapped.clear()
    del arena
    gc.collect()
    assert unmapped == []
    assert driver.registered == PAGE
    del array
    gc.collect()
    assert unmapped == []
    assert (part == 0x07070707).all()
    del part
    gc.collect()
    assert unmapped == [whole]
    assert driver.registered == 0


def test_closing_unregisters_and_leaves_the_bytes(unmapped: list[Span]) -> None:
    driver = EmulatedDriver()
    arena = HostArena(driver, PAGE, LAZY)
    whole, array = Span(arena.address, PAGE), arena.array(arena.cut(100))
    array[:] = 3
    unmapped.clear()
    arena.close()
    arena.close()
    assert arena.closed
    assert driver.registered == 0
    for nbytes in (0, 1):
        with pytest.raises(ClosedError, match="new HostArena"):
            arena.cut(nbytes)
    with pytest.raises(ClosedError, match="new HostArena"):
        arena.array(whole)
    array[:50] = 4
    del arena
    gc.collect()
    assert unmapped == []
    assert set(array) == {3, 4}
    del array
    gc.collect()
    assert unmapped == [whole]


def test_work_on_the_pages_must_be_over(emulate: Callable[..., Machine], unmapped: list[Span]) -> None:
    machine = emulate(eagerness=0.0)
    arena = HostArena(machine.driver, PAGE, LAZY)
    ptr, stream, span = machine.device(100), machine.stream(), arena.cut(100)
    machine.driver.copy(ptr, span.ptr, 100, stream=stream)
    with pytest.raises(RaceError):
        arena.close()
    stream.synchronize()
    arena.close()
    assert machine.driver.registered == 0  # type: ignore[attr-defined]


def test_pages_that_a_device_may_still_use_are_never_unmapped(
    emulate: Callable[..., Machine], unmapped: list[Span]
) -> None:
    """Those of a kernel that never ends, say: lost, and neither somebody else's nor an error in a finaliser."""
    machine = emulate(eagerness=0.0)
    arena, stream = HostArena(machine.driver, PAGE, LAZY), machine.stream()
    bracket = machine.driver.launch(
        stream, reads=[Span(machine.driver.host_device_pointer(arena.address, 0), 100)]
    )
    unmapped.clear()
    del arena
    gc.collect()
    assert unmapped == []
    bracket.end()


def test_dropping_an_arena_waits_for_the_work_on_it(emulate: Callable[..., Machine], unmapped: list[Span]) -> None:
    machine = emulate(eagerness=0.0, device_count=2)
    arena = HostArena(machine.driver, PAGE, LAZY)
    ptr, whole, span = machine.device(100, 1), Span(arena.address, PAGE), arena.cut(100)
    arena.array(span)[:] = 9
    machine.driver.copy(ptr, span.ptr, 100, stream=machine.stream(1))
    unmapped.clear()
    del arena
    gc.collect()
    assert unmapped == [whole]
    assert machine.driver.registered == 0  # type: ignore[attr-defined]
    assert set(machine.read(ptr, 100, device=1)) == {9}


def test_a_driver_that_was_closed_first(unmapped: list[Span]) -> None:
    driver = EmulatedDriver()
    arena = HostArena(driver, PAGE, LAZY)
    driver.close()
    with refused("DEINITIALIZED"):
        arena.close()
    del arena
    gc.collect()


def test_a_refused_registration_leaves_nothing(unmapped: list[Span], monkeypatch: pytest.MonkeyPatch) -> None:
    driver, mapped = EmulatedDriver(), []
    map_anonymous = libc.map_anonymous

    def spy(nbytes: int) -> int:
        mapped.append(Span(map_anonymous(nbytes), nbytes))
        return mapped[-1].ptr

    monkeypatch.setattr(libc, "map_anonymous", spy)
    driver.close()
    with refused("DEINITIALIZED"):
        HostArena(driver, 3 * MIB, LAZY)
    gone = sorted(span for span in unmapped if span.nbytes)
    assert gone[0].ptr == mapped[0].ptr
    for one, other in itertools.pairwise(gone):
        assert one.ptr + one.nbytes == other.ptr
    assert gone[-1].ptr + gone[-1].nbytes == mapped[0].ptr + mapped[0].nbytes


@pytest.mark.parametrize("nbytes", [0, -1])
def test_arenas_of_nothing(nbytes: int) -> None:
    with pytest.raises(InvalidRequestError, match="more than zero"):
        HostArena(EmulatedDriver(), nbytes)


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 63, 1 << 64, 1 << 90])
def test_arenas_larger_than_the_address_space(nbytes: int) -> None:
    with pytest.raises(OutOfMemory) as caught:
        HostArena(EmulatedDriver(), nbytes)
    assert caught.value.size == nbytes
    assert caught.value.budget == "host memory"


FORK = """
import gc, os, pathlib, warnings
from memferry_allocator import ArenaOptions, EmulatedDriver, HostArena
class Driver(EmulatedDriver):
    def host_unregister(self, address):
        print("unregistered in", "child" if os.getpid() != parent else "parent", flush=True)
        super().host_unregister(address)
warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about threads, of which a library has some
parent = os.getpid()
arena = HostArena(Driver(), 1 << 20, ArenaOptions(touch=False))
array = arena.array(arena.cut(100))
array[:] = 5
child = os.fork()
if child == 0:
    kept = array
    del arena
    gc.collect()
    where = int(array.ctypes.data)
    del array, kept
    gc.collect()
    lines = [line.split()[0].split("-") for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
    os._exit(0 if any(int(low, 16) <= where < int(high, 16) for low, high in lines) else 1)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
del arena, array
gc.collect()
"""


def test_a_forked_child_undoes_nothing() -> None:
    assert in_a_process(FORK).splitlines() == ["child 0", "unregistered in parent"]


def test_the_end_of_the_process_undoes_nothing() -> None:
    """The pages go with it, and the driver may be going down already."""
    said = in_a_process(
        "from memferry_allocator import DevicePool, EmulatedDriver, HostArena\n"
        "class Driver(EmulatedDriver):\n"
        "    def host_unregister(self, address): print('unregistered', flush=True)\n"
        "    def free(self, device, ptr): print('freed', flush=True)\n"
        "driver = Driver()\n"
        "arena, pool = HostArena(driver, 1 << 20), DevicePool(driver, 0, 1 << 20)\n"
        "print('end')\n"
    )
    assert said == "end"


def test_devices_see_what_the_host_wrote(any_machine: Machine) -> None:
    machine = any_machine
    arena = HostArena(machine.driver, MIB)
    span, stream, ptr = arena.cut(10_000), machine.stream(), machine.device(10_000)
    arena.array(span)[:] = pattern(10_000)
    machine.driver.copy(ptr, machine.driver.host_device_pointer(span.ptr, 0), 10_000, stream=stream)
    stream.synchronize()
    assert np.array_equal(machine.read(ptr, 10_000), pattern(10_000))
    arena.close()
