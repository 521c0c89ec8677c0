"""Shared arenas: the same pages in several processes, each of which registers them for its own devices."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing import resource_sharer
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memferry_allocator import (
    ClosedError,
    Driver,
    EmulatedDriver,
    ForkedError,
    InvalidRequestError,
    OutOfMemory,
    RaceError,
    SharedArena,
    SharedHandle,
    Span,
    describe,
    open_driver,
    registrations,
)
from memferry_allocator.host import libc

from .driver_cases import PAGE
from .machine import Machine, pattern, refused

spawn = multiprocessing.get_context("spawn")


def descriptors() -> set[str]:
    gc.collect()  # what earlier tests have left
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def mapped(address: int) -> bool:
    return libc.is_mapped(address, PAGE)


def add_one(kind: str, handle: SharedHandle, answers: Queue[Any]) -> None:
    """What another process does: its device adds nothing but bytes of its own."""
    arena = handle.attach(open_driver(kind))
    machine = Machine(arena.driver)
    before = arena.array().copy()
    known, stream, ptr = registrations(arena.driver), machine.stream(), machine.device(arena.nbytes)
    assert known.covers(*arena.span)
    machine.write(ptr, before + 1)
    arena.driver.copy(known.device_ptr(arena.address, 0, arena.nbytes), ptr, arena.nbytes, stream=stream)
    stream.synchronize()
    answers.put((os.getpid(), arena.nbytes, int(before[5])))
    machine.close()
    arena.close()


def through_a_queue(handles: Queue[Any], answers: Queue[Any]) -> None:
    arena = handles.get().attach(EmulatedDriver())
    answers.put(bytes(arena.array(Span(arena.address, 10))))


def run(target: Callable[..., None], *arguments: Any) -> None:
    process = spawn.Process(target=target, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    process.close()


def test_devices_of_two_processes_reach_the_same_pages(any_machine: Machine) -> None:
    driver = any_machine.driver
    arena, answers = SharedArena.create(driver, 3 * PAGE - 5), spawn.Queue()
    arena.array()[:] = pattern(3 * PAGE)
    for turn in range(2):
        run(add_one, driver.name, arena.handle(), answers)
        pid, nbytes, sixth = answers.get(timeout=60)
        assert pid != os.getpid()
        assert (nbytes, sixth) == (3 * PAGE, (int(pattern(3 * PAGE)[5]) + turn) % 256)
    assert np.array_equal(arena.array(), pattern(3 * PAGE) + np.uint8(2))
    ptr, stream = any_machine.device(PAGE), any_machine.stream()
    driver.copy(ptr, arena.address + PAGE, PAGE, stream=stream)
    stream.synchronize()
    assert np.array_equal(any_machine.read(ptr, PAGE), arena.array()[PAGE : 2 * PAGE])
    arena.close()
    answers.close()
    answers.join_thread()


def test_a_handle_goes_through_a_queue() -> None:
    arena, handles, answers = SharedArena.create(EmulatedDriver(), PAGE), spawn.Queue(), spawn.Queue()
    arena.array()[:10] = 7
    process = spawn.Process(target=through_a_queue, args=(handles, answers))
    process.start()
    handles.put(arena.handle())
    assert answers.get(timeout=120) == bytes([7] * 10)
    process.join(60)
    assert process.exitcode == 0
    for queue in (handles, answers):
        queue.close()
        queue.join_thread()


def test_two_arenas_of_one_process_share_the_pages() -> None:
    one, other = EmulatedDriver(), EmulatedDriver()
    arena = SharedArena.create(one, 2 * PAGE)
    again = SharedArena.attach(other, arena.fd, arena.nbytes)
    assert again.address != arena.address
    arena.array(Span(arena.address + 100, 10))[:] = 5
    assert set(again.array()[100:110]) == {5}
    assert one.registered == other.registered == 2 * PAGE
    arena.close()
    again.array()[0] = 1  # has its own descriptor and mapping
    again.close()
    assert one.registered == other.registered == 0


def test_the_pages_are_private_and_cannot_shrink() -> None:
    arena = SharedArena.create(EmulatedDriver(), PAGE)
    assert os.fstat(arena.fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(arena.fd)
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    for size in (0, PAGE - 1, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    assert "memfd:" in os.readlink(f"/proc/self/fd/{arena.fd}")  # and no name in any file system
    arena.close()


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 3 << 20])
def test_sizes_are_whole_pages_and_no_more(nbytes: int) -> None:
    driver = EmulatedDriver()
    arena = SharedArena.create(driver, nbytes)
    assert arena.nbytes == driver.registered == -(-nbytes // PAGE) * PAGE
    assert not arena.array().any()


def test_huge_pages_are_those_that_the_system_shows() -> None:
    driver = EmulatedDriver()
    arena = SharedArena.create(driver, (4 << 20) + PAGE)
    assert arena.address % (2 << 20) == 0
    assert not arena.array().any()
    arena.array()[:] = 3
    assert (_huge_nbytes(arena.address) == 4 << 20) is arena.huge_pages
    assert set(arena.array()) == {3}


def _huge_nbytes(address: int) -> int:
    """Of the mapping that begins at an address."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped"))
    raise AssertionError("not mapped")


