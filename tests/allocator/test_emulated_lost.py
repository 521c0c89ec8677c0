"""An emulated device that is lost, beside one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from memferry_allocator import DeviceLostError, DevicePool, EmulatedDriver, EmulatedOptions, Span

from .machine import address, pages, pattern

N = 4096


@pytest.fixture
def driver() -> Iterator[EmulatedDriver]:
    driver = EmulatedDriver(EmulatedOptions(device_count=2, eagerness=0.0))
    yield driver
    driver.close()


def test_its_handles_are_dead_and_the_other_device_is_well(driver: EmulatedDriver) -> None:
    streams = [driver.create_stream(device) for device in (0, 1)]
    blocks = [driver.malloc(device, N) for device in (0, 1)]
    events = [stream.record() for stream in streams]
    driver.lose(0)
    calls: list[Callable[[int], object]] = [
        lambda device: driver.malloc(device, N),
        lambda device: driver.memory_info(device),
        lambda device: driver.synchronize(device),
        lambda device: driver.create_stream(device).close(),
        lambda device: driver.create_event(device),
        lambda device: driver.fill(blocks[device], 1, N, stream=streams[device]),
        lambda device: driver.launch(streams[device], reads=[Span(blocks[device], N)]).end(),
        lambda device: driver.host_bytes(blocks[device], N),
        lambda device: driver.copy(blocks[1], blocks[device], N // 2, stream=streams[1]) if device == 0 else None,
        lambda device: streams[device].synchronize(),
        lambda device: streams[device].query(),
        lambda device: streams[device].record(events[device]),
        lambda device: events[device].query(),
        lambda device: events[device].synchronize(),
        lambda device: driver.begin_capture(streams[device]) or driver.end_capture(streams[device]),  # type: ignore[func-returns-value]
        lambda device: driver.free(device, blocks[device]),
    ]
    for call in calls:
        with pytest.raises(DeviceLostError, match="device 0 is lost") as caught:
            call(0)
        assert caught.value.code == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
        call(1)
    for stream in streams:
        stream.close()


def test_its_work_never_runs(driver: EmulatedDriver) -> None:
    data, stream, ptr = pages(N), driver.create_stream(0), driver.malloc(0, N)
    driver.host_register(address(data), N)
    data[:] = pattern(N)
    driver.fill(ptr, 1, N, stream=stream)
    driver.copy(address(data), ptr, N, stream=stream)
    driver.lose(0)
    other = driver.create_stream(1)
    with pytest.raises(DeviceLostError):
        driver.synchronize_all()
    other.synchronize()
    assert np.array_equal(data, pattern(N))
    driver.close()
    assert np.array_equal(data, pattern(N))


def test_what_it_held_is_poisoned(driver: EmulatedDriver) -> None:
    seen = driver.host_bytes(driver.malloc(0, N), N)
    assert seen is not None
    seen[:] = bytes(N)
    driver.lose(0)
    assert set(np.frombuffer(seen, np.uint8)) == {0xFE}


def test_waiting_for_all_devices_waits_for_those_that_are_left(driver: EmulatedDriver) -> None:
    data, stream = pages(N), driver.create_stream(1)
    driver.host_register(address(data), N)
    driver.fill(driver.host_device_pointer(address(data), 1), 7, N, stream=stream)
    driver.lose(0)
    with pytest.raises(DeviceLostError):
        driver.synchronize_all()
    assert set(data) == {7}


def test_a_pool_on_it_is_collected_in_silence(driver: EmulatedDriver) -> None:
    pool = DevicePool(driver, 0, N)
    driver.lose(0)
    del pool
