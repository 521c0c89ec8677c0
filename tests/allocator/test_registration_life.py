"""Registrations, owners and other libraries: who keeps what, and what happens when somebody does not."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memferry_allocator import (
    CaptureError,
    CaptureMode,
    Driver,
    DriverError,
    EmulatedDriver,
    EmulatedOptions,
    Foreign,
    ForkedError,
    HostArena,
    InvalidRequestError,
    RaceError,
    RegistrationError,
    RegistrationMap,
    Span,
    UnsupportedError,
    registrations,
)
from memferry_allocator.driver import DeviceInfo
from memferry_allocator.host.lock import FinaliserLock

from .driver_cases import PAGE, map_pages, unmap_pages
from .machine import Machine, address, pages, pattern, refused
from .test_open_driver import in_a_process
from .test_registration import Counting


class Owner:
    """Something that pages depend on."""


@pytest.fixture
def mapping() -> Iterator[int]:
    """16 touched private pages, whatever becomes of them meanwhile."""
    start = map_pages(16)
    touch(start, 16)
    yield start
    gc.collect()
    unmap_pages(start, 16)


def touch(start: int, count: int) -> None:
    ctypes.memset(start, 1, count * PAGE)


# -- owners ------------------------------------------------------------------------------------------------
def test_an_owner_lives_until_the_pages_are_unregistered(any_driver: Driver) -> None:
    data, known, owner = pages(PAGE), RegistrationMap(any_driver), Owner()
    seen = weakref.ref(owner)
    held = known.register(address(data), PAGE, owner=owner)
    del owner
    gc.collect()
    assert seen() is not None
    held.close()
    assert seen() is None


def test_a_sharer_keeps_the_first_ones_owner() -> None:
    """Its pages are those that the other's owner keeps."""
    data, known, owner = pages(PAGE), RegistrationMap(EmulatedDriver()), Owner()
    seen = weakref.ref(owner)
    first, second = known.register(address(data), PAGE, owner=owner), known.register(address(data) + 100, 100)
    del owner
    first.close()
    assert seen() is not None
    second.close()
    assert seen() is None


def test_a_collected_mmap_is_never_unmapped_while_registered(any_driver: Driver) -> None:
    """It happened: the address range was poisoned for its next owner."""
    known = registrations(any_driver)
    memory: mmap.mmap | None = mmap.mmap(-1, 4 * PAGE)
    start = address(np.frombuffer(memory, np.uint8))
    held = known.register(start, 4 * PAGE, owner=memory)
    memory = None
    gc.collect()
    assert not held.stale
    assert any_driver.host_registration(start) is not None
    del held
    gc.collect()
    assert any_driver.host_registration(start) is None
    assert map_pages(4, at=start) == start  # whoever is there next can register
    any_driver.host_register(start, 4 * PAGE)
    any_driver.host_unregister(start)
    unmap_pages(start, 4)


