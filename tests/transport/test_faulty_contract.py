"""A driver with faults is a driver: without any planned it keeps the whole contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memferry_allocator import Driver, EmulatedDriver, EmulatedOptions
from memferry_transport import FaultyDriver

from ..allocator.contract_driver import DriverContract


class TestFaultyDriver(DriverContract):
    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = FaultyDriver(EmulatedDriver(EmulatedOptions(device_count=2)))
        yield driver
        driver.close()
