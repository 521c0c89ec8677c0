"""What the test suites share: hypothesis profiles, and which tests need which hardware."""

from __future__ import annotations

import gc
import os
from functools import cache
from pkgutil import resolve_name

import pytest
from hypothesis import HealthCheck, settings

from memferry_allocator import DriverNotFoundError, InvalidRequestError, open_driver, register_driver

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for programs that tests start: waiting threads spin

pytest.register_assert_rewrite(
    "tests.allocator.machine",
    "tests.allocator.contract_capture",
    "tests.allocator.contract_driver",
    "tests.allocator.contract_virtual",
)

settings.register_profile(
    "default", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--driver",
        metavar="NAME[=MODULE:FACTORY]",
        help="a registered driver for tests/allocator/test_given_driver.py, or one to register",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "devices(n): needs n devices of the driver under test")
    config.addinivalue_line("markers", "may_refuse: what the driver under test may refuse is skipped")
    name, _, place = (config.getoption("--driver") or "").partition("=")
    if place:
        try:
            register_driver(name, resolve_name(place))
        except (ImportError, AttributeError, ValueError, InvalidRequestError) as error:
            raise pytest.UsageError(f"--driver: {error}") from None


def pytest_collection_finish() -> None:
    """What is there by now stays: the collector, which many tests call, need not go through it each time."""
    gc.collect()
    gc.freeze()


@cache
def _no_cuda() -> str | None:
    """Why no CUDA device can be had; a driver that is there and broken is an error, not a reason."""
    try:
        open_driver("cuda")
    except DriverNotFoundError as error:
        return str(error)
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and _no_cuda():
        pytest.skip(f"needs a CUDA device: {_no_cuda()}")