def test_a_dropped_handle_waits_then_unregisters_then_lets_go(
    emulate: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, order = emulate(eagerness=0.0), []
    driver, data, owner = machine.driver, pages(PAGE), Owner()

    def noted(call: str, real: Callable[..., None]) -> Callable[..., None]:
        def spy(*arguments: int) -> None:
            order.append(call)
            real(*arguments)

        return spy

    for call in ("synchronize_all", "host_unregister"):
        monkeypatch.setattr(driver, call, noted(call, getattr(driver, call)))
    held = registrations(driver).register(address(data), PAGE, owner=owner)
    weakref.finalize(owner, order.append, "owner")
    driver.copy(machine.device(PAGE), address(data), PAGE, stream=machine.stream())
    del owner, held
    gc.collect()
    assert order == ["synchronize_all", "host_unregister", "owner"]


def test_pages_in_use_for_ever_are_lost_and_not_reused(machine: Machine) -> None:
    data, owner = pages(PAGE), Owner()
    seen = weakref.ref(owner)
    held = registrations(machine.driver).register(address(data), PAGE, owner=owner)
    bracket = machine.driver.launch(machine.stream(), reads=[Span(machine.mapped(data), 10)])
    del owner, held
    gc.collect()
    assert seen() is not None
    assert registrations(machine.driver).covers(address(data), PAGE)
    bracket.end()


def test_an_arena_outlives_what_is_registered_inside_it(any_driver: Driver) -> None:
    arena = HostArena(any_driver, 4 * PAGE)
    span = arena.cut(PAGE)
    held = registrations(any_driver).register(*span)
    arena.close()
    del arena
    gc.collect()
    assert not held.stale
    assert any_driver.host_registration(span.ptr) is not None
    held.close()
    assert any_driver.host_registration(span.ptr) is None


def test_a_handle_is_a_context_manager() -> None:
    data, driver = pages(PAGE), EmulatedDriver()
    with registrations(driver).register(address(data), PAGE, name="me") as held:
        assert driver.registered == PAGE
        assert "me: 4096 bytes" in repr(held)
    assert driver.registered == 0
    assert "closed" in repr(held)


# -- stale ranges ------------------------------------------------------------------------------------------
def test_unmapped_while_registered(any_driver: Driver, mapping: int) -> None:
    known = registrations(any_driver)
    held = known.register(mapping, 16 * PAGE)
    assert not held.stale
    unmap_pages(mapping + 4 * PAGE, 2)  # a hole that no sampled page need lie in
    assert held.stale
    assert known.why_stale(held) == "its pages were unmapped"
    assert "stale" in repr(held)
    held.close()


@pytest.mark.parametrize("offset", [0, 4, -4])
def test_mapped_again_at_the_same_address(any_driver: Driver, offset: int) -> None:
    """The driver says "already registered" to the next owner; the map gives the stale one up first."""
    known, place = registrations(any_driver), map_pages(32)
    start = place + 8 * PAGE
    touch(start, 16)
    old = known.register(start, 16 * PAGE)
    unmap_pages(start, 16)
    assert map_pages(16, at=start) == start
    assert old.stale
    new = known.register(start + offset * PAGE, 16 * PAGE)
    assert (new.stale, old.stale, old.closed) == (False, True, True)
    assert known.covers(new.address, new.nbytes)
    assert "was unregistered" in known.why_stale(old)
    old.close()
    assert known.covers(new.address, new.nbytes)
    new.close()
    assert known.nbytes == 0
    unmap_pages(place, 32)


def test_another_file_at_the_same_address(tmp_path: Path) -> None:
    known, start, libc = registrations(EmulatedDriver()), map_pages(4), ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]

    def place(name: str, offset: int = 0) -> None:
        path = tmp_path / name
        if not path.exists():
            path.write_bytes(bytes(8 * PAGE))
        with path.open("r+b") as file:
            assert libc.mmap(start, 4 * PAGE, 3, mmap.MAP_SHARED | 0x10, file.fileno(), offset * PAGE) == start

    place("one")
    held = known.register(start, 4 * PAGE)
    place("one")
    assert not held.stale  # the same pages
    place("one", 2)
    assert "others lie at that address" in known.why_stale(held)
    place("two")
    assert held.stale
    held.close()
    unmap_pages(start, 4)


