"""The calls that happen thousands of times a step, made straight into the driver library.

Handles and pointers are plain integers here, and answers are numbers: building the bindings' enumerations and
handle objects costs more than most of these calls.  The interpreter lock is released while a call runs.
"""

from __future__ import annotations

import threading
from functools import cache
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
""")


class Answers(threading.local):
    """Where calls of this thread put their answers."""

    def __init__(self) -> None:
        self.context = _ffi.new("uintptr_t *")
        self.status = _ffi.new("int *")
        self.mode = _ffi.new("int *")
        self.number = _ffi.new("int *")
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
    calls = {name: getattr(loaded, name) for name in dir(loaded)}  # looking one up there takes as long as a call
    return SimpleNamespace(loaded=loaded, **calls)
