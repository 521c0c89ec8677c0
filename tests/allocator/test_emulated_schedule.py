"""Rule 1: work runs as late as the program allows, and a seeded share of it earlier."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from memferry_allocator import EmulatedDriver, EmulatedOptions, InvalidRequestError, Span
from memferry_allocator.driver.emulated.engine import PATIENCE

from .machine import Bytes, Machine, address, pages, pattern, refused

N = 4096


def now(machine: Machine, ptr: int, nbytes: int = N) -> Bytes:
    """The bytes as they are at this moment, whatever is queued."""
    memory = machine.driver.host_bytes(ptr, nbytes)
    assert memory is not None
    return np.frombuffer(memory, np.uint8)


def test_nothing_runs_before_something_forces_it(machine: Machine) -> None:
    stream, ptr, data = machine.stream(), machine.device(N), machine.pinned(N)
    data[:] = 1
    fresh = now(machine, ptr).copy()
    machine.driver.copy(ptr, address(data), N, stream=stream)
    event = stream.record()
    assert not event.query()
    assert not stream.query()
    machine.stream().synchronize()  # another stream
    machine.driver.create_event(0).synchronize()
    assert np.array_equal(now(machine, ptr), fresh)
    event.synchronize()
    assert set(now(machine, ptr)) == {1}


def test_a_late_copy_reads_what_is_in_its_source_by_then(machine: Machine) -> None:
    """Which is why a source may not be written before the copy's event: here it can be seen."""
    stream, ptr, data = machine.stream(), machine.device(N), machine.pinned(N)
    data[:] = 1
    machine.driver.copy(ptr, address(data), N, stream=stream)
    data[:] = 2  # too early, and not declared
    stream.synchronize()
    assert set(now(machine, ptr)) == {2}


def test_forcing_runs_what_comes_before_and_nothing_else(machine: Machine) -> None:
    one, other = machine.stream(), machine.stream()
    first, second, third = (machine.device(N) for _ in range(3))
    machine.driver.fill(first, 1, N, stream=one)
    event = one.record()
    machine.driver.fill(second, 2, N, stream=one)
    machine.driver.fill(third, 3, N, stream=other)
    other.wait(event)
    later = other.record()
    later.synchronize()
    assert set(now(machine, first)) == {1}
    assert set(now(machine, second)) == {0xFF}
    assert set(now(machine, third)) == {3}


def test_eager_work_runs_by_itself(emulate: Callable[..., Machine]) -> None:
    machine = emulate(eagerness=1.0)
    stream, other, ptr = machine.stream(), machine.stream(), machine.device(N)
    machine.driver.fill(ptr, 1, N, stream=stream)
    other.synchronize()  # any opportunity will do
    assert set(now(machine, ptr)) == {1}
    assert stream.query()


@pytest.mark.parametrize("ask", ["stream", "event"])
def test_asking_again_and_again_ends(machine: Machine, ask: str) -> None:
    stream, ptr = machine.stream(), machine.device(N)
    machine.driver.fill(ptr, 1, N, stream=stream)
    asked = stream if ask == "stream" else stream.record()
    answers = [asked.query() for _ in range(PATIENCE + 1)]
    assert answers == [False] * (PATIENCE - 1) + [True, True]
    assert set(now(machine, ptr)) == {1}


def test_pageable_copies_run_at_once(machine: Machine) -> None:
    stream, ptr, data = machine.stream(), machine.device(N), np.full(N, 5, np.uint8)
    machine.driver.copy(ptr, address(data), N, stream=stream)
    assert set(now(machine, ptr)) == {5}
    data[:] = 0
    machine.driver.fill(ptr, 6, N, stream=stream)
    machine.driver.copy(address(data), ptr, N, stream=stream)
    assert set(data) == {6}


def test_closing_a_stream_runs_its_work(machine: Machine) -> None:
    stream, ptr = machine.driver.create_stream(0), machine.device(N)
    machine.driver.fill(ptr, 1, N, stream=stream)
    stream.close()
    assert set(now(machine, ptr)) == {1}


