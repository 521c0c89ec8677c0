"""What a copy by a kernel asks of the CUDA driver, and what it refuses; the library is played."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from cuda.bindings import driver as cu

from memferry_allocator import DeviceLostError, Driver, DriverError, Stream, UnsupportedError
from memferry_allocator.driver import DeviceInfo
from memferry_allocator.driver.cuda import CudaDriver, core, kernel_calls
from memferry_allocator.driver.cuda.library import _ffi

from .machine import refused
from .test_cuda_calls import CONTEXT, OK, Library

HOST, DEVICE = 1, 2
FUNCTION = 900


@dataclass(frozen=True)
class Range:
    """What the driver knows of some addresses."""

    kind: int
    start: int
    size: int
    home: int = 0
    plain: int = 1
    access: int = 0


class Memory(Library):
    """Knows ranges, and remembers the arguments of launches."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[Range] = []
        self.launched: list[tuple[int, ...]] = []
        self.shapes: list[tuple[int, ...]] = []

    def at(self, ptr: int) -> Range:
        known = (known for known in self.ranges if known.start <= ptr < known.start + known.size)
        return next(known, Range(0, 0, 0, plain=0))

    def cuPointerGetAttribute(self, answer: Any, key: int, ptr: int) -> int:  # noqa: N802
        assert key == 16
        _ffi.cast("uint64_t *", answer)[0] = self.at(ptr).access
        return 0

    def cuPointerGetAttributes(self, count: int, keys: Any, answers: Any, ptr: int) -> int:  # noqa: N802
        found = self.at(ptr)
        values = (found.kind, found.home, found.plain, found.start, found.size)
        assert list(keys) == [2, 9, 10, 11, 12]
        assert len(values) == count
        for index, value in enumerate(values):
            _ffi.cast("uint64_t *", answers[index])[0] = value
        return 0

    def cuLaunchKernel(self, function: int, *arguments: Any) -> int:  # noqa: N802
        *shape, stream, pointers, extra = arguments
        assert function == FUNCTION
        assert extra == _ffi.NULL
        assert self.contexts[-1:] == [CONTEXT + 1]
        self.shapes.append((*shape, stream))
        self.launched.append(tuple(_ffi.cast("uint64_t *", pointers[index])[0] for index in range(3)))
        return self.codes.get("cuLaunchKernel", 0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Memory:
    played = Memory()
    monkeypatch.setattr(core, "initialise", lambda: 2)
    monkeypatch.setattr(core, "library", lambda: played)
    monkeypatch.setattr(cu, "cuDevicePrimaryCtxRetain", lambda device: (*OK, CONTEXT + device))
    monkeypatch.setattr(cu, "cuDevicePrimaryCtxRelease", lambda device: OK)
    monkeypatch.setattr(cu, "cuModuleLoadData", lambda code: (*OK, code))
    monkeypatch.setattr(cu, "cuModuleGetFunction", lambda module, name: (*OK, FUNCTION))
    monkeypatch.setattr(kernel_calls, "compile_kernels", lambda source, capability: source.read_bytes())
    info = DeviceInfo(1, "played", "GPU-1", 1 << 30, None, None, (9, 0))
    monkeypatch.setattr(core.CudaCore, "device_info", lambda self, device: info)
    played.ranges = [
        Range(DEVICE, 0x1000, 0x800),
        Range(HOST, 0x4000, 0x800),
        Range(DEVICE, 0x8000, 0x800, home=1),
    ]
    return played


@pytest.fixture
def stream(library: Memory) -> Stream:
    return CudaDriver().stream_from_handle(1, 40)


def copy(stream: Stream, dst: int, src: int, nbytes: int, **options: int) -> None:
    driver: Driver = stream.driver
    driver.kernel_copy(dst, src, nbytes, stream=stream, **options)


def test_it_is_one_launch_on_the_device_of_the_stream(library: Memory, stream: Stream) -> None:
    stream.driver.prepare_kernel_copy(1)
    copy(stream, 0x1010, 0x4000, 0x700)
    copy(stream, 0x4001, 0x8000, 3, blocks=2)
    copy(stream, 0, 0, 0)
    assert library.launched == [(0x1010, 0x4000, 0x700), (0x4001, 0x8000, 3)]
    assert library.shapes == [(blocks, 1, 1, kernel_calls.THREADS, 1, 1, 0, 40) for blocks in (8, 2)]
    assert library.contexts == []


@pytest.mark.parametrize(
    ("dst", "src", "nbytes", "said"),
    [
        (0x1000, 0x4000, 0x801, "not all in one"),
        (0x1001, 0x4000, 0x800, "not all in one"),
        (0x1000, 0x4001, 0x800, "not all in one"),
        (0x9000, 0x4000, 8, "not all in one"),
        (0x1000, 0x9000, 8, "not all in one"),
        (0x1000, 0x4000, -1, "negative"),
    ],
)
def test_what_leaves_its_memory_is_not_launched(
    library: Memory, stream: Stream, dst: int, src: int, nbytes: int, said: str
) -> None:
    """On a device it would be the end of the context."""
    with pytest.raises(DriverError, match=said) as caught:
        copy(stream, dst, src, nbytes)
    assert caught.value.code == "CUDA_ERROR_INVALID_VALUE"
    assert library.launched == []


@pytest.mark.parametrize(
    ("plain", "access", "home", "reached"),
    [(1, 0, 0, True), (0, 3, 0, True), (0, 0, 1, True), (0, 0, 0, False), (0, 1, 0, False)],
)
def test_a_peer_s_pages_need_rights_of_their_own(
    library: Memory, stream: Stream, plain: int, access: int, home: int, reached: bool
) -> None:
    library.ranges = [Range(DEVICE, 0x1000, 0x800, home, plain, access), library.ranges[1]]
    if reached:
        copy(stream, 0x1000, 0x4000, 8)
    else:
        with pytest.raises(DriverError, match="out of reach of device 1"):
            copy(stream, 0x1000, 0x4000, 8)
    assert len(library.launched) == int(reached)


def test_a_launch_that_is_refused(library: Memory, stream: Stream) -> None:
    library.codes["cuLaunchKernel"] = 1
    with refused("INVALID_VALUE"):
        copy(stream, 0x1000, 0x4000, 8)
    library.codes["cuLaunchKernel"] = 700
    for _ in range(2):
        with refused("ILLEGAL_ADDRESS", DeviceLostError):
            copy(stream, 0x1000, 0x4000, 8)
    assert len(library.launched) == 2


def test_without_a_compiler_nothing_is_copied(
    library: Memory, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: object, capability: object) -> bytes:
        raise UnsupportedError("no NVRTC")

    monkeypatch.setattr(kernel_calls, "compile_kernels", fail)
    for call in (lambda: stream.driver.prepare_kernel_copy(1), lambda: copy(stream, 0x1000, 0x4000, 8)):
        with pytest.raises(UnsupportedError, match="no NVRTC"):
            call()
    assert library.launched == []
