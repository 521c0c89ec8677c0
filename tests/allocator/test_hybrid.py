"""Hybrid buffers: one range, pages here and there, the same bytes whatever moves."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import (
    CaptureError,
    ClosedError,
    Driver,
    DriverError,
    DriverOutOfMemory,
    EmulatedDriver,
    EmulatedOptions,
    ForkedError,
    HybridBuffer,
    InvalidRequestError,
    OutOfMemory,
    RaceError,
    Span,
    UnsupportedError,
    open_driver,
)
from memferry_allocator.shadow.residency import CELL

from .driver_cases import in_a_child
from .machine import Machine, pattern

MIB = 1 << 20
PAGE = 2 * MIB


def emulated(pages: int = 16, **options: Any) -> EmulatedDriver:
    return EmulatedDriver(EmulatedOptions(device_memory=pages * PAGE, **options))


class TestAnyDriver:
    """What holds on every driver; `gpu` applies it to CUDA."""

    @pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
    def machine(self, request: pytest.FixtureRequest) -> Iterator[Machine]:
        machine = Machine(emulated() if request.param == "emulated" else open_driver("cuda"))
        yield machine
        machine.close()

    @pytest.mark.parametrize(
        "resident", [0, 0.5, 1, [], [Span(PAGE, 1)], [Span(0, 3), Span(2 * PAGE, PAGE + 1)], [Span(5 * PAGE, 77)]]
    )
    def test_a_buffer_is_one_piece_of_memory(self, machine: Machine, resident: Any) -> None:
        nbytes = 5 * PAGE + 77
        with HybridBuffer(machine.driver, 0, nbytes, resident=resident) as buffer:
            machine.write(buffer.ptr, pattern(nbytes))
            assert np.array_equal(machine.read(buffer.ptr, nbytes), pattern(nbytes))
            assert buffer.device_nbytes + buffer.host_nbytes == 6 * PAGE

    def test_bytes_are_kept(self, machine: Machine) -> None:
        nbytes, stream = 6 * PAGE, machine.stream()
        with HybridBuffer(machine.driver, 0, nbytes, resident=0.5) as buffer:
            ptr = buffer.ptr
            machine.write(ptr, pattern(nbytes))
            for resident in (0, 1, [Span(PAGE, PAGE), Span(4 * PAGE, 5)], 0.5, 0.5):
                machine.driver.fill(ptr + 2 * PAGE - 8, 1, 16, stream=stream)
                machine.driver.fill(ptr + 2 * PAGE - 8, 2, 16, stream=stream)
                buffer.record_use(stream)
                buffer.repartition(resident, stream=stream)
                assert buffer.ptr == ptr
                expected = pattern(nbytes)
                expected[2 * PAGE - 8 : 2 * PAGE + 8] = 2
                assert np.array_equal(machine.read(ptr, nbytes), expected)

    def test_device_memory_is_taken_for_what_is_resident(self, machine: Machine) -> None:
        machine.device(256)
        before = machine.driver.memory_info(0).free
        with HybridBuffer(machine.driver, 0, 8 * PAGE, resident=0.5) as buffer:
            assert 4 * PAGE <= before - machine.driver.memory_info(0).free < 6 * PAGE
            buffer.repartition(0, stream=machine.stream())
            assert before - machine.driver.memory_info(0).free < 2 * PAGE
        buffer.close()


@st.composite
def residencies(draw: st.DrawFn, nbytes: int) -> Any:
    if draw(st.booleans()):
        return draw(st.floats(0, 1))
    starts = st.integers(0, nbytes)
    edges = draw(st.lists(st.tuples(starts, starts), max_size=4))
    return [Span(min(edge), abs(edge[1] - edge[0])) for edge in edges]


@given(data=st.data(), nbytes=st.integers(1, 6 * PAGE), seed=st.integers(0, 9))
def test_bytes_are_kept_over_any_moves(data: st.DataObject, nbytes: int, seed: int) -> None:
    machine = Machine(emulated(seed=seed, eagerness=0.3))
    streams = [machine.stream() for _ in range(2)]
    expected = np.full(nbytes, 5, np.uint8)
    with HybridBuffer(machine.driver, 0, nbytes, resident=data.draw(residencies(nbytes))) as buffer:
        machine.driver.fill(buffer.ptr, 5, nbytes, stream=streams[0])
        buffer.record_use(streams[0])
        for value in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, nbytes - 1))
            size = data.draw(st.integers(0, min(nbytes - start, 3000)))
            streams[1].wait(streams[0].record())
            machine.driver.fill(buffer.ptr + start, value, size, stream=streams[1])
            buffer.record_use(streams[1])
            expected[start : start + size] = value
            wanted = data.draw(residencies(nbytes))
            buffer.repartition(wanted, stream=streams[0])
            touched = wanted if isinstance(wanted, list) else buffer.residency
            for offset, count in touched:
                assert any(r.ptr <= offset and offset + count <= r.ptr + r.nbytes for r in buffer.residency) or (
                    count == 0
                )
            assert sum(span.nbytes for span in buffer.residency) <= buffer.device_nbytes
            machine.driver.synchronize(0)
            held = machine.driver.host_bytes(buffer.ptr, nbytes)
            assert held is not None
            assert np.array_equal(np.frombuffer(held, np.uint8), expected)
            info = machine.driver.memory_info(0)
            assert info.total - info.free == buffer.device_nbytes
    machine.close()
    assert machine.driver.memory_info(0).free == 16 * PAGE


class Failing(EmulatedDriver):
    """Refuses the call number `fatal` of those that a move makes."""

    def __init__(self) -> None:
        super().__init__(EmulatedOptions(device_memory=16 * PAGE, eagerness=0.3))
        self.calls = itertools.count()
        self.fatal = -1

    def _count(self, call: str) -> None:
        if next(self.calls) == self.fatal:
            raise DriverError("CUDA_ERROR_UNKNOWN", call, "made up")

    def arm(self, fatal: int) -> None:
        self.calls, self.fatal = itertools.count(), fatal


for _name in ("reserve_addresses", "create_pages", "map_pages", "unmap_pages", "release_addresses", "copy"):

    def _refuse(self: Failing, *arguments: Any, _call: str = _name, **options: Any) -> Any:
        self._count(_call)
        return getattr(EmulatedDriver, _call)(self, *arguments, **options)

    setattr(Failing, _name, _refuse)


def test_a_move_that_fails_anywhere_changes_nothing() -> None:
    driver = Failing()
    machine = Machine(driver)
    stream, nbytes = machine.stream(), 5 * PAGE
    buffer = HybridBuffer(driver, 0, nbytes, resident=[Span(PAGE, 2 * PAGE)])
    machine.write(buffer.ptr, pattern(nbytes))
    before, used = buffer.residency, driver.memory_info(0).free
    failures = 0
    for fatal in itertools.count():
        driver.arm(fatal)
        try:
            buffer.repartition([Span(0, 2 * PAGE), Span(4 * PAGE, 1)], stream=stream)
            break
        except DriverError as error:
            failures += "made up" in str(error)
        driver.arm(-1)
        assert (buffer.residency, driver.memory_info(0).free) == (before, used)
        assert np.array_equal(machine.read(buffer.ptr, nbytes), pattern(nbytes))
    assert failures > 15
    assert buffer.residency == (Span(0, 2 * PAGE), Span(4 * PAGE, PAGE))
    driver.arm(-1)
    assert np.array_equal(machine.read(buffer.ptr, nbytes), pattern(nbytes))
    buffer.close()
    machine.close()
    assert driver.memory_info(0).free == 16 * PAGE
    with pytest.raises(DriverError):  # and its addresses are free
        driver.unmap_pages(buffer.ptr or PAGE, PAGE)


def test_a_buffer_that_fails_anywhere_takes_nothing() -> None:
    driver = Failing()
    for fatal in itertools.count():
        driver.arm(fatal)
        try:
            buffer = HybridBuffer(driver, 0, 3 * PAGE, resident=[Span(PAGE, PAGE)])
        except DriverError:
            assert driver.memory_info(0).free == 16 * PAGE
        else:
            break
    assert fatal == 7
    driver.arm(-1)
    buffer.close()


def test_capacity_counts() -> None:
    driver = emulated(pages=4)
    machine, stream = Machine(driver), driver.create_stream(0)
    with pytest.raises(OutOfMemory) as caught:
        HybridBuffer(driver, 0, 8 * PAGE, resident=5 / 8)
    assert (caught.value.size, caught.value.limit, caught.value.budget) == (5 * PAGE, 4 * PAGE, "emulated:0")
    with HybridBuffer(driver, 0, 8 * PAGE, resident=0.25) as buffer:
        machine.write(buffer.ptr, pattern(8 * PAGE))
        with pytest.raises(DriverOutOfMemory):
            buffer.repartition(0.75, stream=stream)
        assert buffer.device_nbytes == 2 * PAGE
        assert np.array_equal(machine.read(buffer.ptr, 8 * PAGE), pattern(8 * PAGE))
        buffer.repartition(0, stream=stream)
        driver.free(0, driver.malloc(0, 4 * PAGE))
    stream.close()


def test_moving_an_edge_moves_one_cell() -> None:
    driver = emulated(pages=3 * CELL)
    stream, copied = driver.create_stream(0), []
    with HybridBuffer(driver, 0, 3 * CELL * PAGE, resident=1.5 / 3) as buffer:
        copy = driver.copy
        driver.copy = lambda dst, src, nbytes, *, stream: (
            copied.append(nbytes),
            copy(dst, src, nbytes, stream=stream),
        )  # type: ignore[method-assign,assignment,func-returns-value]
        buffer.repartition(1.5 / 3 + 1 / (3 * CELL), stream=stream)
    assert 0 < sum(copied) <= CELL * PAGE
    stream.close()


def test_uses_that_are_not_recorded_are_noticed() -> None:
    driver = emulated(eagerness=0.0)
    stream, other = driver.create_stream(0), driver.create_stream(0)
    buffer = HybridBuffer(driver, 0, 2 * PAGE, resident=0.5)
    driver.fill(buffer.ptr, 1, 2 * PAGE, stream=other)
    with pytest.raises(RaceError):
        buffer.repartition(1, stream=stream)
    with pytest.raises(RaceError):
        buffer.close()
    buffer.record_use(other)
    buffer.repartition(1, stream=stream)
    driver.fill(buffer.ptr, 1, 2 * PAGE, stream=other)
    buffer.record_use(other)
    buffer.close()
    assert driver.memory_info(0).free == 16 * PAGE


def test_an_empty_buffer_makes_no_driver_call() -> None:
    driver = emulated()
    stream = driver.create_stream(0)
    with HybridBuffer(driver, 0, 0, resident=0.5) as buffer:
        assert (buffer.ptr, buffer.residency, buffer.device_nbytes, buffer.host_nbytes) == (0, (), 0, 0)
        buffer.repartition(1, stream=stream)


@pytest.mark.parametrize(
    "resident", [-0.1, 1.1, float("nan"), [Span(-1, 2)], [Span(0, -1)], [Span(PAGE, PAGE + 1)]]
)
def test_residencies_that_are_none(resident: Any) -> None:
    driver = emulated()
    with pytest.raises(InvalidRequestError, match="resident"):
        HybridBuffer(driver, 0, 2 * PAGE, resident=resident)
    with HybridBuffer(driver, 0, 2 * PAGE, resident=0) as buffer:
        with pytest.raises(InvalidRequestError, match="resident"):
            buffer.repartition(resident, stream=driver.create_stream(0))
        assert buffer.residency == ()
    with pytest.raises(InvalidRequestError):
        HybridBuffer(driver, 0, -1, resident=0)


def test_closing() -> None:
    driver = emulated()
    stream = driver.create_stream(0)
    buffer = HybridBuffer(driver, 0, PAGE, resident=1)
    assert not buffer.closed
    buffer.close()
    buffer.close()
    assert buffer.closed
    for call in (lambda: buffer.repartition(0, stream=stream), lambda: buffer.record_use(stream)):
        with pytest.raises(ClosedError):
            call()
    dropped = HybridBuffer(driver, 0, PAGE, resident=1)
    driver.fill(dropped.ptr, 1, PAGE, stream=stream)
    del dropped
    gc.collect()
    assert driver.memory_info(0).free == 16 * PAGE


def test_captures() -> None:
    driver = emulated()
    stream, other = driver.create_stream(0), driver.create_stream(0)
    buffer = HybridBuffer(driver, 0, 2 * PAGE, resident=1)
    driver.begin_capture(stream)
    with pytest.raises(CaptureError):
        buffer.repartition(0, stream=stream)
    buffer.repartition(0, stream=other)
    buffer.close()
    driver.end_capture(stream)


def test_no_virtual_memory() -> None:
    class Plain(EmulatedDriver):
        page_granularity = Driver.page_granularity

    with pytest.raises(UnsupportedError, match="virtual memory"):
        HybridBuffer(Plain(), 0, PAGE, resident=0.5)


def test_uses_are_of_streams_that_can_be_waited_for() -> None:
    driver = emulated()
    stream = driver.create_stream(0)
    with HybridBuffer(driver, 0, PAGE, resident=1) as buffer:
        foreign = emulated().create_stream(0)
        for call in (buffer.record_use, lambda stream: buffer.repartition(0, stream=stream)):
            with pytest.raises(InvalidRequestError, match="another driver"):
                call(foreign)
            driver.begin_capture(stream)
            with pytest.raises(CaptureError):
                call(stream)
            driver.end_capture(stream)


@pytest.mark.parametrize("end", ["lost", "closed"])
@pytest.mark.parametrize("resident", [0, 0.5, 1])
def test_a_device_that_is_gone_keeps_nothing_open(end: str, resident: float) -> None:
    driver = emulated(device_count=2)
    stream = driver.create_stream(0)
    buffer = HybridBuffer(driver, 0, 4 * PAGE, resident=resident)
    driver.fill(buffer.ptr, 1, 4 * PAGE, stream=stream)
    buffer.record_use(stream)
    if end == "lost":
        driver.lose(0)
    else:
        driver.close()
    buffer.close()
    assert buffer.closed
    assert (buffer.ptr, buffer.device_nbytes, buffer.host_nbytes) == (0, 0, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_told_so_whoever_holds_the_lock() -> None:
    driver = emulated()
    stream, buffer = driver.create_stream(0), HybridBuffer(driver, 0, PAGE, resident=1)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with buffer._lock:
            held.set()
            done.wait()

    def child() -> list[str]:
        calls = (
            lambda: buffer.record_use(stream),
            lambda: buffer.repartition(0, stream=stream),
            buffer.close,
        )
        told = []
        for call in calls:
            try:
                call()
            except ForkedError:
                told.append("told")
        return told

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    answer = in_a_child(child)
    done.set()
    holder.join()
    assert answer == ["told"] * 3
    buffer.close()
