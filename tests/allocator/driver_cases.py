"""Edge cases of a driver, and how one answers them.

    python -m tests.allocator.driver_cases DRIVER [CASE ...]

prints the answers as JSON, every case in a child process of its own: an error that sticks, a crash or a hang in
one does not colour the next.  A case asks through the driver seam; `data/driver_answers.json` has what the driver
of an H200 says to the same questions.  An answer is the driver's own name of it, without
``CUDA_ERROR_``, and ``SUCCESS`` where nothing was raised; what a case has to say besides comes after it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from memferry_allocator import CaptureMode, Driver, DriverError, EmulatedOptions, Stream, open_driver

PAGE = mmap.PAGESIZE
HUGE = 4 << 20
Answer = Any
CASES: dict[str, Callable[[Driver], Answer]] = {}


def case(function: Callable[[Driver], Answer]) -> Callable[[Driver], Answer]:
    CASES[function.__name__] = function
    return function


def answer(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except DriverError as error:
        return error.code.removeprefix("CUDA_ERROR_")
    return "SUCCESS"


# -- pages that are mapped and unmapped at will ------------------------------------------------------------
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED = 0x10


def map_pages(count: int, *, rights: int = mmap.PROT_READ | mmap.PROT_WRITE, at: int = 0) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_FIXED if at else 0)
    start = _libc.mmap(at or None, count * PAGE, rights, flags, -1, 0)
    assert start != ctypes.c_void_p(-1).value, ctypes.get_errno()
    return int(start)


def unmap_pages(start: int, count: int) -> None:
    assert _libc.munmap(start, count * PAGE) == 0


def _bytes(start: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), np.uint8)


def _moved(driver: Driver, dst: int, src: int, nbytes: int) -> str:
    """The answer to a copy on a stream of its own, which has run when this returns."""
    stream = driver.create_stream(0)
    said = answer(driver.copy, dst, src, nbytes, stream=stream)
    stream.close()
    return said


# -- registering -----------------------------------------------------------------------------------------
def _register_all(driver: Driver, *ranges: tuple[int, int]) -> list[str]:
    start = map_pages(16)
    return [answer(driver.host_register, start + offset, nbytes) for offset, nbytes in ranges]


@case
def register_again_same(driver: Driver) -> Answer:
    return _register_all(driver, (0, 4 * PAGE), (0, 4 * PAGE))


@case
def register_subrange(driver: Driver) -> Answer:
    return _register_all(driver, (0, 8 * PAGE), (PAGE, PAGE))


@case
def register_superset(driver: Driver) -> Answer:
    return _register_all(driver, (PAGE, PAGE), (0, 8 * PAGE))


@case
def register_adjacent(driver: Driver) -> Answer:
    return _register_all(driver, (0, PAGE), (PAGE, PAGE))


@case
def register_unaligned_neighbours_share_a_page(driver: Driver) -> Answer:
    return _register_all(driver, (16, 64), (128, 64), (64, 16))


@case
def register_zero(driver: Driver) -> Answer:
    return _register_all(driver, (0, 0))


@case
def register_null(driver: Driver) -> Answer:
    return [answer(driver.host_register, 0, PAGE)]


@case
def register_readonly_mapping(driver: Driver) -> Answer:
    start = map_pages(4, rights=mmap.PROT_READ)
    return [
        answer(driver.host_register, start, PAGE),
        answer(driver.host_register, start, PAGE, read_only=True),
    ]


@case
def register_beyond_mapping(driver: Driver) -> Answer:
    start = map_pages(4)
    unmap_pages(start + 2 * PAGE, 2)
    return [answer(driver.host_register, start, 4 * PAGE)]


@case
def unregister_interior_unknown_twice(driver: Driver) -> Answer:
    start, other = map_pages(16), map_pages(1)
    asked = [answer(driver.host_register, start, 4 * PAGE)]
    return asked + [answer(driver.host_unregister, where) for where in (start + PAGE, other, start, start)]


@case
def register_va_reused_after_munmap(driver: Driver) -> Answer:
    start = map_pages(16)
    asked = [answer(driver.host_register, start, 16 * PAGE)]
    unmap_pages(start, 16)
    assert map_pages(16, at=start) == start
    asked.append(answer(driver.host_register, start, 16 * PAGE))
    asked.append(answer(driver.host_unregister, start))
    return [*asked, answer(driver.host_register, start, 16 * PAGE)]


# -- what registered memory is to a device -----------------------------------------------------------------
@case
def device_pointer_of_interior(driver: Driver) -> Answer:
    start = map_pages(16)
    driver.host_register(start, 4 * PAGE)
    offset = driver.host_device_pointer(start + PAGE + 24, 0) - driver.host_device_pointer(start, 0)
    return ["SUCCESS", offset]


@case
def device_pointer_of_unregistered(driver: Driver) -> Answer:
    return [answer(driver.host_device_pointer, map_pages(1), 0)]


@case
def pointer_attributes_host_registered(driver: Driver) -> Answer:
    """The driver knows both pointers of interior memory for the same bytes."""
    start, ptr = map_pages(16), driver.malloc(0, 3 * PAGE)
    driver.host_register(start, 4 * PAGE)
    inside = start + PAGE
    _bytes(inside, PAGE)[:] = 42
    said = [_moved(driver, ptr, inside, PAGE)]
    said.append(_moved(driver, ptr + PAGE, driver.host_device_pointer(inside, 0), PAGE))
    out = map_pages(2)
    said.append(_moved(driver, out, ptr, 2 * PAGE))
    return [*said, int(_bytes(out, 2 * PAGE).min()), int(_bytes(out, 2 * PAGE).max())]


@case
def address_range_of_registered(driver: Driver) -> Answer:
    """The driver knows where a registered range begins and ends: a copy reaches its last byte and no further."""
    start, ptr = map_pages(16), driver.malloc(0, 16 * PAGE)
    driver.host_register(start, 4 * PAGE)
    inside = driver.host_device_pointer(start, 0) + PAGE
    known = driver.host_registration(start + PAGE)
    said = [_moved(driver, ptr, inside, 3 * PAGE), _moved(driver, ptr, inside, 4 * PAGE)]
    return [*said, None if known is None else [known.ptr - start, known.nbytes]]


# -- copies ------------------------------------------------------------------------------------------------
@case
def copy_spans_registered_and_not(driver: Driver) -> Answer:
    start, ptr = map_pages(16), driver.malloc(0, 16 * PAGE)
    driver.host_register(start, 4 * PAGE)
    return [_moved(driver, ptr, start, 8 * PAGE), _moved(driver, start, ptr, 8 * PAGE)]


@case
def copy_zero_bytes(driver: Driver) -> Answer:
    start, ptr = map_pages(1), driver.malloc(0, PAGE)
    return [_moved(driver, ptr, start, 0), _moved(driver, start, ptr, 0)]


@case
def copy_out_of_bounds(driver: Driver) -> Answer:
    start, ptr = map_pages(HUGE // PAGE), driver.malloc(0, PAGE)
    return [_moved(driver, ptr, start, HUGE)]


# -- graph capture -----------------------------------------------------------------------------------------
def _capture(driver: Driver, mode: CaptureMode) -> Answer:
    stream, ptr, start = driver.create_stream(0), driver.malloc(0, PAGE), map_pages(16)
    event = driver.create_stream(0).record()
    said = {"begin": answer(driver.begin_capture, stream, mode)}
    said["malloc"] = answer(driver.malloc, 0, PAGE)
    said["free"] = answer(driver.free, 0, ptr)
    said["register"] = answer(driver.host_register, start, PAGE)
    said["query"] = answer(event.query)
    said["register other"] = answer(driver.host_register, start + 8 * PAGE, PAGE)
    said["end"] = answer(driver.end_capture, stream)
    return said


@case
def capture_global(driver: Driver) -> Answer:
    return _capture(driver, CaptureMode.GLOBAL)


@case
def capture_thread_local(driver: Driver) -> Answer:
    return _capture(driver, CaptureMode.THREAD_LOCAL)


@case
def capture_relaxed(driver: Driver) -> Answer:
    return _capture(driver, CaptureMode.RELAXED)


# -- fork --------------------------------------------------------------------------------------------------
def in_a_child(action: Callable[[], Answer]) -> Answer:
    """What a forked child says; None where it dies without a word."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os.write(writer, json.dumps(action()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as said:
        text = said.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