# -- life --------------------------------------------------------------------------------------------------
def test_closing_gives_everything_back(any_driver: Driver) -> None:
    before = descriptors()
    arena = SharedArena.create(any_driver, PAGE)
    address, out = arena.address, arena.array()
    arena.close()
    arena.close()
    assert arena.closed
    assert descriptors() == before
    for use in (arena.array, arena.handle):
        with pytest.raises(ClosedError, match="attach to it again"):
            use()
    out[:] = 4  # the host's array stays
    del arena, use
    gc.collect()
    assert set(out) == {4}
    del out
    gc.collect()
    assert not mapped(address)


def test_dropping_waits_unregisters_and_unmaps(machine: Machine) -> None:
    before = descriptors()
    arena = SharedArena.create(machine.driver, PAGE)
    address, ptr = arena.address, machine.device(PAGE)
    arena.array()[:] = 6
    machine.driver.copy(ptr, address, PAGE, stream=machine.stream())
    del arena
    gc.collect()
    assert descriptors() == before
    assert not mapped(address)
    assert set(machine.read(ptr, PAGE)) == {6}


def test_parts_alone_have_memory(machine: Machine) -> None:
    before, whole = descriptors(), 64 * PAGE
    parts = [
        Span(3 * PAGE + 5, PAGE),
        Span(PAGE, 1),
        Span(2 * PAGE - 1, 2),
        Span(40 * PAGE, 24 * PAGE),
        Span(9, 0),
    ]
    arena = SharedArena.create(machine.driver, whole, parts=parts)
    assert arena.parts == (Span(PAGE, 4 * PAGE), Span(40 * PAGE, 24 * PAGE))
    assert os.fstat(arena.fd).st_blocks * 512 == 28 * PAGE
    other = SharedArena.attach(EmulatedDriver(), arena.fd, whole, parts=parts)
    for each in (arena, other):
        known = registrations(each.driver)
        for part in each.parts:
            assert known.covers(each.address + part.ptr, part.nbytes)
        assert known.is_clear(each.address, PAGE)
        assert known.is_clear(each.address + 5 * PAGE, 35 * PAGE)
    stream = machine.stream()
    machine.driver.copy(machine.device(PAGE), arena.address + 50 * PAGE, PAGE, stream=stream)
    stream.synchronize()
    arena.array(Span(arena.address + 4 * PAGE, PAGE))[:] = 7
    assert set(other.array(Span(other.address + 4 * PAGE, PAGE))) == {7}
    assert os.fstat(arena.fd).st_blocks * 512 == 28 * PAGE
    for each in (arena, other):
        each.close()
        assert registrations(each.driver).nbytes == 0
    assert descriptors() == before
    with pytest.raises(InvalidRequestError, match="at offset 258048 is not inside"):
        SharedArena.create(machine.driver, whole, parts=[Span(63 * PAGE, 2 * PAGE)])


def test_work_must_be_over(machine: Machine) -> None:
    arena, stream = SharedArena.create(machine.driver, PAGE), machine.stream()
    machine.driver.copy(machine.device(PAGE), arena.address, PAGE, stream=stream)
    with pytest.raises(RaceError):
        arena.close()
    assert not arena.closed
    stream.synchronize()
    arena.close()


def test_a_refused_registration_leaves_nothing() -> None:
    driver, before = EmulatedDriver(), descriptors()
    driver.close()
    with refused("DEINITIALIZED"):
        SharedArena.create(driver, PAGE)
    assert descriptors() == before


# -- what is refused ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("nbytes", [0, -1])
def test_arenas_of_nothing(nbytes: int) -> None:
    with pytest.raises(InvalidRequestError, match="more than zero"):
        SharedArena.create(EmulatedDriver(), nbytes)


