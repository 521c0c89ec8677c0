"""libmemferry on the stand-in for libcuda, for tests: a failed call raises `Refused`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cffi import FFI

from memferry_allocator import native

STUB = """
struct entry { int kind, stream, event; };
void stub_reset(void);
void stub_fail(const char *call, int after, int code);
void stub_capacity(size_t nbytes);
void stub_mapped_offset(size_t nbytes);
size_t stub_used(void);
void stub_strict_streams(int on);
void stub_count_calls(int on);
long stub_calls(void);
int stub_contexts(void);
int stub_depth(void);
int stub_events(void);
int stub_registrations(void);
int stub_log(const struct entry **entries);
void stub_reuse_handle(void *gone);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuStreamGetId(void *stream, unsigned long long *id);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuInit(unsigned flags);
int cuMemAlloc_v2(unsigned long long *pointer, size_t nbytes);
int cuMemFree_v2(unsigned long long pointer);
int cuMemHostRegister_v2(void *start, size_t nbytes, unsigned flags);
int cuMemHostUnregister(void *start);
int cuMemHostGetDevicePointer_v2(unsigned long long *pointer, void *host, unsigned flags);
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t nbytes, void *stream);
int cuEventQuery(void *event);
"""


class Refused(Exception):
    """A call of libmemferry that failed, by the name of its status."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Native:
    """The library, and the stand-in that it uses."""

    def __init__(self, stub: Path) -> None:
        self.ffi, self.lib = native.bindings()
        self.stub_path = str(stub)
        self.stub_ffi = FFI()
        self.stub_ffi.cdef(STUB)
        self.stub = self.stub_ffi.dlopen(self.stub_path)
        self.statuses = self.ffi.typeof("memferry_status").elements

    def call(self, name: str, *arguments: Any) -> None:
        self.check(getattr(self.lib, f"memferry_{name}")(*arguments))

    def check(self, status: int) -> None:
        if status != 0:
            message = self.ffi.string(self.lib.memferry_last_error()).decode()
            raise Refused(self.statuses[status].removeprefix("MEMFERRY_"), message)

    def open(self, ordinal: int = 0, *, path: str | None = None, max_chunk: int = 0) -> Device:
        where = self.ffi.new("char[]", (path or self.stub_path).encode())
        options = self.ffi.new("memferry_options *", {"driver_path": where, "max_chunk": max_chunk})
        handle = self.ffi.new("memferry_device **")
        self.call("open", ordinal, options, handle)
        return Device(self, handle)


class Device:
    """An open device."""

    def __init__(self, native: Native, handle: Any) -> None:
        self.native, self.handle = native, handle
        self._keep: list[Any] = []

    def call(self, name: str, *arguments: Any) -> None:
        self.native.call(name, self.handle[0], *arguments)

    def close(self) -> None:
        self.native.call("close", self.handle)

    def pool(self, budget: int) -> Pool:
        handle = self.native.ffi.new("memferry_pool **")
        self.call("pool_open", budget, handle)
        return Pool(self.native, handle)

    def stream(self) -> Any:
        out = self.native.ffi.new("memferry_stream *")
        self.call("stream_create", out)
        return out[0]

    def register(self, address: int, nbytes: int, flags: int = 0) -> None:
        self.call("host_register", self.native.ffi.cast("void *", address), nbytes, flags)

    def unregister(self, address: int, nbytes: int) -> None:
        self.call("host_unregister", self.native.ffi.cast("void *", address), nbytes)

    def device_pointer(self, address: int) -> int:
        out = self.native.ffi.new("memferry_ptr *")
        self.call("host_device_pointer", self.native.ffi.cast("void *", address), out)
        return int(out[0])

    def range_of(self, address: int) -> tuple[int, int]:
        start, nbytes = self.native.ffi.new("void **"), self.native.ffi.new("size_t *")
        self.call("host_range", self.native.ffi.cast("void *", address), start, nbytes)
        return int(self.native.ffi.cast("uintptr_t", start[0])), int(nbytes[0])

    def host(self, nbytes: int) -> int:
        out = self.native.ffi.new("void **")
        self.call("host_allocate", nbytes, out)
        return int(self.native.ffi.cast("uintptr_t", out[0]))

    def host_free(self, address: int) -> None:
        self.call("host_free", self.native.ffi.cast("void *", address))

    def host_statistics(self) -> Any:
        out = self.native.ffi.new("memferry_host_statistics *")
        self.call("host_statistics_get", out)
        return out


class Pool:
    """An open pool."""

    def __init__(self, native: Native, handle: Any) -> None:
        self.native, self.handle = native, handle

    def allocate(self, nbytes: int, stream: Any) -> int:
        out = self.native.ffi.new("memferry_ptr *")
        self.native.call("allocate", self.handle[0], nbytes, stream, out)
        return int(out[0])

    def free(self, pointer: int, nbytes: int, stream: Any) -> None:
        self.native.call("free", self.handle[0], pointer, nbytes, stream)

    def record_use(self, pointer: int, stream: Any) -> None:
        self.native.call("record_use", self.handle[0], pointer, stream)

    def forget(self, stream: Any) -> None:
        self.native.call("pool_forget_stream", self.handle[0], stream)

    def trim(self) -> int:
        out = self.native.ffi.new("size_t *")
        self.native.call("pool_trim", self.handle[0], out)
        return int(out[0])

    @property
    def statistics(self) -> Any:
        out = self.native.ffi.new("memferry_statistics *")
        self.native.call("pool_statistics", self.handle[0], out)
        return out

    def close(self) -> None:
        self.native.call("pool_close", self.handle)
