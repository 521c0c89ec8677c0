"""Memory of the emulated device as the host sees it."""

from __future__ import annotations

import numpy as np

from memferry_allocator import Driver

from ..errors import DeviceKernelError


def require_emulated(driver: Driver) -> None:
    """Refuse a driver whose devices' memory is not the host's to compute in.

    Raises
    ------
    DeviceKernelError
    """
    if driver.name != "emulated":
        raise DeviceKernelError(
            f"there are no kernels for devices of the {driver.name} driver: they are written for cuda, and "
            "emulated on the emulated device"
        )


def on_the_host(driver: Driver, ptr: int, nbytes: int) -> int:
    """The host address behind a pointer of the emulated device; to be used within a `Driver.launch`."""
    data = driver.host_bytes(ptr, nbytes)
    if data is None:
        raise ValueError(f"{nbytes} bytes at {ptr:#x} of {driver.name!r} are out of the host's reach")
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