@pytest.mark.parametrize("nbytes", [1 << 44, 1 << 62, 1 << 63, 1 << 90, 1 << 1024])
def test_arenas_larger_than_the_machine(nbytes: int) -> None:
    before = descriptors()
    with pytest.raises(OutOfMemory) as caught:
        SharedArena.create(EmulatedDriver(), nbytes)
    assert caught.value.budget == "host memory"
    assert descriptors() == before


def test_descriptors_of_something_else(tmp_path: Path) -> None:
    driver, arena = EmulatedDriver(), SharedArena.create(EmulatedDriver(), PAGE)
    open_memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)  # could be cut short under our hands
    os.ftruncate(open_memory, PAGE)
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(PAGE))
        for fd, nbytes in (
            (file.fileno(), PAGE), (open_memory, PAGE), (arena.fd, 2 * PAGE), (arena.fd, 0), (1_000_000, PAGE),
        ):  # fmt: skip
            with pytest.raises(InvalidRequestError, match=r"handle\(\)"):
                SharedArena.attach(driver, fd, nbytes)
    os.close(open_memory)
    assert driver.registered == 0


def test_arrays_stay_inside() -> None:
    arena = SharedArena.create(EmulatedDriver(), PAGE)
    for offset, nbytes in ((-1, 1), (0, PAGE + 1), (PAGE, 1), (10, -1)):
        with pytest.raises(InvalidRequestError, match="not inside"):
            arena.array(Span(arena.address + offset, nbytes))


def test_names_and_forks() -> None:
    driver = EmulatedDriver()
    arena = SharedArena.create(driver, PAGE)
    assert [row.names for row in describe(driver)] == [("SharedArena",)]
    handle = arena.handle()
    driver._forked = True
    for entry in (
        lambda: SharedArena.create(driver, PAGE), lambda: handle.attach(driver), arena.handle, arena.close,
    ):  # fmt: skip
        with pytest.raises(ForkedError):
            entry()


def test_handles_are_only_for_other_processes() -> None:
    resource_sharer.stop(timeout=60)  # what it has open is not what is counted here
    arena, before = SharedArena.create(EmulatedDriver(), PAGE), descriptors()
    handle = ForkingPickler.loads(ForkingPickler.dumps(arena.handle()))
    again = handle.attach(EmulatedDriver())
    arena.array()[:] = 8
    assert set(again.array()) == {8}
    again.close()
    del handle, again
    gc.collect()
    resource_sharer.stop(timeout=60)
    assert descriptors() == before
    with pytest.raises(TypeError):
        pickle.dumps(arena)


def test_a_handle_outlives_the_arena_that_made_it() -> None:
    before, driver = descriptors(), EmulatedDriver()
    arena = SharedArena.create(driver, PAGE)
    handle = arena.handle()
    arena.array()[:] = 1
    arena.close()
    other = SharedArena.create(driver, PAGE)  # may get the descriptor's number
    other.array()[:] = 2
    again = handle.attach(driver)
    assert set(again.array()) == {1}
    for held in (again, other):
        held.close()
    del handle
    assert descriptors() == before


def test_a_number_that_means_another_file_by_now() -> None:
    driver = EmulatedDriver()
    arena, other = SharedArena.create(driver, PAGE), SharedArena.create(driver, PAGE)
    handle = arena.handle()
    os.dup2(other.fd, handle.fd, inheritable=False)
    with pytest.raises(InvalidRequestError, match="another file"):
        handle.attach(driver)
    assert driver.registered == 2 * PAGE


@pytest.mark.parametrize("fd", [-1, None, 1 << 63, "1", 1.0])
def test_what_is_no_descriptor(fd: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"handle\(\)"):
        SharedArena.attach(EmulatedDriver(), fd, PAGE)


@pytest.mark.parametrize("nbytes", [None, 1.0, "1", True, -(1 << 1024)])
def test_sizes_are_integers(nbytes: Any) -> None:
    before, driver = descriptors(), EmulatedDriver()
    arena = SharedArena.create(driver, PAGE)
    with pytest.raises(InvalidRequestError, match="shared arena"):
        SharedArena.create(driver, nbytes)
    with pytest.raises(InvalidRequestError, match="shared arena"):
        SharedArena.attach(driver, arena.fd, nbytes)
    arena.close()
    assert descriptors() == before


def test_other_arguments_have_their_types() -> None:
    arena = SharedArena.create(EmulatedDriver(), PAGE)
    nothing: Any = None
    for call in (
        lambda: SharedArena.create(nothing, PAGE),
        lambda: SharedArena.attach(nothing, arena.fd, PAGE),
        lambda: arena.handle().attach(nothing),
        lambda: arena.array(Span(nothing, nothing)),
        lambda: arena.array(0),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequestError):
            call()
