"""The contract of the driver seam for a driver from elsewhere: ``pytest THIS --driver NAME[=MODULE:FACTORY]``.

Collected only with that option.  What a driver may refuse with `UnsupportedError` is skipped, and the reason says
what: see docs/new-accelerator.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memferry_allocator import Driver, open_driver

from .contract_capture import CaptureContract
from .contract_driver import MIB, DriverContract
from .contract_virtual import VirtualMemoryContract


@pytest.mark.may_refuse
class TestGiven(DriverContract, VirtualMemoryContract, CaptureContract):
    big = 64 * MIB

    @pytest.fixture
    def driver(self, request: pytest.FixtureRequest) -> Iterator[Driver]:
        return open_driver(request.config.getoption("--driver").partition("=")[0])
