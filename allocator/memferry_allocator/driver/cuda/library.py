"""The calls that happen thousands of times a step, made straight into the driver library.

Handles and pointers are plain integers here, and answers are numbers: building the bindings' enumerations and
handle objects costs more than most of these calls.  The interpreter lock is released while a call runs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cffi import FFI

LIBRARY = "libcuda.so.1"

_ffi = FFI()
_ffi.cdef("""
    int cuCtxGetCurrent(uintptr_t *context);
    int cuCtxPushCurrent_v2(uintptr_t context);
    int cuCtxPopCurrent_v2(uintptr_t *context);
    int cuThreadExchangeStreamCaptureMode(int *mode);
    int cuStreamIsCapturing(uintptr_t stream, int *status);
    int cuStreamQuery(uintptr_t stream);
    int cuStreamSynchronize(uintptr_t stream);
    int cuStreamWaitEvent(uintptr_t stream, uintptr_t event, unsigned int flags);
    int cuEventRecord(uintptr_t event, uintptr_t stream);
    int cuEventQuery(uintptr_t event);
    int cuEventSynchronize(uintptr_t event);
    int cuMemcpyAsync(uintptr_t dst, uintptr_t src, size_t nbytes, uintptr_t stream);
    typedef struct {
        size_t src_x, src_y;
        int src_type;
        const void *src_host;
        uintptr_t src_device, src_array;
        size_t src_pitch, dst_x, dst_y;
        int dst_type;
        void *dst_host;
        uintptr_t dst_device, dst_array;
        size_t dst_pitch, width, height;
    } memferry_rows;
    int cuMemcpy2DAsync_v2(const memferry_rows *rows, uintptr_t stream);
    int cuMemsetD8Async(uintptr_t dst, unsigned char value, size_t nbytes, uintptr_t stream);
    int cuPointerGetAttribute(int *answer, int attribute, uintptr_t ptr);
    int cuPointerGetAttributes(unsigned int count, int *attributes, void **answers, uintptr_t ptr);
    int cuLaunchKernel(uintptr_t function, unsigned int blocks, unsigned int blocks_y, unsigned int blocks_z,
                       unsigned int threads, unsigned int threads_y, unsigned int threads_z,
                       unsigned int shared_bytes, uintptr_t stream, void **arguments, void **extra);
""")


_ffi.cdef("""
    typedef struct {
        int (*current)(uintptr_t *);
        int (*push)(uintptr_t);
        int (*pop)(uintptr_t *);
        int (*record)(uintptr_t, uintptr_t);
        int (*wait)(uintptr_t, uintptr_t, unsigned int);
        int (*capturing)(uintptr_t, int *);
        int (*copy)(uintptr_t, uintptr_t, size_t, uintptr_t);
    } beside_calls;
    typedef struct { int code, call, recorded, captured; } beside_answer;
    int beside_begin(const beside_calls *, uintptr_t context, uintptr_t stream, uintptr_t event, beside_answer *);
    int beside_copy(const beside_calls *, uintptr_t context, uintptr_t lane, uintptr_t begin, uintptr_t dst,
                    uintptr_t src, size_t nbytes, uintptr_t end, uintptr_t stream, beside_answer *);
""")
_BESIDE = Path(__file__).with_name("libbeside.so")
_TABLE = {
    "current": "cuCtxGetCurrent",
    "push": "cuCtxPushCurrent_v2",
    "pop": "cuCtxPopCurrent_v2",
    "record": "cuEventRecord",
    "wait": "cuStreamWaitEvent",
    "capturing": "cuStreamIsCapturing",
    "copy": "cuMemcpyAsync",
}


class Beside:
    """The compiled part: several calls of the driver library in one.

    Parameters
    ----------
    pointers : mapping of str to pointer
        The driver's functions, by `_TABLE`'s names for them.
    """

    CALLS = ("push context", "event_record", "is_capturing", "stream_wait", "copy")  # by the number of an answer

    def __init__(self, pointers: Mapping[str, Any]) -> None:
        compiled: Any = _ffi.dlopen(str(_BESIDE))
        self.table = _ffi.new("beside_calls *", dict(pointers))
        self.begin, self.copy = compiled.beside_begin, compiled.beside_copy


def _beside(loaded: Any) -> Beside | None:
    """None where the package was installed without a compiler."""
    if not _BESIDE.is_file():
        return None
    return Beside({name: _ffi.addressof(loaded, symbol) for name, symbol in _TABLE.items()})


class Arguments:
    """Of a kernel's launch: numbers of 64 bits, and pointers to them."""

    none = _ffi.NULL

    def __init__(self, count: int) -> None:
        self.values = _ffi.new("uint64_t[]", count)
        self.pointers = _ffi.new("void *[]", [self.values + index for index in range(count)])


class Attributes:
    """What is asked about a pointer: kind, home, whether plain memory, start and size of its range; and access.

    That is asked alone: the call that answers several does not know it.
    """

    ACCESS = 16

    def __init__(self) -> None:
        self.keys = _ffi.new("int[]", [2, 9, 10, 11, 12])
        self.values = [_ffi.new("uint64_t *") for _ in self.keys]  # wider than some answers, and zero beyond
        self.pointers = _ffi.new("void *[]", self.values)
        self.flags = _ffi.new("uint64_t *")
        self.access = _ffi.cast("int *", self.flags)


class Answers(threading.local):
    """Where calls of this thread put their answers."""

    def __init__(self) -> None:
        self.context = _ffi.new("uintptr_t *")
        self.status = _ffi.new("int *")
        self.mode = _ffi.new("int *")
        self.number = _ffi.new("int *")
        self.arguments = Arguments(3)
        self.beside: Any = _ffi.new("beside_answer *")
        self.attributes = Attributes()
        self.held: int | None = None  # the device whose context `Held` keeps current


UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says where the memory is


def rows_structure(dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int) -> Any:
    """``CUDA_MEMCPY2D`` for addresses of any kind of memory."""
    made: Any = _ffi.new("memferry_rows *")
    made.src_type = made.dst_type = UNIFIED
    made.src_device, made.src_pitch = src, src_pitch
    made.dst_device, made.dst_pitch = dst, dst_pitch
    made.width, made.height = width, rows
    return made


@cache
def library() -> Any:
    """The calls of the driver library, which the bindings have loaded already."""
    loaded = _ffi.dlopen(LIBRARY)
    names = [name for name in dir(loaded) if name.startswith("cu")]
    calls = {name: getattr(loaded, name) for name in names}  # looking one up there takes as long as a call
    return SimpleNamespace(loaded=loaded, beside=_beside(loaded), **calls)
