"""Rules 2 and 3: what nothing orders is a race, whatever ran when; what is ordered never is."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memferry_allocator import DriverError, EmulatedDriver, InvalidRequestError, RaceError, Span, Stream

from .machine import Bytes, Machine, address, pages, refused

N = 4096
Use = Callable[["Scene"], None]


class Scene:
    """Device memory, registered memory and two streams, for two uses of the same bytes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.driver = machine.driver
        self.one, self.other = machine.stream(), machine.stream()
        self.ptr, self.spare = machine.device(N), machine.device(N)
        self.data, self.more = machine.pinned(N), machine.pinned(N)
        self.mapped = machine.mapped(self.data)

    def copy(self, dst: int, src: int, stream: Stream, nbytes: int = N) -> None:
        self.driver.copy(dst, src, nbytes, stream=stream)

    def kernel(self, stream: Stream, **spans: int) -> None:
        with self.driver.launch(stream, **{key: [Span(ptr, N)] for key, ptr in spans.items()}):
            pass

    def host(self, data: Bytes, key: str) -> None:
        with self.driver.host_access(**{key: [Span(address(data), N)]}):
            pass


def on_thread(action: Callable[[], Any]) -> None:
    """Run in a new thread and raise here what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# Each is two uses of the same bytes, at least one of them a write, with nothing between them.
RACES: dict[str, tuple[Use, Use]] = {
    "two streams write": (
        lambda s: s.driver.fill(s.ptr, 1, N, stream=s.one),
        lambda s: s.driver.fill(s.ptr, 2, N, stream=s.other),
    ),
    "a stream reads what another writes": (
        lambda s: s.driver.fill(s.ptr, 1, N, stream=s.one),
        lambda s: s.copy(s.spare, s.ptr, s.other),
    ),
    "a stream writes what another reads": (
        lambda s: s.copy(s.spare, s.ptr, s.one),
        lambda s: s.driver.fill(s.ptr, 2, N, stream=s.other),
    ),
    "two streams write registered memory": (
        lambda s: s.copy(address(s.data), s.ptr, s.one),
        lambda s: s.copy(address(s.data), s.spare, s.other),
    ),
    "the same bytes under their two addresses": (
        lambda s: s.driver.fill(s.mapped, 1, N, stream=s.one),
        lambda s: s.copy(s.ptr, address(s.data), s.other),
    ),
    "one byte in common": (
        lambda s: s.driver.fill(s.ptr, 1, N // 2 + 1, stream=s.one),
        lambda s: s.driver.fill(s.ptr + N // 2, 1, N // 2, stream=s.other),
    ),
    "the host reads what a stream writes": (
        lambda s: s.copy(address(s.data), s.ptr, s.one),
        lambda s: s.host(s.data, "reads"),
    ),
    "the host writes what a stream writes": (
        lambda s: s.copy(address(s.data), s.ptr, s.one),
        lambda s: s.host(s.data, "writes"),
    ),
    "the host writes what a stream reads": (
        lambda s: s.copy(s.ptr, address(s.data), s.one),
        lambda s: s.host(s.data, "writes"),
    ),
    "a stream of another thread reads what the host wrote": (
        lambda s: s.host(s.data, "writes"),
        lambda s: on_thread(lambda: s.copy(s.ptr, address(s.data), s.one)),
    ),
    "another thread reads what the host wrote": (
        lambda s: s.host(s.data, "writes"),
        lambda s: on_thread(lambda: s.host(s.data, "reads")),
    ),
    "a kernel writes what a stream copies": (
        lambda s: s.copy(address(s.data), s.ptr, s.one),
        lambda s: s.kernel(s.other, writes=s.ptr),
    ),
    "a stream copies what a kernel writes": (
        lambda s: s.kernel(s.one, writes=s.ptr),
        lambda s: s.copy(address(s.data), s.ptr, s.other),
    ),
    "two kernels write": (
        lambda s: s.kernel(s.one, writes=s.ptr),
        lambda s: s.kernel(s.other, writes=s.ptr),
    ),
    "a kernel writes host memory that the host reads": (
        lambda s: s.kernel(s.one, writes=s.mapped),
        lambda s: s.host(s.data, "reads"),
    ),
    "memory is freed while it is written": (
        lambda s: s.driver.fill(s.ptr, 1, N, stream=s.one),
        lambda s: s.driver.free(0, s.ptr),
    ),
    "memory is freed while it is read": (
        lambda s: s.copy(s.spare, s.ptr, s.one),
        lambda s: s.driver.free(0, s.ptr),
    ),
    "memory is unregistered while it is read": (
        lambda s: s.copy(s.ptr, address(s.data), s.one),
        lambda s: s.driver.host_unregister(address(s.data)),
    ),
    "memory is unregistered while it is written": (
        lambda s: s.copy(address(s.data), s.ptr, s.one),
        lambda s: s.driver.host_unregister(address(s.data)),
    ),
    "an event of the wrong stream is waited for": (
        lambda s: s.driver.fill(s.ptr, 1, N, stream=s.one),
        lambda s: (s.other.wait(s.other.record()), s.driver.fill(s.ptr, 2, N, stream=s.other)),
    ),
    "the wrong stream is synchronised": (
        lambda s: s.copy(address(s.data), s.ptr, s.one),
        lambda s: (s.other.synchronize(), s.host(s.data, "reads")),
    ),
}


@pytest.mark.parametrize("eagerness", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RACES)
def test_races(emulate: Callable[..., Machine], name: str, seed: int, eagerness: float) -> None:
    scene = Scene(emulate(seed=seed, eagerness=eagerness))
    first, second = RACES[name]
    first(scene)
    with pytest.raises(RaceError, match=r"races with .*(not ordered before it)"):
        second(scene)
    scene.driver.synchronize(0)


BY_THE_HOST = [name for name in RACES if name.startswith("the host") or name.endswith("the host reads")]
BY_STREAMS = [name for name in RACES if not re.search("host|thread|freed|unregistered|wrong", name)]


@pytest.mark.parametrize("name", BY_STREAMS)
def test_an_event_between_makes_it_no_race(machine: Machine, name: str) -> None:
    scene = Scene(machine)
    first, second = RACES[name]
    first(scene)
    scene.other.wait(scene.one.record())
    second(scene)


@pytest.mark.parametrize("name", BY_THE_HOST)
def test_a_synchronisation_between_makes_it_no_race(machine: Machine, name: str) -> None:
    scene = Scene(machine)
    first, second = RACES[name]
    first(scene)
    scene.other.wait(scene.one.record())  # which says nothing to the host
    with pytest.raises(RaceError):
        second(scene)
    scene.other.synchronize()
    second(scene)


def test_memory_may_be_given_back_after_a_wait(machine: Machine) -> None:
    driver, stream, data = machine.driver, machine.stream(), pages(N)
    ptr = driver.malloc(0, N)
    driver.host_register(address(data), N)
    driver.copy(ptr, address(data), N, stream=stream)
    for call in (lambda: driver.free(0, ptr), lambda: driver.host_unregister(address(data))):
        with pytest.raises(RaceError):
            call()
    stream.synchronize()
    driver.free(0, ptr)
    driver.host_unregister(address(data))


WAITS: dict[str, Callable[[Scene], object]] = {
    "stream": lambda s: s.one.synchronize(),
    "event": lambda s: s.one.record().synchronize(),
    "device": lambda s: s.driver.synchronize(0),
    "another stream that waits": lambda s: (s.other.wait(s.one.record()), s.other.synchronize()),
    "a query that says so": lambda s: [None for _ in iter(s.one.query, True)],
}


@pytest.mark.parametrize("wait", WAITS)
def test_waits_that_order_the_host(machine: Machine, wait: str) -> None:
    scene = Scene(machine)
    scene.driver.fill(scene.ptr, 3, N, stream=scene.one)
    scene.copy(address(scene.data), scene.ptr, scene.one)
    WAITS[wait](scene)
    scene.host(scene.data, "writes")
    assert set(scene.data) == {3}


def test_reads_do_not_race(machine: Machine) -> None:
    scene = Scene(machine)
    scene.copy(scene.ptr, address(scene.data), scene.one)
    scene.copy(scene.spare, address(scene.data), scene.other)
    scene.kernel(scene.other, reads=scene.mapped)
    scene.host(scene.data, "reads")
    with scene.driver.host_access(reads=[Span(address(scene.data), N)]):
        scene.kernel(scene.one, reads=scene.mapped)


def test_one_stream_does_not_race_with_itself(machine: Machine) -> None:
    scene = Scene(machine)
    for value in range(3):
        scene.driver.fill(scene.ptr, value, N, stream=scene.one)
        scene.copy(address(scene.data), scene.ptr, scene.one)
        scene.kernel(scene.one, writes=scene.mapped)
    borrowed = scene.driver.stream_from_handle(0, int(scene.one.handle))
    scene.driver.fill(scene.ptr, 9, N, stream=borrowed)


def test_neighbours_do_not_race(machine: Machine) -> None:
    scene = Scene(machine)
    for index, stream in enumerate([scene.one, scene.other] * 4):
        scene.driver.fill(scene.ptr + index * 256, index, 256, stream=stream)
    for index, stream in enumerate([scene.one, scene.other] * 4):
        scene.driver.copy(scene.spare + index * 256, scene.ptr + index * 256, 256, stream=stream)


def test_order_is_transitive(machine: Machine) -> None:
    scene, third = Scene(machine), machine.stream()
    scene.driver.fill(scene.ptr, 1, N, stream=scene.one)
    third.wait(scene.one.record())
    event = third.record()
    scene.other.wait(event)
    scene.driver.fill(scene.ptr, 2, N, stream=scene.other)
    with pytest.raises(RaceError):  # but the third stream knows nothing of what came after
        scene.driver.fill(scene.ptr, 3, N, stream=third)


def test_an_event_orders_what_was_there_when_it_was_recorded(machine: Machine) -> None:
    scene = Scene(machine)
    scene.driver.fill(scene.ptr, 1, N, stream=scene.one)
    event = scene.one.record()
    scene.driver.fill(scene.spare, 1, N, stream=scene.one)
    scene.other.wait(event)
    scene.driver.fill(scene.ptr, 2, N, stream=scene.other)
    with pytest.raises(RaceError):
        scene.driver.fill(scene.spare, 2, N, stream=scene.other)


def test_recording_again_does_not_move_an_earlier_wait(machine: Machine) -> None:
    scene = Scene(machine)
    event = scene.one.record()
    scene.other.wait(event)
    scene.driver.fill(scene.ptr, 1, N, stream=scene.one)
    scene.one.record(event)
    with pytest.raises(RaceError):
        scene.driver.fill(scene.ptr, 2, N, stream=scene.other)
    scene.other.wait(event)
    scene.driver.fill(scene.ptr, 2, N, stream=scene.other)


def test_what_the_host_has_waited_for_comes_before_what_it_enqueues(machine: Machine) -> None:
    scene = Scene(machine)
    scene.driver.fill(scene.ptr, 1, N, stream=scene.one)
    scene.one.synchronize()
    scene.driver.fill(scene.ptr, 2, N, stream=scene.other)


def test_a_refused_access_leaves_no_trace(machine: Machine) -> None:
    scene = Scene(machine)
    scene.driver.fill(scene.ptr, 1, N, stream=scene.one)
    for _ in range(2):
        with pytest.raises(RaceError):
            scene.driver.fill(scene.ptr, 2, N, stream=scene.other)
    scene.copy(address(scene.data), scene.ptr, scene.one)  # ordered behind the first alone
    scene.one.synchronize()
    assert set(scene.data) == {1}


def test_memory_that_was_given_back_has_no_history(machine: Machine) -> None:
    """The same pages, registered anew by somebody who knows nothing of their first life."""
    driver, data = machine.driver, pages(N)

    def live() -> None:
        stream, ptr = driver.create_stream(0), driver.malloc(0, N)
        driver.host_register(address(data), N)
        driver.fill(ptr, 1, N, stream=stream)
        driver.copy(address(data), ptr, N, stream=stream)
        stream.close()
        driver.host_unregister(address(data))
        driver.free(0, ptr)

    live()
    on_thread(live)


@pytest.mark.parametrize(("start", "nbytes"), [(0, 16), (64, 16), (N - 16, 16), (0, N)])
@pytest.mark.parametrize("first", ["writes", "reads"])
def test_a_part_that_is_written_anew_leaves_the_rest_as_it_was(
    machine: Machine, first: str, start: int, nbytes: int
) -> None:
    scene, third = Scene(machine), machine.stream()
    scene.kernel(scene.one, **{first: scene.ptr})
    scene.other.wait(scene.one.record())
    scene.driver.fill(scene.ptr + start, 2, nbytes, stream=scene.other)
    for where in range(0, N, 16):  # the third stream knows of neither
        with pytest.raises(RaceError):
            scene.driver.fill(scene.ptr + where, 3, 16, stream=third)
    third.wait(scene.one.record())
    for where in range(0, N, 16):
        if start <= where < start + nbytes:
            with pytest.raises(RaceError):
                scene.driver.fill(scene.ptr + where, 3, 16, stream=third)
        else:
            scene.driver.fill(scene.ptr + where, 3, 16, stream=third)
    third.wait(scene.other.record())
    scene.driver.fill(scene.ptr, 4, N, stream=third)


def test_a_later_reader_does_not_hide_an_earlier(machine: Machine) -> None:
    scene = Scene(machine)
    scene.copy(scene.spare, scene.ptr, scene.one)
    scene.kernel(scene.other, reads=scene.ptr)
    third = machine.stream()
    third.wait(scene.other.record())
    with pytest.raises(RaceError):
        scene.driver.fill(scene.ptr, 1, N, stream=third)
    third.wait(scene.one.record())
    scene.driver.fill(scene.ptr, 1, N, stream=third)


def test_an_event_learns_nothing_after_it_was_recorded(machine: Machine) -> None:
    scene, third = Scene(machine), machine.stream()
    event = scene.one.record()
    scene.driver.fill(scene.ptr, 1, N, stream=scene.other)
    scene.one.wait(scene.other.record())  # after the event, on its stream
    third.wait(event)
    with pytest.raises(RaceError):
        scene.driver.fill(scene.ptr, 2, N, stream=third)


def test_pageable_memory_is_done_with_when_the_call_returns(machine: Machine) -> None:
    """A buffer that lived for one copy leaves nothing behind for who gets its address next."""
    scene, buffer = Scene(machine), np.zeros(N, np.uint8)
    scene.copy(address(buffer), scene.ptr, scene.one)
    on_thread(lambda: scene.copy(scene.spare, address(buffer), scene.other))


# -- brackets --------------------------------------------------------------------------------------------
CONFLICTS: dict[str, tuple[Callable[[Scene], Any], Use]] = {
    "a kernel writes, a copy reads": (
        lambda s: s.driver.launch(s.one, writes=[Span(s.ptr, N)]),
        lambda s: s.copy(s.spare, s.ptr, s.other),
    ),
    "a kernel reads, a copy writes": (
        lambda s: s.driver.launch(s.one, reads=[Span(s.ptr, N)]),
        lambda s: s.driver.fill(s.ptr, 0, N, stream=s.other),
    ),
    "two kernels": (
        lambda s: s.driver.launch(s.one, writes=[Span(s.ptr, N)]),
        lambda s: s.kernel(s.other, reads=s.ptr),
    ),
    "the host writes, a copy reads": (
        lambda s: s.driver.host_access(writes=[Span(address(s.data), N)]),
        lambda s: s.copy(s.ptr, address(s.data), s.one),
    ),
    "the host reads, a kernel writes": (
        lambda s: s.driver.host_access(reads=[Span(address(s.data), N)]),
        lambda s: s.kernel(s.one, writes=s.mapped),
    ),
    "a kernel reads, its memory is freed": (
        lambda s: s.driver.launch(s.one, reads=[Span(s.ptr, N)]),
        lambda s: s.driver.free(0, s.ptr),
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_an_open_bracket_excludes_others_even_if_they_wait(machine: Machine, name: str) -> None:
    """An event recorded inside a bracket is before its end, and so are all waits for what is there by then."""
    scene = Scene(machine)
    begin, conflicting = CONFLICTS[name]
    bracket = begin(scene)
    scene.other.wait(scene.one.record())
    scene.driver.synchronize(0)
    with pytest.raises(RaceError, match="still going on"):
        conflicting(scene)
    bracket.end()
    if "kernel" in name.split(",")[0]:  # whose end is a point in its stream
        with pytest.raises(RaceError, match="not ordered before it"):
            conflicting(scene)
    if "freed" not in name:
        scene.other.wait(scene.one.record())
        conflicting(scene)


@pytest.mark.parametrize("start", [0, 511, N // 2, N - 1024 - 512, N - 1025])
def test_an_open_bracket_holds_its_bytes_and_no_others(machine: Machine, start: int) -> None:
    scene = Scene(machine)
    held = range(start, start + 1024)
    with scene.driver.launch(scene.one, writes=[Span(scene.ptr + start, 1024)]):
        for where in range(0, N, 64):
            if where < held.stop and held.start < where + 64:
                with pytest.raises(RaceError, match="still going on"):
                    scene.driver.fill(scene.ptr + where, 1, 64, stream=scene.other)
            else:
                scene.driver.fill(scene.ptr + where, 1, 64, stream=scene.other)
        for where in (held.start, held.stop - 1):
            with pytest.raises(RaceError, match="still going on"):
                scene.driver.fill(scene.ptr + where, 1, 1, stream=scene.other)


def test_a_bracket_ends_once(machine: Machine) -> None:
    scene = Scene(machine)
    with scene.driver.launch(scene.one, writes=[Span(scene.ptr, N)]) as bracket:
        bracket.end()
        bracket.end()
        scene.other.wait(scene.one.record())
        scene.driver.fill(scene.ptr, 1, N, stream=scene.other)


def test_a_bracket_on_its_own_stream_goes_with_other_work_there(machine: Machine) -> None:
    scene = Scene(machine)
    with scene.driver.launch(scene.one, reads=[Span(scene.ptr, N)], writes=[Span(scene.ptr, N)]):
        scene.driver.fill(scene.ptr, 1, N, stream=scene.one)
        scene.kernel(scene.one, writes=scene.ptr)


def test_a_bracket_sees_what_came_before_it(machine: Machine) -> None:
    scene = Scene(machine)
    scene.driver.fill(scene.ptr, 7, N, stream=scene.one)
    scene.other.wait(scene.one.record())
    with scene.driver.launch(scene.other, reads=[Span(scene.ptr, N)]):
        memory = scene.driver.host_bytes(scene.ptr, N)
        assert memory is not None
        assert set(memory) == {7}


def test_kernels_need_device_pointers(machine: Machine) -> None:
    scene, buffer = Scene(machine), np.zeros(N, np.uint8)
    for data in (scene.data, buffer):
        with refused("ILLEGAL_ADDRESS"):
            scene.kernel(scene.one, reads=address(data))
    with refused("INVALID_VALUE"):
        scene.driver.launch(scene.one, reads=[Span(scene.ptr, N + 1)])
    with refused("INVALID_VALUE"):
        scene.driver.launch(scene.one, reads=[Span(scene.ptr, -1)])
    with pytest.raises(InvalidRequestError):
        scene.driver.launch(None)  # type: ignore[arg-type]


def test_the_host_needs_host_addresses(machine: Machine) -> None:
    scene = Scene(machine)
    for ptr in (scene.ptr, scene.mapped, 0, -8):
        with refused("INVALID_VALUE"):
            scene.driver.host_access(reads=[Span(ptr, N)])


def test_kernels_reach_peers_only_where_it_is_enabled(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_count=2)
    driver, stream = machine.driver, machine.stream(0)
    ptr = machine.device(N, 1)
    with refused("ILLEGAL_ADDRESS"):
        driver.launch(stream, reads=[Span(ptr, N)])
    with refused("INVALID_VALUE"):
        driver.fill(ptr, 0, N, stream=stream)
    driver.enable_peer_access(1, 0)  # the other way round
    with refused("ILLEGAL_ADDRESS"):
        driver.launch(stream, reads=[Span(ptr, N)])
    driver.enable_peer_access(0, 1)
    driver.launch(stream, reads=[Span(ptr, N)]).end()
    driver.fill(ptr, 0, N, stream=stream)
    with refused("INVALID_CONTEXT"):
        driver.enable_peer_access(0, 0)


# -- host threads ------------------------------------------------------------------------------------------
def test_threads_hand_on_what_they_know(machine: Machine) -> None:
    scene, tokens = Scene(machine), []
    scene.host(scene.data, "writes")
    scene.driver.fill(scene.ptr, 1, N, stream=scene.one)
    scene.one.synchronize()
    early = scene.driver.publish()
    scene.host(scene.more, "writes")

    def work() -> None:
        with pytest.raises(RaceError):
            scene.host(scene.data, "reads")
        scene.driver.observe(early)
        scene.host(scene.data, "writes")
        scene.driver.fill(scene.ptr, 2, N, stream=scene.other)
        with pytest.raises(RaceError):  # published before it was written
            scene.host(scene.more, "reads")
        tokens.append(scene.driver.publish())

    on_thread(work)
    with pytest.raises(RaceError):
        scene.host(scene.data, "reads")
    scene.driver.observe(tokens[0])
    scene.host(scene.data, "reads")
    with pytest.raises(RaceError):  # the thread has not waited for its stream
        scene.driver.fill(scene.ptr, 3, N, stream=scene.one)
    scene.other.synchronize()


def test_a_host_access_can_be_handed_to_another_thread(machine: Machine) -> None:
    scene = Scene(machine)
    bracket = scene.driver.host_access(writes=[Span(address(scene.data), N)])
    tokens: list[Any] = []
    on_thread(lambda: (bracket.end(), scene.host(scene.data, "writes"), tokens.append(scene.driver.publish())))
    with pytest.raises(RaceError):
        scene.host(scene.data, "reads")
    scene.driver.observe(tokens[0])
    scene.host(scene.data, "reads")


def test_a_host_access_that_was_handed_on_is_left_alone(machine: Machine) -> None:
    scene = Scene(machine)
    bracket = scene.driver.host_access(writes=[Span(address(scene.data), N)])
    scene.host(scene.data, "writes")  # it goes on using the bytes
    with pytest.raises(RaceError):
        on_thread(bracket.end)
    with pytest.raises(RaceError, match="still going on"):
        scene.copy(scene.ptr, address(scene.data), scene.one)
    bracket.end()
    scene.copy(scene.ptr, address(scene.data), scene.one)


def test_who_is_handed_a_host_access_knows_what_its_beginner_knew(machine: Machine) -> None:
    scene = Scene(machine)
    scene.driver.fill(scene.ptr, 1, N, stream=scene.one)
    scene.one.synchronize()
    bracket = scene.driver.host_access(reads=[Span(address(scene.data), N)])
    scene.driver.fill(scene.spare, 1, N, stream=scene.other)
    scene.other.synchronize()

    def work() -> None:
        with pytest.raises(RaceError):
            scene.driver.fill(scene.ptr, 2, N, stream=machine.stream())
        bracket.end()
        scene.driver.fill(scene.ptr, 2, N, stream=machine.stream())
        with pytest.raises(RaceError):  # what it learned later it kept for itself
            scene.driver.fill(scene.spare, 2, N, stream=machine.stream())

    on_thread(work)


def test_the_error_says_who_and_where(machine: Machine) -> None:
    scene = Scene(machine)
    with scene.driver.launch(scene.one, writes=[Span(scene.ptr, N)], label="forward of block 3"):
        pass
    with pytest.raises(RaceError) as caught:
        scene.driver.launch(scene.other, reads=[Span(scene.ptr + 16, 64)], label="backward")
    said = str(caught.value)
    assert "read of 64 bytes" in said
    assert f"{scene.ptr + 16:#x}" in said
    assert "'backward'" in said
    assert "write by 'forward of block 3'" in said
    assert "stream.wait(event)" in said
    assert not isinstance(caught.value, DriverError)


def test_drivers_are_separate_machines() -> None:
    one, other = EmulatedDriver(), EmulatedDriver()
    ptr = one.malloc(0, N)
    with refused("INVALID_VALUE"):
        other.copy(ptr, ptr + 16, 8, stream=other.create_stream(0))
    assert other.memory_info(0).free > one.memory_info(0).free
