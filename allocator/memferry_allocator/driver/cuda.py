"""NVIDIA devices through the CUDA driver API (cuda-python).

Driver API only: a failed runtime-API call leaves its error behind for other people's next call.  Each
device's primary context is retained once, so that memory and streams are shared with every framework in
the process; it is made current for the length of a call and what was current before is put back.
"""

from __future__ import annotations

import ctypes
import os
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from cuda.bindings import driver as cu

from ..errors import DriverError, DriverNotFoundError, DriverOutOfMemory
from .api import DeviceInfo, Driver, Event, MemoryInfo, Span, Stream, require_stream

_LIBRARY = "libcuda.so.1"
_SUCCESS = cu.CUresult.CUDA_SUCCESS
_NOT_READY = cu.CUresult.CUDA_ERROR_NOT_READY
_ATTRIBUTE = cu.CUpointer_attribute
_PORTABLE_MAPPED, _READ_ONLY = 1 | 2, 8
_NON_BLOCKING, _DISABLE_TIMING = 1, 2
_CAPABILITIES = (
    "HOST_REGISTER_SUPPORTED",
    "READ_ONLY_HOST_REGISTER_SUPPORTED",
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "UNIFIED_ADDRESSING",
    "ASYNC_ENGINE_COUNT",
    "MEMORY_POOLS_SUPPORTED",
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "INTEGRATED",
)


def _check(call: str, result: tuple[Any, ...], detail: str = "") -> Any:
    """The value of a driver call, or the typed error of its answer."""
    if result[0] != _SUCCESS:
        raise DriverError(result[0].name, call, detail)
    return result[1] if len(result) == 2 else result[1:]


def _initialise() -> int:
    """Initialise the driver and count its devices."""
    try:
        result = cu.cuInit(0)
    except RuntimeError as error:  # cuda-python's answer where it cannot load a driver library
        raise _not_loaded(error) from None
    if result[0] == cu.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DriverNotFoundError("CUDA_ERROR_NO_DEVICE", "init")
    _check("init", result)
    count = int(_check("device count", cu.cuDeviceGetCount()))
    if count == 0:
        raise DriverNotFoundError("CUDA_ERROR_NO_DEVICE", "device count")
    return count


