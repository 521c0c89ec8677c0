"""A small shadow space on each driver, and partitions of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from memferry_allocator import (
    Driver,
    EmulatedDriver,
    EmulatedOptions,
    HostArena,
    Mode,
    Partition,
    Place,
    ShadowSpace,
    Stream,
    View,
    open_driver,
)

MIB = 1 << 20


@dataclass
class Bench:
    """One buffer of one partition, filled with a pattern."""

    driver: Driver
    space: ShadowSpace
    part: Partition
    stream: Stream

    def view(self, place: Place, mode: Mode = Mode.READ_WRITE, stream: Stream | None = None) -> View:
        on = None if place is Place.HOST else stream or self.stream
        return self.part.acquire(place, mode, stream=on)

    def content(self) -> np.ndarray:
        """The bytes now, as the host reads them."""
        with self.part.acquire(Place.HOST, Mode.READ) as view:
            return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * view.nbytes).from_address(view.ptr)).copy()


def bench_on(driver: Driver) -> Iterator[Bench]:
    space = ShadowSpace(driver, 0, device_budget=4 * MIB)
    arena = HostArena(driver, MIB)
    span = arena.cut(64 << 10)
    arena.array(span)[:] = np.arange(64 << 10, dtype=np.uint32).astype(np.uint8)
    stream = driver.create_stream(0)
    [part] = space.buffer("buffer", [span])
    yield Bench(driver, space, part, stream)
    stream.close()
    space.close()
    arena.close()


@pytest.fixture
def emulated() -> Iterator[Bench]:
    driver = EmulatedDriver(EmulatedOptions(eagerness=0.0))
    yield from bench_on(driver)
    driver.close()


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """On every driver there is."""
    yield from bench_on(open_driver(request.param))