def test_pages_that_are_the_same_are_never_accused(any_driver: Driver, mapping: int) -> None:
    held = registrations(any_driver).register(mapping + 100, 15 * PAGE)
    touch(mapping, 16)
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(mapping + 3 * PAGE, PAGE, mmap.PROT_READ) == 0  # splits the mapping
    assert not held.stale
    assert libc.mprotect(mapping + 3 * PAGE, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert not held.stale
    held.close()


def test_a_stale_range_that_a_device_still_uses_stays(machine: Machine, mapping: int) -> None:
    known = registrations(machine.driver)
    old, stream = known.register(mapping, 16 * PAGE), machine.stream()
    bracket = machine.driver.launch(stream, reads=[Span(known.device_ptr(mapping, 0), 10)])
    unmap_pages(mapping, 16)
    assert map_pages(16, at=mapping) == mapping
    with pytest.raises(RaceError):
        known.register(mapping, PAGE)
    assert known.nbytes == 16 * PAGE
    bracket.end()
    stream.synchronize()
    known.register(mapping, PAGE).close()
    old.close()


def test_a_stale_range_that_somebody_has_unregistered_already(mapping: int) -> None:
    driver = EmulatedDriver()
    known = registrations(driver)
    old = known.register(mapping, 16 * PAGE)
    driver.host_unregister(mapping)
    unmap_pages(mapping, 16)
    assert map_pages(16, at=mapping) == mapping
    with known.register(mapping, 16 * PAGE):
        assert old.closed
    assert driver.registered == 0


def test_a_stale_read_only_range_bars_nobody(mapping: int) -> None:
    known = registrations(EmulatedDriver())
    old = known.register(mapping, 16 * PAGE, read_only=True)
    unmap_pages(mapping, 16)
    assert map_pages(16, at=mapping) == mapping
    with known.register(mapping, PAGE) as new:
        assert not new.read_only
    assert old.closed


def test_a_stale_range_that_was_given_up_lets_its_owner_go(mapping: int) -> None:
    known, owner = registrations(EmulatedDriver()), Owner()
    seen = weakref.ref(owner)
    first = known.register(mapping, 16 * PAGE, owner=owner)
    sharer = known.register(mapping, PAGE)
    first.close()
    del owner
    assert seen() is not None
    unmap_pages(mapping, 16)
    assert map_pages(16, at=mapping) == mapping
    with known.register(mapping, PAGE):
        assert seen() is None
        assert sharer.stale


def test_unregistered_behind_our_back() -> None:
    driver, data = EmulatedDriver(), pages(PAGE)
    known = registrations(driver)
    held = known.register(address(data), PAGE)
    driver.host_unregister(address(data))
    with refused("HOST_MEMORY_NOT_REGISTERED"):
        held.close()
    held.close()  # there is nothing left to undo
    assert known.nbytes == 0
    known.register(address(data), PAGE).close()


# -- registrations of somebody else ------------------------------------------------------------------------
def test_a_foreign_registration_is_refused_and_explained(any_driver: Driver) -> None:
    data, known = pages(4 * PAGE), RegistrationMap(any_driver)
    start = address(data)
    any_driver.host_register(start + PAGE, PAGE)
    with pytest.raises(RegistrationError) as caught:
        known.register(start, 2 * PAGE)
    error = caught.value
    assert error.code == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    assert (error.address, error.nbytes, error.pinned) == (start, 2 * PAGE, 0)
    for part in (f"8192 bytes) at {start:#x}", "another library", "without unregistering", "Foreign.BORROW"):
        assert part in str(error)
    assert f"at {start + PAGE:#x} that MemFerry has not registered" in str(error)
    assert known.nbytes == 0
    any_driver.host_unregister(start + PAGE)
    known.register(start, 2 * PAGE).close()


def test_a_borrowed_range_is_never_unregistered(any_machine: Machine) -> None:
    driver, data = any_machine.driver, pages(4 * PAGE)
    start, known = address(data), registrations(driver)
    driver.host_register(start, 4 * PAGE)
    held = known.register(start + 100, PAGE, foreign=Foreign.BORROW)
    assert known.covers(start + 100, PAGE)
    assert not known.covers(start + 99, 1)  # what was not asked for may go any time
    assert known.nbytes == 0
    data[:] = pattern(4 * PAGE)
    ptr, stream = any_machine.device(PAGE), any_machine.stream()
    driver.copy(ptr, start + 100, PAGE, stream=stream)
    stream.synchronize()
    assert np.array_equal(any_machine.read(ptr, PAGE), pattern(4 * PAGE)[100 : 100 + PAGE])
    with known.register(start + 200, 10):  # counted like any other
        held.close()
        assert known.covers(start + 200, 10)
    assert not known.covers(start + 200, 10)
    assert driver.host_registration(start) is not None
    driver.host_unregister(start)


def test_borrowing_takes_all_or_nothing(any_driver: Driver) -> None:
    data, known = pages(4 * PAGE), RegistrationMap(any_driver)
    start = address(data)
    any_driver.host_register(start, PAGE)
    any_driver.host_register(start + PAGE, PAGE)
    with known.register(start + 10, 2 * PAGE - 20, foreign=Foreign.BORROW) as held:  # two of them are fine
        assert held.chunks == (Span(start + 10, PAGE - 10), Span(start + PAGE, PAGE - 10))
        assert known.split(start, 2 * PAGE)[1:3] == list(held.chunks)
    for at, nbytes in ((0, 3 * PAGE), (PAGE, 2 * PAGE)):
        with refused("HOST_MEMORY_ALREADY_REGISTERED"):
            known.register(start + at, nbytes, foreign=Foreign.BORROW)
    with known.register(start + 2 * PAGE, PAGE, foreign=Foreign.BORROW):  # nothing to borrow: registered
        assert known.nbytes == PAGE
    any_driver.host_unregister(start)
    any_driver.host_unregister(start + PAGE)


def test_a_borrowed_range_whose_owner_has_gone(any_driver: Driver) -> None:
    data, known = pages(PAGE), registrations(any_driver)
    any_driver.host_register(address(data), PAGE)
    held = known.register(address(data), PAGE, foreign=Foreign.BORROW)
    assert not held.stale
    any_driver.host_unregister(address(data))
    assert known.why_stale(held) == "who had registered it has unregistered it"
    with known.register(address(data), PAGE):
        assert known.nbytes == PAGE
        assert held.closed
    held.close()


# -- read-only ---------------------------------------------------------------------------------------------
def test_read_only_mappings_need_the_flag(any_driver: Driver) -> None:
    start, known = map_pages(2, rights=mmap.PROT_READ), RegistrationMap(any_driver)
    with pytest.raises(RegistrationError, match="read_only=True"):
        known.register(start, PAGE)
    with known.register(start, PAGE, read_only=True) as held:
        assert held.read_only
    unmap_pages(start, 2)


def test_a_read_only_range_cannot_become_writable() -> None:
    driver, data = Counting(), pages(PAGE)
    known, start = RegistrationMap(driver), address(data)
    held = known.register(start + 100, 100, read_only=True, name="weights")
    driver.calls.clear()
    for at, nbytes in ((100, 100), (0, 150), (150, 10)):
        with pytest.raises(InvalidRequestError, match="read-only by weights; close that first"):
            known.register(start + at, nbytes)
    assert driver.calls == []
    with known.register(start, 300, read_only=True):
        assert known.nbytes == 300
    held.close()
    with known.register(start, 300), known.register(start, 300, read_only=True):  # reading is no more than writing
        assert known.nbytes == 300


def test_read_only_needs_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, data = EmulatedDriver(EmulatedOptions(device_count=2)), pages(PAGE)
    known, real = registrations(driver), driver.device_info

    def without(device: int) -> DeviceInfo:
        info = real(device)
        if device == 1:
            info.capabilities["READ_ONLY_HOST_REGISTER_SUPPORTED"] = 0
        return info

    monkeypatch.setattr(driver, "device_info", without)
    with pytest.raises(UnsupportedError, match=r"device 1 .* read-only"):
        known.register(address(data), PAGE, read_only=True)
    assert known.nbytes == driver.registered == 0
    known.register(address(data), PAGE).close()


# -- device pointers ---------------------------------------------------------------------------------------
def test_device_pointers_come_from_the_driver(any_machine: Machine) -> None:
    driver, data = any_machine.driver, pages(4 * PAGE)
    known, start = RegistrationMap(driver, max_chunk=PAGE), address(data)
    held = known.register(start, 4 * PAGE)
    for offset, nbytes in ((0, 1), (24, 100), (PAGE - 1, 1), (PAGE + 24, 2 * PAGE), (0, 4 * PAGE)):
        expected = driver.host_device_pointer(start + offset, 0)
        assert known.device_ptr(start + offset, 0, nbytes) == expected
    for offset, nbytes in ((-1, 1), (0, 4 * PAGE + 1), (4 * PAGE, 1)):
        with pytest.raises(InvalidRequestError, match="not all registered"):
            known.device_ptr(start + offset, 0, nbytes)
    assert known.device_ptr(start, 0, 0) == 0
    held.close()
    with pytest.raises(InvalidRequestError, match="not all registered"):
        known.device_ptr(start, 0)


def test_device_pointers_of_ranges_that_are_apart_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, data = EmulatedDriver(), pages(2 * PAGE)
    known, start, real = RegistrationMap(driver, max_chunk=PAGE), address(data), driver.host_device_pointer
    held = known.register(start, 2 * PAGE)

    def apart(where: int, device: int) -> int:
        return real(where, device) + (PAGE if where >= start + PAGE else 0)

    monkeypatch.setattr(driver, "host_device_pointer", apart)
    assert known.device_ptr(start + PAGE, 0, PAGE) == real(start, 0) + 2 * PAGE
    with pytest.raises(InvalidRequestError, match=f"break at {start + PAGE:#x}"):
        known.device_ptr(start, 0, PAGE + 1)
    held.close()


def test_is_registered() -> None:
    data, known = pages(PAGE), registrations(EmulatedDriver())
    with known.register(address(data) + 10, 100):
        asked = {at: known.is_registered(address(data) + at) for at in (9, 10, 109, 110)}
        assert asked == {9: False, 10: True, 109: True, 110: False}
        assert known.is_registered(address(data) + 10, 100)
        assert not known.is_registered(address(data) + 10, 101)


# -- what is refused ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("where", "nbytes"),
    [
        (-1, 10), (4096, -1), (4096, 1 << 64), ((1 << 64) - 1, 2), (1 << 64, 1), (4096, 1.0), ("a", 1), (None, 1),
    ],
)  # fmt: skip
def test_what_is_no_range(where: object, nbytes: object) -> None:
    driver = Counting()
    known = registrations(driver)
    for call in (
        known.register, known.covers, known.split, known.is_clear, lambda at, size: known.device_ptr(at, 0, size),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError, match="range"):
            call(where, nbytes)  # type: ignore[operator]
    assert driver.calls == []


