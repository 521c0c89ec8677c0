"""Rule 4: memory is poisoned, capacities hold, and addresses are what they are on the real thing or stricter."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memferry_allocator import DevicePool, DriverOutOfMemory, EmulatedDriver, HostArena, Span
from memferry_allocator.driver.emulated.monitor import Monitor

from .driver_cases import map_pages, unmap_pages
from .machine import Machine, address, pages, pattern, refused

N, MIB = 4096, 1 << 20


def test_fresh_memory_is_poison(machine: Machine) -> None:
    ptr = machine.device(5000)
    data = machine.read(ptr, 5000)
    assert set(data) == {0xFF}
    for kind in (np.float16, np.float32, np.float64):
        assert np.isnan(data[:1000].view(kind)).all()


def test_freed_memory_is_poison_for_who_still_has_it(machine: Machine) -> None:
    ptr = machine.driver.malloc(0, N)
    machine.write(ptr, pattern(N))
    machine.driver.synchronize(0)
    kept = np.frombuffer(machine.driver.host_bytes(ptr, N), np.uint8)  # type: ignore[arg-type]
    assert np.array_equal(kept, pattern(N))
    machine.driver.free(0, ptr)
    assert set(kept) == {0xFE}
    assert np.isnan(kept.view(np.float16)).all()
    assert (kept.view(np.float32) < -1e38).all()


def test_addresses_are_never_used_twice(machine: Machine) -> None:
    seen = set()
    for _ in range(20):
        ptr = machine.driver.malloc(0, N)
        assert ptr not in seen
        seen.add(ptr)
        machine.driver.free(0, ptr)
    stream, data = machine.stream(), machine.pinned(N)
    for ptr in seen:
        with refused("INVALID_VALUE"):
            machine.driver.copy(address(data), ptr, 16, stream=stream)


def test_device_pointers_are_no_host_addresses(machine: Machine) -> None:
    ptr, data = machine.device(N), machine.pinned(N)
    assert machine.mapped(data) != address(data)
    mapped = {int(line.split("-")[0], 16) for line in Path("/proc/self/maps").read_text().splitlines()}
    assert all(abs(start - ptr) > 1 << 40 for start in mapped if start < 1 << 48)


def test_host_bytes(machine: Machine) -> None:
    ptr, data, stream = machine.device(N), machine.pinned(N), machine.stream()
    machine.driver.host_bytes(ptr + 8, 16)[:] = bytes(range(16))  # type: ignore[index]
    assert bytes(machine.read(ptr + 8, 16)) == bytes(range(16))
    data[:] = pattern(N)
    for pointer in (machine.mapped(data), address(data)):
        assert bytes(machine.driver.host_bytes(pointer + 1, N - 1) or b"") == bytes(pattern(N)[1:])
    machine.driver.host_bytes(machine.mapped(data), 1)[0] = 77  # type: ignore[index]
    assert data[0] == 77
    bad = [(ptr, N + 1), (ptr - 1, 1), (ptr, -1), (machine.mapped(data), N + 1), (0, 1), (address(pages(N)), 1)]
    for where, nbytes in bad:
        with refused("INVALID_VALUE"):
            machine.driver.host_bytes(where, nbytes)
    for where in (ptr - 1, ptr + N):
        with refused("INVALID_VALUE"):
            machine.driver.copy(address(data), where, 1, stream=stream)


def test_capacities_hold(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_count=2, device_memory=3 * MIB)
    first = machine.driver.malloc(0, 2 * MIB)
    assert machine.driver.memory_info(0) == (MIB, 3 * MIB)
    assert machine.driver.memory_info(1) == (3 * MIB, 3 * MIB)
    with pytest.raises(DriverOutOfMemory) as caught:
        machine.driver.malloc(0, MIB + 1)
    error = caught.value
    assert (error.size, error.used, error.limit, error.budget) == (MIB + 1, 2 * MIB, 3 * MIB, "emulated:0")
    rest = machine.driver.malloc(0, MIB)
    assert machine.driver.memory_info(0).free == 0
    machine.device(3 * MIB, 1)
    machine.driver.free(0, first)
    machine.driver.free(0, rest)
    assert machine.driver.memory_info(0).free == 3 * MIB


def test_a_device_larger_than_the_host_runs_out_too(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_memory=1 << 62)
    for nbytes in (1 << 50, 1 << 61):
        with pytest.raises(DriverOutOfMemory) as caught:
            machine.driver.malloc(0, nbytes)
        assert caught.value.size == nbytes
    assert machine.driver.memory_info(0).free == 1 << 62


def test_memory_belongs_to_its_device(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_count=2)
    ptr = machine.device(N, 1)
    with refused("INVALID_VALUE"):
        machine.driver.free(0, ptr)


def test_registered_bytes_are_counted(machine: Machine) -> None:
    driver: EmulatedDriver = machine.driver  # type: ignore[assignment]
    before, data = driver.registered, pages(3 * N)
    driver.host_register(address(data) + 7, 5000)
    assert driver.registered - before == 5000
    driver.host_unregister(address(data) + 7)
    assert driver.registered == before


def test_devices_do_not_write_what_is_registered_read_only(machine: Machine) -> None:
    start, ptr, stream = map_pages(1, rights=mmap.PROT_READ), machine.device(N), machine.stream()
    machine.driver.host_register(start, N, read_only=True)
    mapped = machine.driver.host_device_pointer(start, 0)
    machine.driver.copy(ptr, mapped, N, stream=stream)
    machine.driver.launch(stream, reads=[Span(mapped, N)]).end()
    for target in (start, mapped):
        with refused("INVALID_VALUE"):
            machine.driver.copy(target, ptr, N, stream=stream)
    with refused("INVALID_VALUE"):
        machine.driver.fill(mapped, 0, N, stream=stream)
    with refused("ILLEGAL_ADDRESS"):
        machine.driver.launch(stream, writes=[Span(mapped, N)])
    stream.synchronize()
    assert set(machine.read(ptr, N)) == {0}
    machine.driver.host_unregister(start)
    unmap_pages(start, 1)


def test_fill_needs_a_device_pointer(machine: Machine) -> None:
    data, stream = machine.pinned(N), machine.stream()
    with refused("INVALID_VALUE"):
        machine.driver.fill(address(data), 1, N, stream=stream)
    machine.driver.fill(machine.mapped(data), 1, N, stream=stream)
    stream.synchronize()
    assert set(data) == {1}


def test_streams_are_known_by_their_handle(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_count=2)
    stream = machine.driver.create_stream(0)
    handle = int(stream.handle)
    borrowed = machine.driver.stream_from_handle(0, handle)
    with refused("INVALID_HANDLE"):
        machine.driver.stream_from_handle(1, handle)
    with refused("INVALID_HANDLE"):
        machine.driver.stream_from_handle(0, 10**6)
    stream.close()
    with refused("INVALID_HANDLE"):
        machine.driver.stream_from_handle(0, handle)
    with refused("INVALID_HANDLE"):
        borrowed.record()


# -- garbage collection in the middle of a call ------------------------------------------------------------
def test_finalisers_wait_for_the_end_of_the_call() -> None:
    monitor, ran = Monitor(), []
    monitor.finalise(lambda: ran.append("outside"))
    with monitor:
        with monitor:
            monitor.finalise(lambda: ran.append("inside"))
        assert ran == ["outside"]
        other = threading.Thread(target=lambda: monitor.finalise(lambda: ran.append("other thread")))
        other.start()
        other.join()
        assert ran == ["outside", "other thread"]
    assert ran == ["outside", "other thread", "inside"]


def test_objects_that_die_in_the_middle_of_a_call(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool and an arena in a garbage cycle, collected while the driver changes its books."""
    driver: EmulatedDriver = machine.driver  # type: ignore[assignment]
    ptr, stream = machine.device(N), machine.stream()
    free, registered = driver.memory_info(0).free, driver.registered

    def litter() -> weakref.ref[object]:
        cycle: list[object] = [DevicePool(driver, 0, N), HostArena(driver, N)]
        cycle.append(cycle)
        return weakref.ref(cycle[1])

    seen = []
    check = driver._engine.log.check

    def collect(*arguments: object, **options: object) -> None:
        gc.collect()
        seen.append((driver.memory_info(0).free, driver.registered))
        check(*arguments, **options)  # type: ignore[arg-type]

    gc.collect()
    arena = litter()
    monkeypatch.setattr(driver._engine.log, "check", collect)
    driver.fill(ptr, 1, N, stream=stream)
    monkeypatch.undo()
    assert arena() is None
    assert seen[0] == (free - N, registered + N)  # not while the call was under way
    assert (driver.memory_info(0).free, driver.registered) == (free, registered)
