"""The contract of memory resources, applied to every source, pool and adaptor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from memferry_allocator import (
    CountedMemory,
    DevicePool,
    Driver,
    DriverMemory,
    DriverPoolMemory,
    EmulatedDriver,
    EmulatedOptions,
    LimitedMemory,
    LoggedMemory,
    MemoryResource,
    RetryingMemory,
    TrackedMemory,
    UnsupportedError,
    VirtualMemory,
    open_driver,
)

from .contract_resource import MIB, Case, ResourceContract

ROOM = 24 * MIB


def grown(driver: Driver, source: MemoryResource, *, maximum: int = ROOM) -> DevicePool:
    return DevicePool(driver, 0, 0, maximum=maximum, source=source)


def pool(driver: Driver) -> DevicePool:
    return DevicePool(driver, 0, ROOM)


RESOURCES = {
    "driver": Case(lambda driver: DriverMemory(driver, 0)),
    "virtual": Case(lambda driver: VirtualMemory(driver, 0, ROOM), ROOM),
    "slab": Case(pool, ROOM),
    "segments": Case(lambda driver: grown(driver, DriverMemory(driver, 0))),
    "slab-and-segments": Case(lambda driver: DevicePool(driver, 0, 4 * MIB, maximum=ROOM), ROOM),
    "virtual-pool": Case(lambda driver: grown(driver, VirtualMemory(driver, 0, 4 * ROOM)), ROOM),
    "virtual-pool-from-a-slab": Case(
        lambda driver: DevicePool(driver, 0, 3 * MIB, maximum=ROOM, source=VirtualMemory(driver, 0, ROOM)), ROOM
    ),
    "pool-on-pool": Case(lambda driver: grown(driver, pool(driver))),
    "pool-on-limited": Case(
        lambda driver: grown(driver, LimitedMemory(VirtualMemory(driver, 0, 4 * ROOM), ROOM), maximum=4 * ROOM),
        ROOM,
    ),
    "limited": Case(lambda driver: LimitedMemory(DriverMemory(driver, 0), ROOM), ROOM),
    "counted": Case(lambda driver: CountedMemory(pool(driver)), ROOM),
    "logged": Case(lambda driver: LoggedMemory(pool(driver), os.devnull), ROOM),
    "tracked": Case(lambda driver: TrackedMemory(pool(driver)), ROOM),
    "retrying": Case(lambda driver: RetryingMemory(pool(driver), lambda _, attempt: attempt < 3), ROOM),
}
ON_CUDA = {
    "driver-pool": Case(lambda driver: DriverPoolMemory(driver, 0)),
    "pool-on-driver-pool": Case(lambda driver: grown(driver, DriverPoolMemory(driver, 0))),
}


class TestEmulated(ResourceContract):
    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        return EmulatedDriver(EmulatedOptions(device_count=2, device_memory=64 * MIB, eagerness=0.0))

    @pytest.fixture(params=RESOURCES)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return RESOURCES[request.param]


@pytest.mark.gpu
class TestCuda(ResourceContract):
    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        return open_driver("cuda")

    @pytest.fixture(params=RESOURCES | ON_CUDA)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return (RESOURCES | ON_CUDA)[request.param]


def test_the_emulated_driver_has_no_pools_of_its_own() -> None:
    with pytest.raises(UnsupportedError, match="driver pools"):
        DriverPoolMemory(EmulatedDriver(), 0)
