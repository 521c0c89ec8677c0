"""Integers of other libraries are taken like any; what is none is refused before anything runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memferry_allocator import (
    DevicePool,
    EmulatedDriver,
    EmulatedOptions,
    HybridBuffer,
    InvalidRequestError,
    OutOfMemory,
    ShadowSpace,
    Span,
    open_device,
)
from memferry_allocator.driver import LinkModel

from .machine import Machine, address, pages, pattern

N = 4096
PAGE = 2 << 20


@pytest.mark.parametrize("kind", [np.int64, np.uint64])
def test_integers_of_numpy(machine: Machine, kind: Callable[[int], Any]) -> None:
    driver, stream, data = machine.driver, machine.stream(), pages(N)
    data[:] = pattern(N)
    ptr = driver.malloc(kind(0), kind(N))
    driver.host_register(kind(address(data)), kind(N))
    driver.fill(kind(ptr), kind(3), kind(N), stream=stream)
    driver.copy(kind(ptr), kind(address(data)), kind(N // 2), stream=stream)
    with driver.launch(stream, reads=[Span(kind(ptr), kind(N))]):
        seen = driver.host_bytes(kind(ptr), kind(N))
        assert seen is not None
        assert np.array_equal(np.frombuffer(seen, np.uint8)[: N // 2], data[: N // 2])
        assert set(seen[N // 2 :]) == {3}
    driver.synchronize(0)
    driver.host_unregister(kind(address(data)))
    driver.free(kind(0), kind(ptr))
    with HybridBuffer(driver, 0, kind(3 * PAGE), resident=[(kind(0), kind(5))]) as buffer:  # type: ignore[list-item]
        driver.fill(kind(buffer.ptr), 1, kind(buffer.nbytes), stream=stream)
        buffer.record_use(stream)
        buffer.repartition(np.float32(0.5), stream=stream)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [1.0, np.float64(1), "1", None])
def test_what_is_no_integer_is_refused(machine: Machine, wrong: Any) -> None:
    driver, stream = machine.driver, machine.stream()
    ptr = machine.device(N)
    calls: list[Callable[[], object]] = [
        lambda: driver.malloc(0, wrong),
        lambda: driver.copy(wrong, ptr, 8, stream=stream),
        lambda: driver.copy(ptr, ptr, wrong, stream=stream),
        lambda: driver.fill(ptr, wrong, 8, stream=stream),
        lambda: driver.fill(ptr, 1, wrong, stream=stream),
        lambda: driver.host_register(wrong, N),
        lambda: driver.reserve_addresses(wrong),
        lambda: HybridBuffer(driver, 0, wrong, resident=1),
        lambda: driver.create_stream(wrong),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError):
            call()
    driver.fill(ptr, 2, N, stream=stream)
    assert set(machine.read(ptr, N)) == {2}


def test_arguments_of_the_wrong_kind(machine: Machine) -> None:
    driver, stream = machine.driver, machine.stream()
    anything: Any
    for anything in (None, 5, "x", [1]):
        calls: list[Callable[[], object]] = [
            lambda it=anything: open_device(it),  # type: ignore[misc]
            lambda it=anything: stream.wait(it),  # type: ignore[misc]
            lambda it=anything: stream.record(it or 5),  # type: ignore[misc]
            lambda it=anything: HybridBuffer(it, 0, PAGE, resident=1),  # type: ignore[misc]
            lambda it=anything: HybridBuffer(driver, 0, PAGE, resident=it),  # type: ignore[misc]
            lambda it=anything: EmulatedOptions(device_count=it),  # type: ignore[misc]
            lambda it=anything: EmulatedOptions(eagerness=it if it != 5 else "5"),  # type: ignore[misc]
            lambda it=anything: EmulatedOptions(peer=it),  # type: ignore[misc]
            lambda it=anything: LinkModel(it if it != 5 else "5", 1.0),  # type: ignore[misc]
        ]
        for index, call in enumerate(calls):
            if (index, anything) in ((5, 5), (0, "x")):
                continue
            with pytest.raises(InvalidRequestError):
                call()
    for resident in ([(0, 1.5)], [(0,)], [None], float("nan")):
        with pytest.raises(InvalidRequestError, match="resident"):
            HybridBuffer(driver, 0, PAGE, resident=resident)  # type: ignore[arg-type]
    with ShadowSpace(driver, device_budget=N) as space:
        for partitions in (5, "12"):
            with pytest.raises(InvalidRequestError, match="list of sizes"):
                space.allocate("x", partitions=partitions)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="list of ranges"):
            space.buffer("x", None)  # type: ignore[arg-type]


def test_what_cannot_fit_is_refused_before_it_is_listed(machine: Machine) -> None:
    """Lists of this length would not end."""
    small = ShadowSpace(machine.driver, device_budget="1MiB", host_budget="64MiB")
    with small, pytest.raises(OutOfMemory, match="host_budget"):
        small.allocate("x", 1 << 60, partition_nbytes=256)
    large = ShadowSpace(machine.driver, device_budget="1MiB")
    with large, pytest.raises(InvalidRequestError, match="make them larger"):
        large.allocate("x", 1 << 60, partition_nbytes=256)
    for resident in (0, 1):
        with pytest.raises(OutOfMemory):
            HybridBuffer(machine.driver, 0, 1 << 60, resident=resident)


def test_a_thousand_pools_die_in_the_middle_of_a_call() -> None:
    driver = EmulatedDriver(EmulatedOptions(eagerness=0.0))
    stream = driver.create_stream(0)
    cycle: list[Any] = [DevicePool(driver, 0, 256) for _ in range(1500)]
    cycle.append(cycle)
    del cycle

    class Spans:
        def __iter__(self) -> Any:
            gc.collect()
            return iter(())

    driver.launch(stream, reads=Spans()).end()  # type: ignore[arg-type]
    assert driver.memory_info(0).free == driver.memory_info(0).total


def test_a_finaliser_that_raises_keeps_no_other_from_running(machine: Machine, capsys: Any) -> None:
    driver: EmulatedDriver = machine.driver  # type: ignore[assignment]
    ran = []
    with driver._lock:
        driver.finalise(lambda: [][1])
        driver.finalise(lambda: ran.append(1))
    assert ran == [1]
    assert "IndexError" in capsys.readouterr().err
