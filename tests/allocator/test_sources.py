"""Sources of device memory, beyond what the contract of resources asks of all."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from memferry_allocator import (
    CaptureMode,
    ClosedError,
    CountedMemory,
    DevicePool,
    Driver,
    DriverError,
    DriverMemory,
    DriverOutOfMemory,
    ForkedError,
    InvalidRequestError,
    LimitedMemory,
    OutOfMemory,
    PageLocation,
    UnsupportedError,
    VirtualMemory,
)

from .machine import Machine, refused

MIB = 1 << 20
GRANULE = 2 * MIB


def test_giving_back_waits_for_the_stream(machine: Machine) -> None:
    source, stream = DriverMemory(machine.driver, 0), machine.stream()
    ptr = source.allocate(1000, stream=stream)
    assert source.reserved == 1024
    machine.driver.fill(ptr, 1, 1000, stream=stream)
    source.deallocate(ptr, 1000, stream=stream)
    assert (source.reserved, stream.query()) == (0, True)


def test_a_device_that_has_no_more(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_memory=4 * MIB)
    stream = machine.stream()
    for source in (DriverMemory(machine.driver, 0), VirtualMemory(machine.driver, 0, 64 * MIB)):
        ptr = source.allocate(4 * MIB, stream=stream)
        with pytest.raises(DriverOutOfMemory) as caught:
            source.allocate(1, stream=stream)
        assert (caught.value.used, caught.value.limit, caught.value.budget) == (4 * MIB, 4 * MIB, "emulated:0")
        source.deallocate(ptr, 4 * MIB, stream=stream)


def test_what_the_driver_refuses_to_free_is_still_live(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    source, stream = DriverMemory(machine.driver, 0), machine.stream()
    ptr = source.allocate(1000, stream=stream)

    def free(device: int, ptr: int) -> None:
        raise DriverError("CUDA_ERROR_UNKNOWN", "free")

    with monkeypatch.context() as patch:
        patch.setattr(machine.driver, "free", free)
        with refused("UNKNOWN"):
            source.deallocate(ptr, 1000, stream=stream)
    source.deallocate(ptr, 1000, stream=stream)


# -- virtual memory ----------------------------------------------------------------------------------------
def test_addresses_cost_no_memory(machine: Machine) -> None:
    free = machine.driver.memory_info(0).free
    source = VirtualMemory(machine.driver, 0, 3 * MIB)
    assert (source.nbytes, source.granularity, source.reserved) == (4 * MIB, GRANULE, 0)
    assert machine.driver.memory_info(0).free == free
    source.close()


def test_it_grows_and_shrinks_at_its_end(machine: Machine) -> None:
    source, stream = VirtualMemory(machine.driver, 0, 64 * MIB), machine.stream()
    free = machine.driver.memory_info(0).free
    held = [source.allocate(nbytes, stream=stream) for nbytes in (1, 3 * MIB, 2 * MIB)]
    assert held == [source.base, source.base + 2 * MIB, source.base + 6 * MIB]
    assert (source.end, source.reserved) == (source.base + 8 * MIB, 8 * MIB)
    assert machine.driver.memory_info(0).free == free - 8 * MIB
    machine.driver.fill(held[0], 1, 8 * MIB, stream=stream)  # as one
    source.deallocate(held[2], 2 * MIB, stream=stream)
    assert source.end == source.base + 6 * MIB
    source.deallocate(held[0], 1, stream=stream)
    source.deallocate(held[1], 3 * MIB, stream=stream)
    assert (source.end, source.reserved) == (source.base, 0)
    source.close()


def test_holes_are_filled_once_the_addresses_are_used_up(machine: Machine) -> None:
    source, stream = VirtualMemory(machine.driver, 0, 8 * MIB), machine.stream()
    held = [source.allocate(2 * MIB, stream=stream) for _ in range(4)]
    for ptr in held[1:3]:
        source.deallocate(ptr, 2 * MIB, stream=stream)
    with pytest.raises(OutOfMemory, match="no gap is large enough") as caught:
        source.allocate(6 * MIB, stream=stream)
    assert (caught.value.size, caught.value.used, caught.value.limit) == (6 * MIB, 4 * MIB, 8 * MIB)
    assert source.allocate(4 * MIB, stream=stream) == held[1]
    for ptr, nbytes in ((held[0], 2 * MIB), (held[1], 4 * MIB), (held[3], 2 * MIB)):
        source.deallocate(ptr, nbytes, stream=stream)
    source.close()


def test_pages_that_cannot_be_mapped_go_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    source, stream = VirtualMemory(machine.driver, 0, 8 * MIB), machine.stream()
    free = machine.driver.memory_info(0).free

    def refuse(*_: object, **__: object) -> None:
        raise DriverError("CUDA_ERROR_UNKNOWN", "map_pages")

    with monkeypatch.context() as patch:
        patch.setattr(machine.driver, "map_pages", refuse)
        with refused("UNKNOWN"):
            source.allocate(MIB, stream=stream)
    assert (source.reserved, machine.driver.memory_info(0).free) == (0, free)
    source.close()


def test_closing(machine: Machine) -> None:
    source, stream = VirtualMemory(machine.driver, 0, 8 * MIB), machine.stream()
    ptr = source.allocate(1, stream=stream)
    with pytest.raises(InvalidRequestError, match="1 allocations are still live"):
        source.close()
    source.deallocate(ptr, 1, stream=stream)
    source.close()
    source.close()
    with pytest.raises(ClosedError):
        source.allocate(1, stream=stream)


def test_addresses_that_nobody_closes(machine: Machine) -> None:
    free, stream = machine.driver.memory_info(0).free, machine.stream()
    source = VirtualMemory(machine.driver, 0, 8 * MIB)
    machine.driver.fill(source.allocate(3 * MIB, stream=stream), 1, 3 * MIB, stream=stream)
    del source
    gc.collect()
    assert machine.driver.memory_info(0).free == free


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_addresses(machine: Machine, nbytes: int) -> None:
    with pytest.raises(InvalidRequestError, match="not more than zero bytes"):
        VirtualMemory(machine.driver, 0, nbytes)


def test_a_driver_without_virtual_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(location: PageLocation) -> int:
        return Driver.page_granularity(machine.driver, location)

    monkeypatch.setattr(machine.driver, "page_granularity", none)
    with pytest.raises(UnsupportedError, match="virtual memory management"):
        VirtualMemory(machine.driver, 0, MIB)


def test_a_reservation_beside_a_capture(machine: Machine) -> None:
    stream = machine.stream()
    machine.driver.begin_capture(stream, CaptureMode.GLOBAL)
    VirtualMemory(machine.driver, 0, MIB).close()
    machine.driver.end_capture(stream)


def test_a_forked_child_is_refused_before_any_lock(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would ever release a lock that another thread held at the fork."""
    pool, source = DevicePool(machine.driver, 0, MIB), VirtualMemory(machine.driver, 0, MIB)
    limited, counted, stream = LimitedMemory(pool, MIB), CountedMemory(pool), machine.stream()
    with monkeypatch.context() as child:
        child.setattr(machine.driver, "_forked", True)
        for call in (
            lambda: pool.largest_free,
            lambda: source.reserved,
            lambda: source.end,
            lambda: limited.allocate(2 * MIB, stream=stream),
            counted.push,
        ):
            with pytest.raises(ForkedError):
                call()
    pool.close()
    source.close()