@pytest.mark.parametrize("code", ["OPERATING_SYSTEM", "OUT_OF_MEMORY", "INVALID_VALUE"])
def test_a_failure_tells_what_bounds_it(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    driver, data = EmulatedDriver(), pages(4 * PAGE)
    known, start = RegistrationMap(driver, max_chunk=PAGE), address(data)
    held = known.register(start, PAGE)

    def fail(*_: int, read_only: bool) -> None:
        raise DriverError(f"CUDA_ERROR_{code}", "host_register")

    monkeypatch.setattr(driver, "host_register", fail)
    with pytest.raises(RegistrationError) as caught:
        known.register(start, 3 * PAGE)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.code, error.address, error.nbytes, error.pinned) == (
        f"CUDA_ERROR_{code}", start, 3 * PAGE, PAGE,
    )  # fmt: skip
    for part in ("12.00 KiB", "4.00 KiB pinned by MemFerry already", "lock limit", "cgroup memory limit"):
        assert part in str(error)
    assert known.nbytes == driver.registered == PAGE
    held.close()


@pytest.mark.parametrize("kind", [CaptureError, RaceError, DriverError])
def test_other_errors_pass_unchanged(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    driver, data = EmulatedDriver(), pages(PAGE)
    raised = DriverError("CUDA_ERROR_DEINITIALIZED", "x") if kind is DriverError else kind("x")

    def fail(*_: int, read_only: bool) -> None:
        raise raised

    monkeypatch.setattr(driver, "host_register", fail)
    with pytest.raises(kind) as caught:
        registrations(driver).register(address(data), PAGE)
    assert caught.value is raised


def test_what_an_undo_left_behind_is_known_and_used_again() -> None:
    driver, data = Counting(), pages(900)
    known, start = RegistrationMap(driver, max_chunk=300), address(data)
    driver.refuse |= {("register", start + 600), ("unregister", start + 300)}
    with refused("OPERATING_SYSTEM"):
        known.register(start, 900)
    assert known.nbytes == driver.registered == 300
    driver.refuse.clear()
    driver.calls.clear()
    known.register(start, 900).close()
    assert [where - start for call, where, _ in driver.calls if call == "register"] == [0, 600]
    assert known.nbytes == driver.registered == 0


def test_driver_calls_are_made_beside_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, data, inside = EmulatedDriver(), pages(PAGE), []

    @contextmanager
    def beside() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def guarded(real: Callable[..., None]) -> Callable[..., None]:
        def spy(*arguments: int, **options: bool) -> None:
            assert inside
            real(*arguments, **options)

        return spy

    for call in ("host_register", "host_unregister"):
        monkeypatch.setattr(driver, call, guarded(getattr(driver, call)))
    monkeypatch.setattr(driver, "beside_captures", beside)
    known = registrations(driver)
    known.register(address(data), PAGE).close()
    held = known.register(address(data), PAGE)
    del held
    gc.collect()
    assert driver.registered == 0


def test_entries_of_a_forked_child() -> None:
    driver, data = EmulatedDriver(), pages(PAGE)
    known = registrations(driver)
    held, arena = known.register(address(data), PAGE), HostArena(driver, PAGE)
    span = arena.allocate(10)
    driver._forked = True  # as the driver says in a child
    for entry in (
        lambda: known.register(address(data), PAGE),
        lambda: known.device_ptr(address(data), 0),
        lambda: known.covers(address(data), 1),
        lambda: known.split(address(data), 1),
        lambda: known.is_clear(address(data), 1),
        lambda: known.nbytes,
        lambda: held.stale,
        lambda: arena.used,
        lambda: arena.largest_free,
        held.close,
        arena.close,
        lambda: arena.cut(1),
        lambda: arena.allocate(1),
        lambda: arena.deallocate(span),
        lambda: arena.array(span),
        lambda: HostArena(driver, PAGE),
    ):
        with pytest.raises(ForkedError, match="spawn"):
            entry()
    driver._forked = False
    held.close()
    assert driver.registered == PAGE


FORK_UNDER_LOCKS = """
import os, signal, threading, warnings
from memferry_allocator import EmulatedDriver, ForkedError, HostArena, registrations
warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about threads
driver = EmulatedDriver()
arena, known = HostArena(driver, 4096), registrations(driver)
held, inside, done = arena.registration, threading.Event(), threading.Event()
def hold():
    with known._lock, arena._lock:
        inside.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends the process if it hangs
    raised = 0
    for entry in (
        lambda: arena.used, lambda: arena.largest_free, lambda: known.is_clear(0, 1), lambda: known.nbytes,
        lambda: held.stale, lambda: known.why_stale(held),
    ):
        try:
            entry()
        except ForkedError:
            raised += 1
    os._exit(raised + 10 * ("open" in repr(held)))
done.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_while_another_thread_held_the_locks() -> None:
    assert in_a_process(FORK_UNDER_LOCKS) == "16"


FORK = """
import os, warnings
import numpy as np
from memferry_allocator import EmulatedDriver, ForkedError, adopt, describe, registrations
warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about threads, of which a library has some
driver, data = EmulatedDriver(), np.ones(100, np.uint8)
held = adopt(driver, data)
child = os.fork()
if child == 0:
    raised = 0
    for entry in (lambda: adopt(driver, data), held.close, lambda: registrations(driver).covers(*held.span)):
        try:
            entry()
        except ForkedError:
            raised += 1
    own = EmulatedDriver()
    with adopt(own, data):
        raised += len(describe()) + own.registered
    os._exit(raised)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(describe()), driver.registered)
