"""The contract of the driver seam, applied to every driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memferry_allocator import Driver, EmulatedDriver, EmulatedOptions, open_driver

from .contract_capture import CaptureContract
from .contract_driver import MIB, DriverContract
from .contract_virtual import VirtualMemoryContract


class TestEmulated(DriverContract, VirtualMemoryContract, CaptureContract):
    @pytest.fixture(params=[0.0, 0.3, 1.0], ids=["late", "any", "eager"])
    def driver(self, request: pytest.FixtureRequest) -> Iterator[Driver]:
        options = EmulatedOptions(device_count=2, device_memory=64 * MIB, eagerness=request.param)
        return EmulatedDriver(options)


@pytest.mark.gpu
class TestCuda(DriverContract, VirtualMemoryContract, CaptureContract):
    big = 64 * MIB

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        return open_driver("cuda")
