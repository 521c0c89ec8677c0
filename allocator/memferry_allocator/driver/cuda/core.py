"""What every part of the CUDA driver stands on: devices, their contexts, and who may still use them."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

from cuda.bindings import driver as cu

from ...errors import DeviceLostError, DriverError
from ..addresses import AddressBook
from ..api import Driver
from ..handles import Event, Stream, require_stream
from ..types import DeviceInfo, MemoryInfo
from .contexts import CURRENT, Current, Held, Pushed
from .errors import SUCCESS, check, error_of, initialise
from .library import Answers, library

CLOSED = object()
_PCI = (("PCI_DOMAIN_ID", 8), ("PCI_BUS_ID", 2), ("PCI_DEVICE_ID", 2))
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


class CudaCore(Driver):
    """Devices, life and the checks at every entry; the calls themselves are in the classes derived from it."""

    name: ClassVar[str] = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self._count = initialise()
        self._library = library()
        self._answers = Answers()
        self._lock = threading.RLock()
        self._contexts: dict[int, int] = {}
        self._lost: dict[int, str] = {}
        self._events: dict[int, list[int]] = {}  # by device: handles for the next ones
        self._timed_events: dict[int, list[int]] = {}
        self._lent: set[Any] = set()
        self._infos: dict[int, DeviceInfo] = {}
        self._addresses: AddressBook | None = None
        self._captured: dict[int, Stream] = {}
        self._copy_kernels: dict[int, int] = {}
        self._closed = False

    # -- devices ------------------------------------------------------------------------------------
    @property
    def device_count(self) -> int:
        return self._count

    def device_info(self, device: int) -> DeviceInfo:
        self._known(device)
        info = self._infos.get(device)
        if info is None:
            info = self._infos[device] = _read_info(device)
        return info

    def memory_info(self, device: int) -> MemoryInfo:
        with self._on(device):
            free, total = self._check(device, "memory info", cu.cuMemGetInfo())
            return MemoryInfo(int(free), int(total))

    def synchronize(self, device: int) -> None:
        with self._on(device):
            self._check(device, "synchronize", cu.cuCtxSynchronize())

    def several_calls(self, device: int) -> Held:
        return Held(self, device)

    def _busy(self) -> list[int]:
        self._known(0)
        return list(self._contexts)  # no context is made for it on a device that has no work

    # -- end ----------------------------------------------------------------------------------------
    def close(self) -> None:
        if self._forked:
            return
        with self._lock:
            if self._closed:
                return
            for device, handles in (*self._events.items(), *self._timed_events.items()):
                with contextlib.suppress(DeviceLostError), self._on(device):
                    while handles:
                        self._check(device, "destroy event", cu.cuEventDestroy(handles.pop()))
            self._closed = True
            for device in list(self._contexts):
                with contextlib.suppress(DeviceLostError):  # of a context that is gone nothing is left to release
                    check("release context", cu.cuDevicePrimaryCtxRelease(device))
            self._contexts.clear()

    # -- inside -------------------------------------------------------------------------------------
    def _known(self, device: int) -> None:
        if self._forked:
            self.require_usable()
        if not 0 <= device < self._count:
            raise DriverError("CUDA_ERROR_INVALID_DEVICE", "device", f"{device} of {self._count} devices")
        if self._closed:
            raise _closed("device")

    def _stream(self, stream: Stream) -> int:
        if self._forked:
            self.require_usable()
        if stream.__class__ is not Stream:  # asked thousands of times a step: what is right costs comparisons
            require_stream(stream)
        handle = stream.handle
        if stream.driver is not self or handle is CLOSED:
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "stream", "closed, or of another driver")
        if self._closed:
            raise _closed("stream")
        return handle  # type: ignore[no-any-return]  # an int, but for CLOSED

    def _event(self, event: Event) -> int:
        if event.driver is not self:
            self.require_usable()
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event", "of another driver")
        if self._forked or self._closed:
            self._known(event.device)
        return event.handle  # type: ignore[no-any-return]

    def _context(self, device: int) -> int:
        self._known(device)
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                self._known(device)
                context = int(check("primary context", cu.cuDevicePrimaryCtxRetain(device)))
                self._contexts[device] = context
            return context

    def _on(self, device: int) -> Current | Pushed:
        """Make the device's context current for a call, unless it is already."""
        if self._forked:
            self.require_usable()
        if device in self._lost:
            raise DeviceLostError(self._lost[device], "device", f"cuda:{device} was lost before")
        if self._answers.held == device:
            return CURRENT
        context = self._contexts.get(device) or self._context(device)
        current = self._answers.context
        if self._library.cuCtxGetCurrent(current) == SUCCESS and current[0] == context:
            return CURRENT
        return Pushed(self, device, context)

    def _answer(self, device: int, call: Callable[..., int], *arguments: Any) -> int:
        """What a call of the library answers on a device; a `with` block takes as long as such a call."""
        context = self._on(device)
        if context is CURRENT:
            return call(*arguments)
        with context:
            return call(*arguments)

    def _some(self) -> int:
        """A device for a call that concerns all of them; one that is in use already, if any is."""
        return next((device for device in self._contexts if device not in self._lost), 0)

    def _on_any(self) -> Current | Pushed:
        """Make some context current for a call that concerns all of them; none on a device nobody uses."""
        if self._forked:
            self.require_usable()
        if not self._contexts and not self._closed:
            current = self._answers.context
            if self._library.cuCtxGetCurrent(current) == SUCCESS and current[0]:
                return CURRENT
        return self._on(self._some())

    def _check(self, device: int, call: str, result: tuple[Any, ...], detail: str = "") -> Any:
        """The value of a call through the bindings; an answer that ends the device is remembered."""
        if int(result[0]) != SUCCESS:
            raise self._error(device, int(result[0]), call, detail)
        return result[1] if len(result) == 2 else result[1:]

    def _error(self, device: int, code: int, call: str, detail: str = "") -> DriverError:
        error = error_of(code, call, detail)
        if isinstance(error, DeviceLostError):
            self._lost.setdefault(device, error.code)
        return error


def _closed(call: str) -> DriverError:
    return DriverError("CUDA_ERROR_DEINITIALIZED", call, "this driver object was closed")


def _read_info(device: int) -> DeviceInfo:
    """Read without a context: looking at a device must not take memory on it."""
    handle = check("device", cu.cuDeviceGet(device))

    def attribute(key: str) -> int:
        code = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{key}")
        return int(check(key, cu.cuDeviceGetAttribute(code, handle)))

    name = check("device name", cu.cuDeviceGetName(128, handle))
    identity = check("device uuid", cu.cuDeviceGetUuid(handle))
    numa = attribute("HOST_NUMA_ID")
    pci = ":".join(f"{attribute(key):0{width}x}" for key, width in _PCI)
    return DeviceInfo(
        ordinal=device,
        name=name.split(b"\0", 1)[0].decode(),
        uuid=f"GPU-{uuid.UUID(bytes=bytes(identity.bytes))}",
        capacity=int(check("total memory", cu.cuDeviceTotalMem(handle))),
        pci_address=f"{pci}.0",
        numa_node=numa if numa >= 0 else None,
        compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        capabilities={key: attribute(key) for key in _CAPABILITIES},
    )
