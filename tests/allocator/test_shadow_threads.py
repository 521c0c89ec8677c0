"""Threads that share a shadow space, and programs whose result no seed may change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from memferry_allocator import (
    DriverOutOfMemory,
    EmulatedDriver,
    EmulatedOptions,
    Mode,
    Place,
    ShadowSpace,
)

from ..threads import in_threads
from .machine import Machine, pattern
from .shadow_world import SIZE, World


@pytest.mark.parametrize("seed", range(4))
def test_threads_share_a_space(emulate: Callable[..., Machine], seed: int) -> None:
    """Each counts up in partitions of its own, in all places, while all compete for the budget."""
    world = World(emulate(seed=seed, eagerness=0.2), budget=4 * SIZE, parts=8)

    def work(number: int) -> None:
        stream = world.driver.create_stream(0)
        for turn in range(25):
            part = world.buffer[number * 2 + turn % 2]
            place = list(Place)[(turn + number) % 3]
            with part.acquire(place, Mode.WRITE, stream=None if place is Place.HOST else stream) as view:
                if place is Place.HOST:
                    world.home(part)[:] = turn
                else:
                    world.driver.fill(view.ptr, turn, SIZE, stream=stream)
            assert set(world.read(part, list(Place)[turn % 3], stream)) == {turn}
        stream.close()

    in_threads(4, work)
    world.space.close()
    for index, part in enumerate(world.buffer):
        assert set(world.home(part)) == {24 - index % 2}
    world.close()


@pytest.mark.parametrize("seed", range(10))
def test_seeds_change_nothing(emulate: Callable[..., Machine], seed: int) -> None:
    """A longer program whose budget is half of its memory."""
    world = World(emulate(seed=seed, eagerness=0.1), parts=4)
    model = [pattern(SIZE, index).astype(np.int64) for index in range(4)]
    for turn in range(40):
        index, stream = turn * 7 % 4, [world.stream, world.other][turn % 2]
        place = list(Place)[turn % 3]
        part = world.buffer[index]
        with part.acquire(place, Mode.READ_WRITE, stream=None if place is Place.HOST else stream) as view:
            if place is Place.HOST:
                world.home(part)[: turn + 1] = turn
            else:
                world.driver.fill(view.ptr, turn, turn + 1, stream=stream)
        model[index][: turn + 1] = turn
    world.space.close()
    for index, part in enumerate(world.buffer):
        assert np.array_equal(world.home(part), model[index])
    world.close()


def test_a_space_without_memory_makes_nothing() -> None:
    driver = EmulatedDriver(EmulatedOptions(device_memory=SIZE))
    with pytest.raises(DriverOutOfMemory):
        ShadowSpace(driver, device_budget=2 * SIZE)
    assert not driver._streams