def _not_loaded(error: Exception) -> DriverError:
    """Tell a machine without a driver from one whose driver is broken."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as reason:
        absent = str(reason).startswith(f"{_LIBRARY}:") and "No such file" in str(reason)  # not one it needs
        if absent and not os.path.exists("/dev/nvidiactl"):
            return DriverNotFoundError("CUDA_ERROR_NO_DEVICE", "init", "this machine has no NVIDIA driver")
        error = reason
    return DriverError(
        "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", "init", f"the driver library does not load: {error}"
    )


class CudaDriver(Driver):
    """The CUDA driver of this process.

    Raises
    ------
    DriverNotFoundError
        This machine has no NVIDIA driver or no device.
    DriverError
        It has one that does not work; ``code`` and the message say how.
    """

    name: ClassVar[str] = "cuda"

    def __init__(self) -> None:
        self._count = _initialise()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._contexts: dict[int, Any] = {}
        self._context_ids: dict[int, int] = {}
        self._events: dict[tuple[int, bool], list[Any]] = {}
        self._infos: dict[int, DeviceInfo] = {}
        self._closed = False

    # -- devices ------------------------------------------------------------------------------------
    @property
    def device_count(self) -> int:
        return self._count

    def device_info(self, device: int) -> DeviceInfo:
        self._known(device)
        info = self._infos.get(device)
        if info is None:
            info = self._infos[device] = self._read_info(device)
        return info

    @staticmethod
    def _read_info(device: int) -> DeviceInfo:
        """Read without a context: looking at a device must not take memory on it."""
        handle = _check("device", cu.cuDeviceGet(device))

        def attribute(key: str) -> int:
            code = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{key}")
            return int(_check(key, cu.cuDeviceGetAttribute(code, handle)))

        name = _check("device name", cu.cuDeviceGetName(128, handle))
        identity = _check("device uuid", cu.cuDeviceGetUuid(handle))
        numa = attribute("HOST_NUMA_ID")
        pci = ":".join(f"{attribute(key):0{width}x}" for key, width in _PCI)
        return DeviceInfo(
            ordinal=device,
            name=name.split(b"\0", 1)[0].decode(),
            uuid=f"GPU-{uuid.UUID(bytes=bytes(identity.bytes))}",
            capacity=int(_check("total memory", cu.cuDeviceTotalMem(handle))),
            pci_address=f"{pci}.0",
            numa_node=numa if numa >= 0 else None,
            compute_capability=(
                attribute("COMPUTE_CAPABILITY_MAJOR"),
                attribute("COMPUTE_CAPABILITY_MINOR"),
            ),
            capabilities={key: attribute(key) for key in _CAPABILITIES},
        )

    def memory_info(self, device: int) -> MemoryInfo:
        with self._on(device):
            free, total = _check("memory info", cu.cuMemGetInfo())
            return MemoryInfo(int(free), int(total))

    def synchronize(self, device: int) -> None:
        with self._on(device):
            _check("synchronize", cu.cuCtxSynchronize())

    def synchronize_all(self) -> None:
        self._known(0)
        for device in list(self._contexts):  # no context is made for it on a device that has no work
            self.synchronize(device)

    # -- memory -------------------------------------------------------------------------------------
    def malloc(self, device: int, nbytes: int) -> int:
        _require_size("malloc", nbytes)
        with self._on(device):
            result = cu.cuMemAlloc(nbytes) if nbytes <= _LARGEST else _NO_MEMORY
            if result[0] == _NO_MEMORY[0]:
                free, total = self.memory_info(device)
                raise DriverOutOfMemory(
                    result[0].name,
                    "malloc",
                    size=nbytes,
                    used=total - free,
                    limit=total,
                    budget=f"cuda:{device}",
                )
            return int(_check("malloc", result, f"nbytes={nbytes}"))

    def free(self, device: int, ptr: int) -> None:
        with self._on(device):
            _check("free", cu.cuMemFree(ptr), f"ptr={ptr:#x}")

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        _require_size("host_register", min(address, nbytes))
        flags = _PORTABLE_MAPPED | (_READ_ONLY if read_only else 0)
        with self._on_any():
            _check(
                "host_register",
                cu.cuMemHostRegister(address, nbytes, flags),
                f"{nbytes} bytes at {address:#x}",
            )

    def host_unregister(self, address: int) -> None:
        with self._on_any():
            _check("host_unregister", cu.cuMemHostUnregister(address), f"{address:#x}")

    def host_registration(self, address: int) -> Span | None:
        with self._on_any():
            kind = cu.cuPointerGetAttribute(_ATTRIBUTE.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
            if kind[0] != _SUCCESS or int(kind[1]) != int(cu.CUmemorytype.CU_MEMORYTYPE_HOST):
                return None
            start, nbytes = (
                int(_check("host_registration", cu.cuPointerGetAttribute(attribute, address)))
                for attribute in (
                    _ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                    _ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                )
            )
            return Span(start, nbytes)

    def host_device_pointer(self, address: int, device: int) -> int:
        with self._on(device):
            result = cu.cuMemHostGetDevicePointer(address, 0)
            return int(_check("host_device_pointer", result, f"{address:#x} is not registered"))

    def host_bytes(self, ptr: int, nbytes: int) -> memoryview | None:
        return None

    # -- order --------------------------------------------------------------------------------------
    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        with self._on(device):
            handle = _check("create_stream", cu.cuStreamCreateWithPriority(_NON_BLOCKING, priority))
        return Stream(self, device, handle, owned=True)

    def stream_from_handle(self, device: int, handle: int) -> Stream:
        self._context(device)
        return Stream(self, device, cu.CUstream(handle), owned=False)

    def destroy_stream(self, stream: Stream) -> None:
        with self._lock:
            if not stream.owned or stream.handle is _CLOSED or self._closed:
                return
            handle = self._stream(stream)
            object.__setattr__(stream, "handle", _CLOSED)
        with self._on(stream.device):
            _check("synchronize", cu.cuStreamSynchronize(handle))
            _check("destroy_stream", cu.cuStreamDestroy(handle))

    def stream_wait(self, stream: Stream, event: Event) -> None:
        handle, other = self._stream(stream), self._event(event)
        if event.sequence == 0:
            return
        with self._on(stream.device):
            _check("stream_wait", cu.cuStreamWaitEvent(handle, other, 0))

    def stream_synchronize(self, stream: Stream) -> None:
        handle = self._stream(stream)
        with self._on(stream.device):
            _check("stream_synchronize", cu.cuStreamSynchronize(handle))

    def stream_query(self, stream: Stream) -> bool:
        handle = self._stream(stream)
        with self._on(stream.device):
            return _is_done("stream_query", cu.cuStreamQuery(handle))

    def create_event(self, device: int, *, timing: bool = False) -> Event:
        self._known(device)
        spare = self._events.setdefault((device, timing), [])
        try:
            handle = spare.pop()
        except IndexError:
            with self._on(device):
                handle = _check("create_event", cu.cuEventCreate(0 if timing else _DISABLE_TIMING))
        event = Event(self, device, handle, timing)
        # The handle is kept for the next event, not destroyed: no driver call happens in a finaliser.
        weakref.finalize(event, spare.append, handle).atexit = False
        return event

    def event_record(self, event: Event, stream: Stream) -> None:
        handle, other = self._stream(stream), self._event(event)
        # One recording at a time on a stream, so that the sequence is the stream's own order.
        with stream.recording, self._on(stream.device):
            _check("event_record", cu.cuEventRecord(other, handle))
            event.recorded_on(stream)

    def event_query(self, event: Event) -> bool:
        handle = self._event(event)
        if event.sequence == 0:  # never recorded, whatever its handle was used for before
            return True
        with self._on(event.device):
            return _is_done("event_query", cu.cuEventQuery(handle))

    def event_synchronize(self, event: Event) -> None:
        handle = self._event(event)
        if event.sequence == 0:
            return
        with self._on(event.device):
            _check("event_synchronize", cu.cuEventSynchronize(handle))

    def event_elapsed(self, start: Event, end: Event) -> float:
        first, last = self._event(start), self._event(end)
        if start.sequence == 0 or end.sequence == 0:
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event_elapsed", "an event was never recorded")
        with self._on(end.device):
            return float(_check("event_elapsed", cu.cuEventElapsedTime(first, last))) / 1e3

    # -- copies -------------------------------------------------------------------------------------
    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        if nbytes == 0:
            return
        _require_size("copy", nbytes)
        handle = self._stream(stream)
        with self._on(stream.device):
            result = cu.cuMemcpyAsync(dst, src, nbytes, handle)
            if result[0] != _SUCCESS:
                _check("copy", result, f"{nbytes} bytes from {src:#x} to {dst:#x}")

    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        if nbytes == 0:
            return
        _require_size("fill", nbytes)
        if not 0 <= value <= 255:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "fill", f"{value} is not a byte")
        handle = self._stream(stream)
        with self._on(stream.device):
            _check("fill", cu.cuMemsetD8Async(ptr, value, nbytes, handle), f"{nbytes} bytes at {ptr:#x}")

    # -- peers --------------------------------------------------------------------------------------
    def can_access_peer(self, device: int, peer: int) -> bool:
        self._known(device)
        self._known(peer)
        return device != peer and bool(_check("can_access_peer", cu.cuDeviceCanAccessPeer(device, peer)))

    def enable_peer_access(self, device: int, peer: int) -> None:
        with self._on(device):
            _check("enable_peer_access", cu.cuCtxEnablePeerAccess(self._context(peer), 0), f"{device} to {peer}")

    def disable_peer_access(self, device: int, peer: int) -> None:
        with self._on(device):
            _check("disable_peer_access", cu.cuCtxDisablePeerAccess(self._context(peer)), f"{device} to {peer}")

    # -- end ----------------------------------------------------------------------------------------
    def close(self) -> None:
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            for (device, _), handles in list(self._events.items()):
                with self._on(device):
                    while handles:
                        _check("destroy event", cu.cuEventDestroy(handles.pop()))
            for device in list(self._contexts):
                _check("release context", cu.cuDevicePrimaryCtxRelease(device))
            self._contexts.clear()
            self._context_ids.clear()

    # -- inside -------------------------------------------------------------------------------------
    def _known(self, device: int) -> None:
        if not 0 <= device < self._count:
            raise DriverError("CUDA_ERROR_INVALID_DEVICE", "device", f"{device} of {self._count} devices")
        if self._closed:
            raise DriverError("CUDA_ERROR_DEINITIALIZED", "device", "this driver object was closed")

    def _stream(self, stream: Stream) -> Any:
        handle = require_stream(stream).handle
        if stream.driver is not self or handle is _CLOSED:
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "stream", "closed, or of another driver")
        return handle

    def _event(self, event: Event) -> Any:
        if event.driver is not self:
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event", "of another driver")
        self._known(event.device)
        return event.handle

    def _context(self, device: int) -> Any:
        with self._lock:
            self._known(device)
            context = self._contexts.get(device)
            if context is None:
                context = _check("primary context", cu.cuDevicePrimaryCtxRetain(device))
                self._context_ids[device] = int(context)
                self._contexts[device] = context
            return context

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Make the device's context current for a call, unless it is already."""
        context = self._contexts.get(device) or self._context(device)
        error, current = cu.cuCtxGetCurrent()
        if error == _SUCCESS and int(current) == self._context_ids[device]:
            yield
            return
        _check("push context", cu.cuCtxPushCurrent(context))
        try:
            yield
        finally:
            cu.cuCtxPopCurrent()

    @contextmanager
    def _on_any(self) -> Iterator[None]:
        """Make some context current for a call that concerns all of them; none on a device nobody uses."""
        if not self._contexts and not self._closed:
            error, current = cu.cuCtxGetCurrent()
            if error == _SUCCESS and int(current):
                yield
                return
        with self._on(next(iter(self._contexts), 0)):
            yield


_process_driver: CudaDriver | None = None
_process_lock = threading.Lock()


def cuda_driver() -> CudaDriver:
    """The driver object that everything in this process shares."""
    global _process_driver
    with _process_lock:
        if _process_driver is None or _process_driver._closed or _process_driver._pid != os.getpid():
            _process_driver = CudaDriver()
        return _process_driver


_PCI = (("PCI_DOMAIN_ID", 8), ("PCI_BUS_ID", 2), ("PCI_DEVICE_ID", 2))
_CLOSED = object()
_LARGEST = 1 << 60  # beyond, the driver's own size arithmetic comes near its end
_NO_MEMORY = (cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)


def _require_size(call: str, nbytes: int) -> None:
    if nbytes < 0:
        raise DriverError("CUDA_ERROR_INVALID_VALUE", call, f"{nbytes} is negative")


def _is_done(call: str, result: tuple[Any, ...]) -> bool:
    if result[0] == _NOT_READY:
        return False
    _check(call, result)
    return True