held.close()
print(driver.registered)
"""


def test_a_forked_child_uses_a_driver_of_its_own() -> None:
    assert in_a_process(FORK).split() == ["104", "1", "100", "0"]


@pytest.mark.parametrize("mode", CaptureMode)
def test_a_capture_survives_registering_and_closing(any_machine: Machine, mode: CaptureMode) -> None:
    driver, data, stream = any_machine.driver, pages(PAGE), any_machine.stream()
    early = registrations(driver).register(address(data), 100)
    driver.begin_capture(stream, mode)
    with registrations(driver).register(address(data), PAGE) as held:
        assert len(held.chunks) == 2
        early.close()
    driver.end_capture(stream)  # raises if it was broken


def test_what_is_dropped_during_a_capture_goes_after_it(any_machine: Machine) -> None:
    """To wait for the device's work would break the capture."""
    driver, stream, data = any_machine.driver, any_machine.stream(), pages(PAGE)
    known, arena = registrations(driver), HostArena(driver, PAGE)
    where = arena.address
    driver.begin_capture(stream)
    del arena
    gc.collect()
    with known.register(address(data), PAGE):
        assert known.covers(where, PAGE)
    driver.end_capture(stream)
    with known.register(address(data), PAGE):
        assert not known.covers(where, PAGE)