def test_closing_the_driver_runs_its_work() -> None:
    driver, data = EmulatedDriver(EmulatedOptions(eagerness=0.0)), pages(N)
    driver.host_register(address(data), N)
    stream, ptr = driver.create_stream(0), driver.malloc(0, N)
    driver.fill(ptr, 4, N, stream=stream)
    driver.copy(address(data), ptr, N, stream=stream)
    driver.close()
    assert set(data) == {4}


def program(machine: Machine, order: random.Random) -> Bytes:
    """A long properly ordered program: blocks travel between three streams by events."""
    driver, streams = machine.driver, [machine.stream() for _ in range(3)]
    data, blocks = machine.pinned(8 * N), [machine.device(N) for _ in range(8)]
    data[:] = pattern(8 * N)
    last = [streams[0].record() for _ in blocks]
    for _ in range(120):
        block, stream = order.randrange(8), order.choice(streams)
        stream.wait(last[block])
        match order.randrange(3):
            case 0:
                driver.copy(blocks[block], address(data) + block * N, N, stream=stream)
            case 1:
                driver.copy(address(data) + block * N, blocks[block], N, stream=stream)
            case _:
                start = order.randrange(N - 16)
                driver.fill(blocks[block] + start, order.randrange(256), 16, stream=stream)
        last[block] = stream.record()
    driver.synchronize(0)
    return np.concatenate([data, *(now(machine, block) for block in blocks)])


@pytest.mark.parametrize("eagerness", [0.05, 0.5])
def test_an_ordered_program_has_one_result(emulate: Callable[..., Machine], eagerness: float) -> None:
    late = program(emulate(eagerness=0.0), random.Random(7))
    for seed in range(20):
        assert np.array_equal(program(emulate(seed=seed, eagerness=eagerness), random.Random(7)), late)


def _early(machine: Machine) -> list[bool]:
    """Which of many pieces of work ran although nothing waited for them."""
    stream, ptr = machine.stream(), machine.device(64 * 16)
    ran = []
    for index in range(64):
        machine.driver.fill(ptr + index * 16, 1, 16, stream=machine.stream() if index % 8 else stream)
        stream.query()
    for index in range(64):
        ran.append(int(now(machine, ptr + index * 16, 16)[0]) == 1)
    return ran


def test_seeds_decide_what_runs_early(emulate: Callable[..., Machine]) -> None:
    runs = [_early(emulate(seed=seed, eagerness=0.05)) for seed in (1, 1, 2, 3)]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 3
    assert all(sum(run) > 0 for run in runs)
    assert not any(_early(emulate(eagerness=0.0))[8:])


def test_a_long_chain_of_streams(machine: Machine) -> None:
    """Forcing the end runs thousands of pieces before it, without recursion."""
    streams, ptr = [machine.stream() for _ in range(2)], machine.device(N)
    for turn in range(1500):
        stream, other = streams[turn % 2], streams[(turn + 1) % 2]
        machine.driver.fill(ptr, turn % 251, N, stream=stream)
        other.wait(stream.record())
    streams[1].synchronize()
    assert set(now(machine, ptr)) == {1499 % 251}


def test_a_launch_runs_what_comes_before_it(machine: Machine) -> None:
    one, other = machine.stream(), machine.stream()
    ptr, spare = machine.device(N), machine.device(N)
    machine.driver.fill(ptr, 1, N, stream=one)
    machine.driver.fill(spare, 2, N, stream=other)
    with machine.driver.launch(one, writes=[Span(ptr, N)]):
        assert set(now(machine, ptr)) == {1}
        assert set(now(machine, spare)) == {0xFF}


@pytest.mark.parametrize(
    "options",
    [
        {"device_count": 0},
        {"device_count": 9},
        {"device_memory": 0},
        {"eagerness": -0.1},
        {"eagerness": 1.1},
    ],
)
def test_machines_that_cannot_be(options: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        EmulatedOptions(**options)  # type: ignore[arg-type]


def test_up_to_eight_devices(emulate: Callable[..., Machine]) -> None:
    machine = emulate(device_count=8)
    for device in range(8):
        ptr = machine.device(N, device)
        machine.write(ptr, pattern(N, device), device=device)
        assert np.array_equal(machine.read(ptr, N, device=device), pattern(N, device))
    with refused("INVALID_DEVICE"):
        machine.device(N, 8)
