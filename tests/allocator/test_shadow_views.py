"""Views: who may have one, what it gives, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from memferry_allocator import (
    ClosedError,
    InvalidRequestError,
    MemFerryError,
    Mode,
    Place,
    RaceError,
    Span,
)

from .shadow_world import SIZE, World


def test_a_view_ends_once_and_for_all(world: World) -> None:
    view = world.part.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    assert view.span == Span(view.ptr, SIZE)
    assert not view.released
    assert world.part.in_use
    view.release()
    view.release()
    assert view.released
    assert not world.part.in_use
    uses: list[Callable[[], object]] = [
        lambda: view.ptr,
        lambda: view.span,
        lambda: view.record_stream(world.other),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match=r"weights\[0\].*acquire it again"):
            use()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("held", Mode)
@pytest.mark.parametrize(
    "places", [(a, b) for a in Place for b in Place], ids=lambda p: f"{p[0].value}-{p[1].value}"
)
def test_readers_share_and_writers_do_not(
    world: World, places: tuple[Place, Place], held: Mode, mode: Mode
) -> None:
    streams = [None if place is Place.HOST else world.stream for place in places]
    view = world.part.acquire(places[0], held, stream=streams[0])
    if held.writes or mode.writes:
        with pytest.raises(InvalidRequestError, match=r"weights\[0\].*open"):
            world.part.acquire(places[1], mode, stream=streams[1])
        view.release()
    world.part.acquire(places[1], mode, stream=streams[1]).release()
    view.release()


@pytest.mark.parametrize("place", [Place.DEVICE, Place.MAPPED])
@pytest.mark.parametrize("mode", [Mode.WRITE, Mode.READ_WRITE])
def test_a_writing_view_has_one_stream(world: World, place: Place, mode: Mode) -> None:
    with world.part.acquire(place, mode, stream=world.stream) as view:
        view.record_stream(world.stream)
        with pytest.raises(InvalidRequestError, match="one user"):
            view.record_stream(world.other)
        assert view.streams == (world.stream,)


def test_a_host_view_has_no_stream(world: World) -> None:
    with world.part.acquire(Place.HOST, Mode.READ) as view:
        assert view.streams == ()
        with pytest.raises(InvalidRequestError, match="one user"):
            view.record_stream(world.stream)


def test_a_host_view_can_be_released_by_who_was_handed_it(world: World) -> None:
    view, errors = world.part.acquire(Place.HOST, Mode.WRITE), []
    world.home(world.part)[:] = 1

    def work() -> None:
        try:
            world.home(world.part)[:] = 2
            view.release()
        except MemFerryError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert set(world.read(world.part, Place.DEVICE)) == {2}


def test_a_release_that_is_refused_leaves_the_view_open(world: World) -> None:
    """Another thread releases it while the one that acquired it goes on using the bytes."""
    view, errors = world.part.acquire(Place.HOST, Mode.WRITE), []
    with world.driver.host_access(writes=[world.part.host]):
        world.home(world.part)[:] = 1

    def work() -> None:
        try:
            view.release()
        except RaceError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert not view.released
    assert world.part.in_use
    assert view.ptr == world.part.host.ptr
    view.release()
    assert not world.part.in_use
    assert set(world.read(world.part, Place.DEVICE)) == {1}