@case
def fork_child_uses_driver(driver: Driver) -> Answer:
    driver.malloc(0, PAGE)
    return in_a_child(lambda: [answer(driver.malloc, 0, PAGE)])


@case
def fork_then_parent_writes_registered_page(driver: Driver) -> Answer:
    start, ptr, out = map_pages(1), driver.malloc(0, PAGE), map_pages(1)
    _bytes(start, PAGE)[0] = 1
    driver.host_register(start, PAGE)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # holds its copy of the page until the parent is through
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    _bytes(start, PAGE)[0] = 2
    said = [_moved(driver, ptr, start, PAGE), _moved(driver, out, ptr, PAGE)]
    os.close(writer)
    os.waitpid(child, 0)
    return [*said, int(_bytes(out, PAGE)[0])]


# -- device memory -----------------------------------------------------------------------------------------
@case
def alloc_zero_huge_free_twice_null_interior(driver: Driver) -> Answer:
    ptr = driver.malloc(0, 1 << 21)
    asked = [answer(driver.malloc, 0, 0), answer(driver.malloc, 0, 1 << 60)]
    return asked + [answer(driver.free, 0, where) for where in (ptr + 512, ptr, ptr, 0)]


@case
def peer_twice_and_without(driver: Driver) -> Answer:
    if driver.device_count < 2 or not driver.can_access_peer(0, 1):
        return None
    return [
        answer(driver.disable_peer_access, 0, 1),
        answer(driver.enable_peer_access, 0, 1),
        answer(driver.enable_peer_access, 0, 1),
    ]


@case
def misuse_leaves_the_device_usable(driver: Driver) -> Answer:
    """Refused calls leave no error behind for the next one."""
    for other in CASES.values():
        if other is not misuse_leaves_the_device_usable:
            other(driver)
    stream: Stream = driver.create_stream(0)
    ptr, out = driver.malloc(0, PAGE), map_pages(1)
    said = [answer(driver.fill, ptr, 9, PAGE, stream=stream), answer(driver.copy, out, ptr, PAGE, stream=stream)]
    stream.close()
    return [*said, int(_bytes(out, PAGE).min()), answer(driver.free, 0, ptr)]


def _open(kind: str) -> Driver:
    return open_driver(kind, emulated=EmulatedOptions(device_count=2, device_memory=1 << 30))


if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        print(json.dumps([name, in_a_child(lambda name=name: CASES[name](_open(sys.argv[1])))]))  # type: ignore[misc]
