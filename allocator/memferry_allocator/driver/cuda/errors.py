"""From the driver's answers to typed errors."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from cuda.bindings import driver as cu

from ...errors import DeviceLostError, DriverError, DriverNotFoundError
from ..api import forked
from .library import LIBRARY

SUCCESS, NOT_READY, OUT_OF_MEMORY = 0, 600, 2

# After these nothing works on the device any more until its context is made anew.
_FATAL = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "CONTEXT_IS_DESTROYED",
        "CONTAINED",
        "ECC_UNCORRECTABLE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_CONTEXT",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "NVLINK_UNCORRECTABLE",
        "TENSOR_MEMORY_LEAK",
        "EXTERNAL_DEVICE",
    )
)


def error_of(code: int, call: str, detail: str = "") -> DriverError:
    """The typed error of an answer."""
    try:
        name = cu.CUresult(code).name
    except ValueError:  # a driver newer than the bindings
        name = f"CUDA_ERROR_{code}"
    return (DeviceLostError if name in _FATAL else DriverError)(name, call, detail)


def check(call: str, result: tuple[Any, ...], detail: str = "") -> Any:
    """The value of a call through the bindings, or the typed error of its answer."""
    code = int(result[0])
    if code != SUCCESS:
        raise error_of(code, call, detail)
    return result[1] if len(result) == 2 else result[1:]


def require_size(call: str, nbytes: int) -> None:
    if nbytes < 0:
        raise DriverError("CUDA_ERROR_INVALID_VALUE", call, f"{nbytes} is negative")


def initialise() -> int:
    """Initialise the driver and count its devices.

    Raises
    ------
    ForkedError
        The parent of this process did so before it forked.
    """
    try:
        result = cu.cuInit(0)
    except RuntimeError as error:  # the bindings' answer where they cannot load a driver library
        raise _not_loaded(error) from None
    if result[0] == cu.CUresult.CUDA_ERROR_NO_DEVICE:
        raise DriverNotFoundError("CUDA_ERROR_NO_DEVICE", "init")
    if result[0] == cu.CUresult.CUDA_ERROR_NOT_INITIALIZED:
        raise forked("cuda")
    check("init", result)
    count = int(check("device count", cu.cuDeviceGetCount()))
    if count == 0:
        raise DriverNotFoundError("CUDA_ERROR_NO_DEVICE", "device count")
    return count


def _not_loaded(error: Exception) -> DriverError:
    """Tell a machine without a driver from one whose driver is broken."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as reason:
        absent = str(reason).startswith(f"{LIBRARY}:") and "No such file" in str(reason)  # not one it needs
        if absent and not os.path.exists("/dev/nvidiactl"):
            return DriverNotFoundError("CUDA_ERROR_NO_DEVICE", "init", "this machine has no NVIDIA driver")
        error = reason
    return DriverError(
        "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", "init", f"the driver library does not load: {error}"
    )
