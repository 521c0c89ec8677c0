"""Emulated machines for tests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from memferry_allocator import Driver, EmulatedDriver, EmulatedOptions, UnsupportedError, open_driver

from .machine import Machine
from .refusals import is_refusal
from .shadow_world import World


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    given = collection_path.name == "test_given_driver.py"
    return True if given and not config.getoption("--driver") else None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skip what a driver from elsewhere refuses, where it may."""
    try:
        return (yield)
    except UnsupportedError as error:
        if pyfuncitem.get_closest_marker("may_refuse") and is_refusal(error):
            pytest.skip(f"refused: {error}")
        raise


@pytest.fixture
def emulate() -> Iterator[Callable[..., Machine]]:
    """Machines with an `EmulatedDriver` of the given options, closed at the end."""
    machines: list[Machine] = []

    def make(**options: Any) -> Machine:
        machines.append(Machine(EmulatedDriver(EmulatedOptions(**options))))
        return machines[-1]

    yield make
    for machine in machines:
        machine.close()


@pytest.fixture
def machine(emulate: Callable[..., Machine]) -> Machine:
    """One emulated machine that runs everything as late as it may."""
    return emulate(eagerness=0.0)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def any_driver(request: pytest.FixtureRequest) -> Driver:
    """Each driver in turn, the real one where there is a device."""
    return EmulatedDriver(EmulatedOptions(eagerness=0.0)) if request.param == "emulated" else open_driver("cuda")


@pytest.fixture
def any_machine(any_driver: Driver) -> Iterator[Machine]:
    machine = Machine(any_driver)
    yield machine
    machine.close()


@pytest.fixture
def world(machine: Machine) -> Iterator[World]:
    """A shadow space on that machine."""
    world = World(machine)
    yield world
    world.close()
