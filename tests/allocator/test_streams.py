"""Streams know what they come after already, and do not wait for it again."""

from __future__ import annotations

import gc
import weakref

import pytest

from memferry_allocator import EmulatedOptions, RaceError

from .machine import Machine
from .test_pool import Listening

N = 256


@pytest.fixture
def machine() -> Machine:
    return Machine(Listening(EmulatedOptions(eagerness=0.0)))


def waits(machine: Machine) -> int:
    """Waits that reached the driver since the last question."""
    driver: Listening = machine.driver  # type: ignore[assignment]
    count = len(driver.waits)
    driver.waits.clear()
    return count


def test_a_stream_does_not_wait_for_itself(machine: Machine) -> None:
    stream = machine.stream()
    stream.wait(stream.record())
    assert waits(machine) == 0


def test_the_same_wait_is_made_once(machine: Machine) -> None:
    one, other = machine.stream(), machine.stream()
    event = one.record()
    other.wait(event)
    other.wait(event)
    assert waits(machine) == 1
    machine.stream().wait(event)
    assert waits(machine) == 1


def test_a_later_event_covers_an_earlier_and_not_the_other_way_round(machine: Machine) -> None:
    one, other, ptr = machine.stream(), machine.stream(), machine.device(N)
    early = one.record()
    machine.driver.fill(ptr, 1, N, stream=one)
    late = one.record()
    other.wait(early)
    with pytest.raises(RaceError):
        machine.driver.fill(ptr, 2, N, stream=other)
    other.wait(late)
    other.wait(early)
    assert waits(machine) == 2
    machine.driver.fill(ptr, 2, N, stream=other)


def test_a_new_recording_must_be_waited_for_again(machine: Machine) -> None:
    one, other, ptr = machine.stream(), machine.stream(), machine.device(N)
    event = one.record()
    other.wait(event)
    machine.driver.fill(ptr, 1, N, stream=one)
    one.record(event)
    other.wait(event)
    assert waits(machine) == 2
    machine.driver.fill(ptr, 2, N, stream=other)


def test_an_event_that_moves_to_another_stream(machine: Machine) -> None:
    """What counts is where it was recorded last."""
    one, other, third, ptr = machine.stream(), machine.stream(), machine.stream(), machine.device(N)
    event = one.record()
    third.wait(event)
    machine.driver.fill(ptr, 1, N, stream=other)
    other.record(event)
    one.wait(event)  # recorded there once, but no more
    third.wait(event)
    assert waits(machine) == 3
    machine.driver.fill(ptr, 2, N, stream=one)
    third.wait(one.record())
    machine.driver.fill(ptr, 3, N, stream=third)


def test_a_borrowed_stream_takes_no_risk(machine: Machine) -> None:
    """Two objects for one stream: each counts what it has waited for itself."""
    one, other = machine.stream(), machine.stream()
    borrowed = machine.driver.stream_from_handle(0, int(other.handle))
    event = one.record()
    other.wait(event)
    borrowed.wait(event)
    assert waits(machine) == 2


def test_streams_are_not_kept_alive_by_who_has_waited_for_them(machine: Machine) -> None:
    stream = machine.stream()
    gone = []
    for _ in range(20):
        short = machine.driver.create_stream(0)
        stream.wait(short.record())
        short.close()
        gone.append(weakref.ref(short))
    del short
    machine.driver.waits.clear()  # type: ignore[attr-defined]
    gc.collect()
    assert [reference() for reference in gone] == [None] * 20