# -- finalisers --------------------------------------------------------------------------------------------
def test_finalisers_never_wait_for_the_lock() -> None:
    lock, done, order = FinaliserLock(), threading.Event(), []

    def finaliser() -> None:
        lock.finalise(lambda: order.append("late"))
        done.set()

    with lock:
        thread = threading.Thread(target=finaliser)
        thread.start()
        assert done.wait(60)  # although this thread has the lock
        lock.finalise(lambda: order.append("own"))
        with lock:
            pass
        assert order == []  # nor in the middle of a change
    thread.join()
    assert order == ["late", "own"]
    lock.finalise(lambda: order.append("now"))
    assert order == ["late", "own", "now"]


def test_handles_die_in_any_thread(emulate: Callable[..., Machine]) -> None:
    machine = emulate()
    known, data = registrations(machine.driver), pages(64 * PAGE)
    start, random = address(data), np.random.default_rng(0)
    plans = random.integers(0, 60, (4, 60, 2)).tolist()

    def work(plan: list[list[int]]) -> None:
        kept = []
        for at, nbytes in plan:
            kept.append(known.register(start + at * PAGE, nbytes * PAGE // 16, owner=Owner()))
            assert known.covers(start + at * PAGE, nbytes * PAGE // 16)
            if len(kept) > 5:
                kept.pop(0)

    threads = [threading.Thread(target=work, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del thread, threads
    gc.collect()
    assert known.nbytes == machine.driver.registered == 0  # type: ignore[attr-defined]


def test_two_threads_ask_for_the_map_of_a_new_driver() -> None:
    for _ in range(50):
        driver, start, found = EmulatedDriver(), threading.Barrier(2), []

        def work(driver: Driver = driver, start: threading.Barrier = start, found: list[object] = found) -> None:
            start.wait()
            found.append(registrations(driver))

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(one is other for one, other in itertools.pairwise(found))


@pytest.mark.parametrize("name", [5, None, b"a", ["a"]])
def test_names_are_text(name: Any) -> None:
    driver, data = EmulatedDriver(), pages(PAGE)
    with pytest.raises(InvalidRequestError, match="name="):
        registrations(driver).register(address(data), PAGE, name=name)
    assert driver.registered == 0


@pytest.mark.parametrize(
    "wrong", [{"foreign": "borrow"}, {"foreign": None}, {"max_chunk": "1"}, {"max_chunk": 1.5}]
)
def test_choices_that_are_none(wrong: dict[str, Any]) -> None:
    driver, data = EmulatedDriver(), pages(PAGE)
    if "max_chunk" in wrong:
        with pytest.raises(InvalidRequestError, match="max_chunk"):
            RegistrationMap(driver, **wrong)
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        registrations(driver).register(address(data), PAGE, **wrong)
    assert driver.registered == 0


@pytest.mark.parametrize("driver", [None, "emulated", EmulatedDriver])
def test_maps_are_of_drivers(driver: Any) -> None:
    for call in (registrations, RegistrationMap):
        with pytest.raises(InvalidRequestError, match="Driver"):
            call(driver)
