"""The compiled kernels on one device: loaded once in a process, launched on anybody's stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver as cu

from memferry_allocator import Driver, DriverError, Stream

from ..errors import DeviceKernelError
from .compile import compile_kernels

THREADS = 512  # of a block
RESIDENT = 4  # blocks that a multiprocessor holds at a time


class DeviceModule:
    """Kernels of one device; `open_module` gives the one of this process.

    Parameters
    ----------
    device : int
    code : bytes
        Of `compile_kernels`.

    Attributes
    ----------
    processors : int
        The device's multiprocessors.
    """

    def __init__(self, device: int, code: bytes) -> None:
        handle = _check("device", cu.cuDeviceGet(device))
        self._context = _check("primary context", cu.cuDevicePrimaryCtxRetain(handle))
        count = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.processors = int(_check("multiprocessors", cu.cuDeviceGetAttribute(count, handle)))
        self._library = _check("load kernels", cu.cuLibraryLoadData(code, None, None, 0, None, None, 0))
        self._kernels: dict[str, Any] = {}

    @staticmethod
    def sizes(*values: int) -> list[ctypes.c_size_t]:
        """Arguments of type size_t."""
        return [ctypes.c_size_t(value) for value in values]

    def launch(
        self,
        name: str,
        stream: Stream,
        *,
        threads: int,
        arguments: list[Any],
        blocks: int | None = None,
        block: int = THREADS,
    ) -> None:
        """Enqueue a kernel.

        Parameters
        ----------
        threads : int
            How many have something to do; no more blocks than they need are launched.
        arguments : list of ctypes objects
            Copied when the call returns.
        blocks : int, optional
            At most this many; by default as many as fill the device.
        block : int
            Threads of a block.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        grid = max(1, min(blocks or self.processors * RESIDENT, -(-threads // block)))
        with self._current():
            result = cu.cuLaunchKernel(
                self._kernel(name), grid, 1, 1, block, 1, 1, 0, stream.handle, ctypes.addressof(pointers), 0
            )
        _check(name, result)

    def _kernel(self, name: str) -> Any:
        kernel = self._kernels.get(name)
        if kernel is None:
            found = _check(name, cu.cuLibraryGetKernel(self._library, name.encode()))
            kernel = self._kernels[name] = cu.CUfunction(int(found))
        return kernel

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The device's context, which the default stream is one of, for a call."""
        _check("push context", cu.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            cu.cuCtxPopCurrent()


def open_module(driver: Driver, device: int) -> DeviceModule:
    """The kernels of a device, compiled and loaded when first asked for.

    Raises
    ------
    DeviceKernelError
        They cannot be compiled here.
    DriverError
        They do not load.
    """
    capability = driver.device_info(device).compute_capability
    if capability is None:
        raise DeviceKernelError(f"device {device} tells no compute capability to compile kernels for")
    return _loaded(device, capability)


@functools.cache
def _loaded(device: int, capability: tuple[int, int]) -> DeviceModule:
    return DeviceModule(device, compile_kernels(capability))


def _check(call: str, result: tuple[Any, ...]) -> Any:
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        raise DriverError(result[0].name, f"device kernels: {call}")
    return result[1] if len(result) == 2 else result[1:]
