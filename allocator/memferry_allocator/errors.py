"""The errors of the allocator.  Every message says what was asked, what was found, what to do."""

from __future__ import annotations

from typing import Any


class MemFerryError(Exception):
    """Root of every error that the MemFerry packages raise on purpose.  All of them can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[MemFerryError], args: tuple[Any, ...], fields: dict[str, Any]) -> MemFerryError:
    error = Exception.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class AllocatorError(MemFerryError):
    """Root of the allocator's errors."""


class InvalidRequestError(AllocatorError, ValueError):
    """An argument cannot be honoured; nothing was changed."""


class ClosedError(AllocatorError):
    """A handle, view or object was used after it was closed or released."""


class RaceError(AllocatorError):
    """Two overlapping accesses, one of them a write, that nothing orders (emulated device only)."""


class UnsupportedError(AllocatorError):
    """The device or driver has not got what the call needs; nothing was changed."""


class CaptureError(AllocatorError):
    """The call may not happen while a stream is captured into a graph; the capture goes on unharmed."""


class OutOfMemory(AllocatorError, MemoryError):
    """A budget or a device ran out.

    Attributes
    ----------
    size, used, limit : int
        Bytes asked for, in use, and allowed.
    budget : str
        Which budget refused: ``"device pool"``, ``"cuda:0"``, ``"host_memory"``, ...
    """

    def __init__(self, message: str, *, size: int, used: int, limit: int, budget: str) -> None:
        super().__init__(message)
        self.size = size
        self.used = used
        self.limit = limit
        self.budget = budget


class DriverError(AllocatorError):
    """The driver refused a call.

    Attributes
    ----------
    code : str
        The driver's own name of the answer, e.g. ``"CUDA_ERROR_INVALID_VALUE"``.
    call : str
        The operation that was refused.
    """

    def __init__(self, code: str, call: str, detail: str = "") -> None:
        hint = _HINTS.get(code, "")
        parts = [f"{call}: {code}", detail, hint]
        super().__init__("; ".join(part for part in parts if part))
        self.code = code
        self.call = call


class DriverNotFoundError(DriverError):
    """No driver library, or a driver without a device: this machine has no accelerator."""


class ForkedError(DriverError):
    """A driver, or what was made with it, is used in a child of the process that opened it."""

    def __init__(self, message: str, call: str = "after fork") -> None:
        super().__init__("CUDA_ERROR_NOT_INITIALIZED", call, message)


class DeviceLostError(DriverError):
    """The device's context is gone: reset, destroyed, or broken by an earlier error.  Every handle is dead."""


class RegistrationError(DriverError):
    """Host memory could not be pinned; nothing was changed.

    Attributes
    ----------
    address, nbytes : int
        The range that was asked for.
    pinned : int
        Bytes that MemFerry had pinned through this driver already.
    memlock_limit, cgroup_limit : int or None
        What this process may lock, and what its control group may use; None without a limit.
    """

    def __init__(
        self,
        code: str,
        call: str,
        detail: str,
        *,
        address: int,
        nbytes: int,
        pinned: int,
        memlock_limit: int | None,
        cgroup_limit: int | None,
    ) -> None:
        super().__init__(code, call, detail)
        self.address = address
        self.nbytes = nbytes
        self.pinned = pinned
        self.memlock_limit = memlock_limit
        self.cgroup_limit = cgroup_limit


class DriverOutOfMemory(OutOfMemory, DriverError):
    """The driver itself had no memory left for a request."""

    def __init__(self, code: str, call: str, *, size: int, used: int, limit: int, budget: str) -> None:
        DriverError.__init__(self, code, call, f"asked for {size} bytes, {used} of {limit} in use on {budget}")
        self.size = size
        self.used = used
        self.limit = limit
        self.budget = budget


_HINTS = {
    "CUDA_ERROR_INVALID_VALUE": "a pointer, size or flag is outside what the driver knows",
    "CUDA_ERROR_NOT_INITIALIZED": "the driver is not initialised in this process; after fork() use spawn",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "a stream is being captured into a graph and the capture forbids "
    "this call; make it before or after the capture, or inside driver.beside_captures()",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "a call that it forbids has broken the capture; nothing was recorded",
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": "a capture cannot wait for work outside of it",
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": "only the thread that began a capture may end it",
    "CUDA_ERROR_CAPTURED_EVENT": "the event was recorded in a capture, which has not run",
    "CUDA_ERROR_ILLEGAL_STATE": "the stream is not in the state that this call needs",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "the device was reset; close what was made on it and open the driver anew",
    "CUDA_ERROR_DEINITIALIZED": "the driver is shutting down: close handles before the interpreter exits",
    "CUDA_ERROR_NO_DEVICE": "the driver found no device; check CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "there is no device with that number; check CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_CONTEXT": "the device's context is gone; a device reset destroys every handle",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "part of the range is registered already, perhaps by "
    "another library, or by an owner that was unmapped without unregistering",
    "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED": "no registration starts at that address",
    "CUDA_ERROR_OPERATING_SYSTEM": "an operating system call failed; check `ulimit -l` and container limits",
    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED": "peer access is on already",
    "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED": "peer access was never enabled",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "these two devices cannot reach each other",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel touched memory it must not; the context is lost",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "kernel module and driver library differ: reboot or reinstall",
    "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED": "reinstall the driver, or hide it to run without an accelerator",
    "CUDA_ERROR_NOT_READY": "the work is still under way",
    "CUDA_ERROR_INVALID_HANDLE": "the handle is closed, or belongs to another device",
}
