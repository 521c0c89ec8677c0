"""Host memory that the CUDA driver allocates itself, to compare registered memory with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from memferry_allocator import Driver, DriverError

from .errors import NotRunError


@contextmanager
def pinned_memory(driver: Driver, device: int, nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
    """`nbytes` bytes from ``cuMemHostAlloc``, until the block ends.

    Raises
    ------
    NotRunError
        The driver is not CUDA's.
    """
    if driver.name != "cuda":
        raise NotRunError(f"the {driver.name} driver allocates no host memory")
    from cuda.bindings import driver as cu

    def check(call: str, result: tuple[Any, ...]) -> Any:
        if result[0] != cu.CUresult.CUDA_SUCCESS:
            raise DriverError(result[0].name, call)
        return result[1] if len(result) > 1 else None

    context = check("primary context", cu.cuDevicePrimaryCtxRetain(check("device", cu.cuDeviceGet(device))))
    try:
        check("push context", cu.cuCtxPushCurrent(context))
        try:
            address = int(check("allocate pinned memory", cu.cuMemHostAlloc(nbytes, cu.CU_MEMHOSTALLOC_PORTABLE)))
        finally:
            cu.cuCtxPopCurrent()
        try:
            yield np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        finally:
            driver.synchronize(device)
            check("push context", cu.cuCtxPushCurrent(context))
            cu.cuMemFreeHost(address)
            cu.cuCtxPopCurrent()
    finally:
        cu.cuDevicePrimaryCtxRelease(cu.cuDeviceGet(device)[1])
