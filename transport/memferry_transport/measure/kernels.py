"""The measuring kernels on a device, compiled when they are first needed."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from memferry_allocator import Driver, DriverError, Span, Stream

from .errors import NotRunError

SOURCE = Path(__file__).with_name("kernels.cu")
THREADS = 1024  # of a block
UNIT = 16  # bytes that a thread moves at a time


class Kernels:
    """The kernels of one device; `open_kernels` gives them.

    Attributes
    ----------
    processors : int
        The device's multiprocessors.
    """

    def __init__(self, device: int, capability: tuple[int, int]) -> None:
        from cuda.bindings import driver as cu  # only needed where a device is used

        from memferry_allocator.driver.cuda.compile import compile_kernels

        self._cu = cu
        handle = self._check("device", cu.cuDeviceGet(device))
        self._context = self._check("primary context", cu.cuDevicePrimaryCtxRetain(handle))
        count = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.processors = int(self._check("multiprocessors", cu.cuDeviceGetAttribute(count, handle)))
        code = compile_kernels(SOURCE, capability)
        library = self._check("load kernels", cu.cuLibraryLoadData(code, None, None, 0, None, None, 0))
        self._functions = {
            name: cu.CUfunction(int(self._check(name, cu.cuLibraryGetKernel(library, name.encode()))))
            for name in ("copy_units", "chase")
        }

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream, blocks: int | None = None) -> None:
        """Enqueue a copy between pointers that the device reaches.

        Parameters
        ----------
        nbytes : int
            A multiple of 16.
        blocks : int, optional
            Thread blocks; by default as many as the device has multiprocessors, twice.
        """
        with stream.driver.launch(
            stream, reads=[Span(src, nbytes)], writes=[Span(dst, nbytes)], label="copy kernel"
        ):
            self._launch("copy_units", blocks or 2 * self.processors, THREADS, (dst, src, nbytes // UNIT), stream)

    def chase(self, chain: Span, hops: int, result: int, *, stream: Stream) -> None:
        """Enqueue following `hops` pointers from the start of `chain`; the last one is written to `result`."""
        with stream.driver.launch(stream, reads=[chain], writes=[Span(result, 8)], label="pointer chase"):
            self._launch("chase", 1, 1, (chain.ptr, hops, result), stream)

    def _launch(self, name: str, blocks: int, threads: int, values: tuple[int, ...], stream: Stream) -> None:
        cu = self._cu
        arguments = [ctypes.c_size_t(value) for value in values]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(argument) for argument in arguments))
        self._check("push context", cu.cuCtxPushCurrent(self._context))
        try:
            shape = (blocks, 1, 1, threads, 1, 1, 0)
            result = cu.cuLaunchKernel(self._functions[name], *shape, stream.handle, ctypes.addressof(pointers), 0)
        finally:
            cu.cuCtxPopCurrent()
        self._check(name, result)

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        if result[0] != self._cu.CUresult.CUDA_SUCCESS:
            raise DriverError(result[0].name, f"measuring kernels: {call}")
        return result[1] if len(result) == 2 else result[1:]


def open_kernels(driver: Driver, device: int) -> Kernels:
    """The kernels of a device, compiled and loaded once in a process.

    Raises
    ------
    NotRunError, UnsupportedError
        The device runs no CUDA kernels, or they cannot be compiled here.
    """
    capability = driver.device_info(device).compute_capability
    if driver.name != "cuda" or capability is None:
        raise NotRunError(f"the {driver.name} device runs no kernels")
    return _opened(device, capability)


@functools.cache
def _opened(device: int, capability: tuple[int, int]) -> Kernels:
    return Kernels(device, capability)
