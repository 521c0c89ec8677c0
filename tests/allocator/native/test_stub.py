"""The stand-in for libcuda answers misuse as an H200's driver does."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..driver_cases import PAGE, map_pages, unmap_pages
from .bound import Native

ANSWERS = json.loads((Path(__file__).parents[1] / "data" / "driver_answers.json").read_text())["answers"]
NAMES = {0: "SUCCESS", 1: "INVALID_VALUE", 2: "OUT_OF_MEMORY"}
NAMES |= {712: "HOST_MEMORY_ALREADY_REGISTERED", 713: "HOST_MEMORY_NOT_REGISTERED"}


class Asked:
    """The calls of the stand-in, by the names that its answers have."""

    def __init__(self, native: Native) -> None:
        self.native, self.ffi = native, native.stub_ffi

    def pointer(self, address: int) -> Any:
        return self.ffi.cast("void *", address)

    def register(self, address: int, nbytes: int, flags: int = 3) -> str:
        return NAMES[self.native.stub.cuMemHostRegister_v2(self.pointer(address), nbytes, flags)]

    def unregister(self, address: int) -> str:
        return NAMES[self.native.stub.cuMemHostUnregister(self.pointer(address))]

    def mapped(self, address: int) -> tuple[str, int]:
        out = self.ffi.new("unsigned long long *")
        return NAMES[self.native.stub.cuMemHostGetDevicePointer_v2(out, self.pointer(address), 0)], int(out[0])

    def allocate(self, nbytes: int) -> tuple[str, int]:
        out = self.ffi.new("unsigned long long *")
        return NAMES[self.native.stub.cuMemAlloc_v2(out, nbytes)], int(out[0])

    def free(self, address: int) -> str:
        return NAMES[self.native.stub.cuMemFree_v2(address)]

    def copy(self, to: int, source: int, nbytes: int) -> str:
        return NAMES[self.native.stub.cuMemcpyAsync(to, source, nbytes, self.ffi.NULL)]


CASES: dict[str, Callable[[Asked, int], list[Any]]] = {
    "register_again_same": lambda ask, p: [ask.register(p, 4 * PAGE), ask.register(p, 4 * PAGE)],
    "register_subrange": lambda ask, p: [ask.register(p, 8 * PAGE), ask.register(p + PAGE, PAGE)],
    "register_superset": lambda ask, p: [ask.register(p + PAGE, PAGE), ask.register(p, 8 * PAGE)],
    "register_adjacent": lambda ask, p: [ask.register(p, PAGE), ask.register(p + PAGE, PAGE)],
    "register_unaligned_neighbours_share_a_page": lambda ask, p: [
        ask.register(p + at, size) for at, size in ((16, 64), (128, 64), (64, 16))
    ],
    "register_zero": lambda ask, p: [ask.register(p, 0)],
    "register_null": lambda ask, p: [ask.register(0, PAGE)],
    "unregister_interior_unknown_twice": lambda ask, p: [
        ask.register(p, 4 * PAGE),
        *(ask.unregister(at) for at in (p + PAGE, p + 8 * PAGE, p, p)),
    ],
    "device_pointer_of_interior": lambda ask, p: [
        ask.register(p, 4 * PAGE),
        ask.mapped(p + PAGE + 24)[1] - p,
    ],
    "device_pointer_of_unregistered": lambda ask, p: [ask.mapped(p)[0]],
}


@pytest.fixture
def ask(native: Native) -> Any:
    context = native.stub_ffi.new("void **")
    native.stub.cuCtxPushCurrent_v2(native.stub_ffi.cast("void *", 1))
    yield Asked(native)
    native.stub.cuCtxPopCurrent_v2(context)


@pytest.mark.parametrize("case", CASES)
def test_registrations(ask: Asked, case: str) -> None:
    start = map_pages(16)
    assert CASES[case](ask, start) == ANSWERS[case]
    for at in range(0, 4 * PAGE, 16):
        ask.unregister(start + at)
    unmap_pages(start, 16)


def test_mappings(ask: Asked) -> None:
    only_read = map_pages(4, rights=mmap.PROT_READ)
    answers = [ask.register(only_read, PAGE), ask.register(only_read, PAGE, 3 | 8)]
    assert answers == ANSWERS["register_readonly_mapping"]
    ask.unregister(only_read)
    start = map_pages(4)
    unmap_pages(start + 2 * PAGE, 2)
    assert [ask.register(start, 4 * PAGE)] == ANSWERS["register_beyond_mapping"]


def test_an_address_range_that_is_used_again(ask: Asked) -> None:
    start = map_pages(16)
    first = ask.register(start, 16 * PAGE)
    unmap_pages(start, 16)
    map_pages(16, at=start)
    answers = [first, ask.register(start, 16 * PAGE), ask.unregister(start), ask.register(start, 16 * PAGE)]
    assert answers == ANSWERS["register_va_reused_after_munmap"]
    ask.unregister(start)


def test_device_memory(ask: Asked) -> None:
    pointer = ask.allocate(1 << 21)[1]
    answers = [ask.allocate(0)[0], ask.allocate(1 << 60)[0]]
    answers += [ask.free(at) for at in (pointer + 512, pointer, pointer, 0)]
    assert answers == ANSWERS["alloc_zero_huge_free_twice_null_interior"]


def test_copies(ask: Asked) -> None:
    start, pointer = map_pages(16), ask.allocate(16 * PAGE)[1]
    ask.register(start, 4 * PAGE)
    assert [ask.copy(pointer, start, 8 * PAGE)] * 2 == ANSWERS["copy_spans_registered_and_not"]
    assert [ask.copy(pointer, start, 0)] * 2 == ANSWERS["copy_zero_bytes"]
    assert [ask.copy(pointer, map_pages(32), 32 * PAGE)] == ANSWERS["copy_out_of_bounds"]
    ask.unregister(start)
    ask.free(pointer)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_what_a_capture_forbids(ask: Asked, mode: int) -> None:
    """900 and a capture that is lost, unless it is relaxed."""
    stub, ffi = ask.native.stub, ask.ffi
    device = ask.native.open()
    captured = ffi.cast("void *", device.stream())
    stub.cuStreamBeginCapture_v2(captured, mode)
    start, pointer = map_pages(1), ask.ffi.new("unsigned long long *")
    codes = [stub.cuMemAlloc_v2(pointer, PAGE), stub.cuMemHostRegister_v2(ask.pointer(start), PAGE, 3)]
    codes.append(stub.cuEventQuery(ffi.NULL))
    codes.append(stub.cuMemFree_v2(pointer[0]))
    end = stub.cuStreamEndCapture(captured, ffi.new("void **"))
    assert (codes, end) == (([0] * 4, 0) if mode == 2 else ([900] * 4, 901))
    if mode == 2:
        ask.unregister(start)
    device.close()
