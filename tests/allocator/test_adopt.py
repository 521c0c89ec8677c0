"""Adopted ranges: memory of any object, registered where it lies, and kept there meanwhile."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memferry_allocator import (
    ClosedError,
    Driver,
    EmulatedDriver,
    Foreign,
    ForkedError,
    InvalidRequestError,
    RaceError,
    RegistrationError,
    Span,
    adopt,
    describe,
    registrations,
)

from .machine import Machine, address, pages, pattern, refused

N = 5000
MAKERS: dict[str, Callable[[Path], Any]] = {
    "bytearray": lambda _: bytearray(N),
    "numpy": lambda _: np.zeros(N, np.uint8),
    "numpy, two dimensions": lambda _: np.zeros((5, 125), np.float64),
    "numpy, Fortran order": lambda _: np.zeros((5, 125), np.float64, order="F"),
    "numpy, structured": lambda _: np.zeros(625, [("a", "<f4"), ("b", ">i4")]),
    "anonymous mmap": lambda _: mmap.mmap(-1, N),
    "private mmap": lambda _: mmap.mmap(-1, N, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "shared file in memory": lambda _: mapped_file(Path("/dev/shm"), mmap.ACCESS_WRITE),
    "file, copied on write": lambda folder: mapped_file(folder, mmap.ACCESS_COPY),
    "memoryview": lambda _: memoryview(bytearray(2 * N))[100 : 100 + N],
    "ctypes": lambda _: (ctypes.c_double * (N // 8))(),
    "array": lambda _: array.array("d", bytes(N)),
}


def mapped_file(folder: Path, access: int) -> mmap.mmap:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(N))
        file.flush()
        return mmap.mmap(file.fileno(), N, access=access)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_devices_read_and_write_the_object(
    any_machine: Machine, maker: Callable[[Path], Any], tmp_path: Path
) -> None:
    driver, obj = any_machine.driver, maker(tmp_path)
    with adopt(driver, obj) as held:
        assert (held.nbytes, held.read_only, held.closed) == (N, False, False)
        assert registrations(driver).covers(*held.span)
        held.array()[:] = pattern(N)
        ptr, stream = any_machine.device(N), any_machine.stream()
        driver.copy(ptr, held.span.ptr, N, stream=stream)
        stream.synchronize()
        assert np.array_equal(any_machine.read(ptr, N), pattern(N))
        driver.fill(registrations(driver).device_ptr(held.span.ptr + 10, 0, 20), 7, 20, stream=stream)
        stream.synchronize()
        expected = pattern(N)
        expected[10:30] = 7
        assert np.array_equal(held.array(), expected)
    assert not registrations(driver).covers(*held.span)
    raw = obj.tobytes(order="A") if isinstance(obj, np.ndarray) else bytes(memoryview(obj).cast("B", (N,)) if
        not isinstance(obj, ctypes.Array) else obj)  # fmt: skip
    assert raw == expected.tobytes()


@pytest.mark.parametrize("kind", ["bytes", "numpy", "memoryview", "file"])
def test_what_cannot_be_written_is_registered_read_only(any_machine: Machine, kind: str, tmp_path: Path) -> None:
    driver = any_machine.driver
    frozen = np.frombuffer(pattern(N).tobytes(), np.uint8)
    makers: dict[str, Callable[[], Any]] = {
        "bytes": lambda: bytes(frozen),
        "numpy": lambda: frozen,
        "memoryview": lambda: memoryview(bytearray(frozen)).toreadonly(),
        "file": lambda: mapped_file(tmp_path, mmap.ACCESS_READ),
    }
    obj = makers[kind]()
    with pytest.raises(InvalidRequestError, match="cannot be written; ask for read_only=True"):
        adopt(driver, obj, read_only=False)
    with adopt(driver, obj) as held:
        assert held.read_only
        assert held.registration.read_only
        with pytest.raises(ValueError, match="read-only"):
            held.array()[0] = 1
        ptr, stream = any_machine.device(N), any_machine.stream()
        driver.copy(ptr, held.span.ptr, N, stream=stream)
        stream.synchronize()
        assert np.array_equal(any_machine.read(ptr, N), held.array())


def test_read_only_of_what_can_be_written(machine: Machine) -> None:
    data = bytearray(N)
    with adopt(machine.driver, data, read_only=True) as held:
        assert held.read_only
        with refused("INVALID_VALUE"):
            machine.driver.copy(held.span.ptr, machine.device(16), 16, stream=machine.stream())


# -- life --------------------------------------------------------------------------------------------------
def test_the_object_can_be_neither_resized_nor_unmapped_meanwhile(any_driver: Driver) -> None:
    data, memory = bytearray(N), mmap.mmap(-1, N)
    one, other = adopt(any_driver, data), adopt(any_driver, memory)
    for attempt in (lambda: data.extend(b"x"), memory.close, lambda: memory.resize(4 * N)):
        with pytest.raises(BufferError):
            attempt()
    one.close()
    other.close()
    data.extend(b"x")
    memory.close()


def test_arrays_outlive_the_range_and_keep_the_memory(any_driver: Driver) -> None:
    data = bytearray(N)
    held = adopt(any_driver, data)
    out = held.array()
    held.close()
    out[:] = 3
    with pytest.raises(BufferError):
        data.extend(b"x")
    del held
    gc.collect()
    assert set(out) == {3}
    assert set(data) == {3}
    del out
    gc.collect()
    data.extend(b"x")


def test_a_dropped_range_is_unregistered_when_its_arrays_are_gone(any_driver: Driver) -> None:
    data = bytearray(N)
    held = adopt(any_driver, data)
    span, out = held.span, held.array()
    del held
    gc.collect()
    assert registrations(any_driver).covers(*span)
    del out
    gc.collect()
    assert not registrations(any_driver).covers(*span)
    data.extend(b"x")


def test_a_dropped_object_is_kept(any_machine: Machine) -> None:
    memory: mmap.mmap | None = mmap.mmap(-1, N)
    held = adopt(any_machine.driver, memory)
    held.array()[:] = 9
    memory = None
    gc.collect()
    ptr = any_machine.device(N)
    any_machine.driver.copy(ptr, held.span.ptr, N, stream=any_machine.stream())
    assert set(any_machine.read(ptr, N)) == {9}
    held.close()


def test_closing_twice_and_using_it_after() -> None:
    driver = EmulatedDriver()
    held = adopt(driver, bytearray(N))
    held.close()
    held.close()
    assert held.closed
    assert driver.registered == 0
    with pytest.raises(ClosedError, match="adopt the object again"):
        held.array()


def test_work_must_be_over(machine: Machine) -> None:
    data = bytearray(N)
    held, stream = adopt(machine.driver, data), machine.stream()
    machine.driver.copy(machine.device(N), held.span.ptr, N, stream=stream)
    with pytest.raises(RaceError):
        held.close()
    assert not held.closed
    with pytest.raises(BufferError):
        data.extend(b"x")
    stream.synchronize()
    held.close()
    data.extend(b"x")


def test_what_cannot_be_unregistered_yet_keeps_the_object_in_place(any_machine: Machine) -> None:
    driver, data, stream = any_machine.driver, bytearray(N), any_machine.stream()
    held = adopt(driver, data)
    driver.begin_capture(stream)  # to wait for the device now would break it
    del held
    gc.collect()
    with pytest.raises(BufferError):
        data.extend(b"x")
    driver.end_capture(stream)
    adopt(driver, bytearray(N)).close()
    data.extend(b"x")


def test_adopting_twice_registers_once() -> None:
    driver, data = EmulatedDriver(), np.zeros(N, np.uint8)
    with adopt(driver, data), adopt(driver, data[100:200]) as inner:
        assert driver.registered == N
        assert inner.span == Span(address(data) + 100, 100)
    assert driver.registered == 0


def test_foreign_registrations(any_driver: Driver) -> None:
    data = pages(2 * N)
    any_driver.host_register(address(data), 2 * N)
    with pytest.raises(RegistrationError):
        adopt(any_driver, data)
    with adopt(any_driver, data, foreign=Foreign.BORROW):
        assert registrations(any_driver).covers(address(data), 2 * N)
    any_driver.host_unregister(address(data))


# -- what is refused or empty ------------------------------------------------------------------------------
@pytest.mark.parametrize("empty", [b"", bytearray(), np.zeros((3, 0)), memoryview(b"")])
def test_nothing_is_a_valid_range(empty: Any) -> None:
    driver = EmulatedDriver()
    with adopt(driver, empty) as held:
        assert held.span.nbytes == len(held.array()) == 0
        assert driver.registered == 0


def test_parts_with_gaps_are_refused() -> None:
    for part in (np.zeros((10, 10))[:, ::2], memoryview(bytearray(10))[::2], np.zeros(10)[::-1]):
        with pytest.raises(InvalidRequestError, match="not contiguous"):
            adopt(EmulatedDriver(), part)


@pytest.mark.parametrize("obj", [None, 7, [1, 2], "text", object()])
def test_what_is_no_buffer(obj: object) -> None:
    with pytest.raises(InvalidRequestError, match="buffer protocol"):
        adopt(EmulatedDriver(), obj)


def test_a_closed_mmap() -> None:
    memory = mmap.mmap(-1, N)
    memory.close()
    with pytest.raises(InvalidRequestError, match="does not give its memory away"):
        adopt(EmulatedDriver(), memory)


def test_a_refused_registration_lets_go() -> None:
    driver, data = EmulatedDriver(), bytearray(N)
    driver.close()
    with refused("DEINITIALIZED"):
        adopt(driver, data)
    gc.collect()
    data.extend(b"x")


def test_names_and_forks() -> None:
    driver = EmulatedDriver()
    with adopt(driver, bytearray(N)), adopt(driver, np.zeros(N), name="weights"):
        assert {row.names for row in describe(driver)} == {("bytearray",), ("weights",)}
    driver._forked = True
    with pytest.raises(ForkedError):
        adopt(driver, bytearray(N))


@pytest.mark.parametrize("wrong", [{"name": 5}, {"name": ["a"]}, {"foreign": "borrow"}])
def test_what_is_no_name_or_choice(wrong: dict[str, Any]) -> None:
    driver = EmulatedDriver()
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        adopt(driver, bytearray(N), **wrong)
    assert str(describe(driver)).endswith("0 ranges, 0 B pinned by MemFerry")


@pytest.mark.parametrize("driver", [None, EmulatedDriver])
def test_a_driver_is_needed(driver: Any) -> None:
    with pytest.raises(InvalidRequestError, match="Driver"):
        adopt(driver, bytearray(N))
