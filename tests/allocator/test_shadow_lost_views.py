"""Views that nobody releases, blocks that raise, devices that are gone: nothing holds a partition for ever."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from memferry_allocator import (
    EmulatedDriver,
    EmulatedOptions,
    InvalidRequestError,
    Mode,
    OutOfMemory,
    Place,
    ShadowSpace,
)
from memferry_allocator.interop import as_host

from .machine import Machine
from .shadow_world import LAZY, SIZE, World


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("place", Place)
@pytest.mark.parametrize("call", ["acquire", "evict", "write_back", "settle", "resize", "buffer", "space"])
def test_a_dropped_view_holds_nothing(world: World, place: Place, mode: Mode, call: str) -> None:
    world.part.acquire(place, mode, stream=None if place is Place.HOST else world.stream)
    calls: dict[str, Callable[[], object]] = {
        "acquire": lambda: world.write(world.part, 3),
        "evict": world.part.evict,
        "write_back": world.part.write_back,
        "settle": world.part.settle,
        "resize": lambda: world.space.resize(SIZE),
        "buffer": world.buffer.close,
        "space": world.space.close,
    }
    calls[call]()
    if call in ("acquire", "settle", "resize", "buffer", "space"):
        assert not world.part.in_use
        assert not world.space.leases


def test_the_end_of_a_dropped_view_comes_after_its_work(world: World) -> None:
    ptr = world.part.acquire(Place.DEVICE, Mode.WRITE, stream=world.stream).ptr
    world.driver.fill(ptr, 6, SIZE, stream=world.stream)
    assert set(world.read(world.part, Place.DEVICE, world.other)) == {6}
    assert set(world.read(world.part)) == {6}


def test_dropped_views_make_room(world: World) -> None:
    for part in world.buffer:
        part.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    held = [part.acquire(Place.DEVICE, Mode.READ, stream=world.stream) for part in list(world.buffer)[:2]]
    with pytest.raises(OutOfMemory):
        world.buffer[2].acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    for view in held:
        view.release()


def test_an_array_keeps_its_view_open(world: World) -> None:
    array = world.part.acquire(Place.HOST, Mode.READ_WRITE).array()
    with pytest.raises(InvalidRequestError, match="open"):
        world.part.acquire(Place.HOST, Mode.READ)
    array[:] = 8
    del array
    assert set(world.read(world.part, Place.DEVICE)) == {8}


def test_a_dropped_view_of_a_captured_stream_stays_open(world: World) -> None:
    world.part.acquire(Place.DEVICE, Mode.WRITE, stream=world.stream)
    world.driver.begin_capture(world.stream)
    with pytest.raises(InvalidRequestError, match="open"):
        world.part.settle()
    world.driver.end_capture(world.stream)
    world.part.settle()


def test_a_block_that_raises_keeps_its_error(world: World) -> None:
    with pytest.raises(KeyError), world.part.acquire(Place.HOST, Mode.READ_WRITE) as view:  # noqa: PT012
        shared = np.from_dlpack(as_host(view, "uint8"))  # type: ignore[arg-type]
        raise KeyError
    assert not view.released
    with pytest.raises(InvalidRequestError, match="open"):
        world.part.acquire(Place.HOST, Mode.WRITE)
    shared[:] = 4
    del shared
    gc.collect()
    assert set(world.read(world.part, Place.DEVICE)) == {4}
    assert view.released


def test_spaces_and_buffers_keep_the_error_of_their_block(world: World) -> None:
    space = ShadowSpace(world.driver, device_budget=SIZE)
    buffer = space.allocate("own", SIZE, options=LAZY)
    view = buffer[0].acquire(Place.HOST, Mode.READ)
    with pytest.raises(KeyError), space, buffer:
        raise KeyError
    assert not buffer.closed
    assert not space.closed
    view.release()
    space.close()


@pytest.mark.parametrize("end", ["lost", "lost beside another", "closed"])
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("place", Place)
def test_a_device_that_is_gone_holds_nothing(place: Place, mode: Mode, end: str) -> None:
    driver = EmulatedDriver(EmulatedOptions(device_count=2 if "another" in end else 1, eagerness=0.0))
    world = World(Machine(driver))
    own = world.space.allocate("own", SIZE, options=LAZY)
    world.write(own[0], 5)
    view = world.part.acquire(place, mode, stream=None if place is Place.HOST else world.stream)
    world.write(world.buffer[1], 7)
    if view.streams and mode.writes:
        driver.fill(view.ptr, 3, SIZE, stream=world.stream)
    if end != "closed":
        driver.lose(0)
    else:
        driver.close()
    view.release()
    assert view.released
    world.space.close()
    assert world.space.closed
    assert own.closed
    world.moves.close()
