"""What else device kernels do with gradients: sums of squares for the norm, accumulation, change of dtype."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod

import numpy as np

from memferry_allocator import Driver, Span, Stream

from ..errors import DeviceKernelError
from ..native import GradientKernels, load_gradient_kernels
from ..native.gradients import NORM_BLOCK
from ..native.module import DTYPES, ITEMSIZE
from .emulated import on_the_host, require_emulated
from .layout import GROUP, aligned_groups

FP64 = 8
NORM_THREADS = 8  # of the device, for one block of the norm


def norm_levels(count: int) -> list[int]:
    """How many sums each pass of the norm leaves, down to one."""
    levels = [max(1, -(-count // NORM_BLOCK))]
    while levels[-1] > 1:
        levels.append(-(-levels[-1] // NORM_BLOCK))
    return levels


class DeviceGradients(ABC):
    """Kernels of one device; pointers are of device memory or of mapped host memory.

    dtypes are ``"float32"``, ``"bfloat16"`` and ``"float16"``.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @staticmethod
    def norm_scratch(count: int) -> int:
        """Bytes that `square_sum` needs beside `count` elements."""
        return sum(norm_levels(count)) * FP64

    def square_sum(self, stream: Stream, values: int, dtype: str, count: int, scratch: int) -> int:
        """Enqueue the fp64 sum of squares, with the bits that the CPU's kernel gives.

        Parameters
        ----------
        count : int
            At least 1.
        scratch : int
            `norm_scratch` bytes, aligned to 8.

        Returns
        -------
        int
            Where in `scratch` the sum will be, a double.
        """
        levels = norm_levels(count)
        result = scratch + sum(levels[:-1]) * FP64
        with self._driver.launch(
            stream,
            reads=[Span(values, count * ITEMSIZE[dtype])],
            writes=[Span(scratch, self.norm_scratch(count))],
            label="sum of squares",
        ):
            self._square_sum(stream, values, dtype, count, scratch, levels)
        return result

    def add(
        self, stream: Stream, target: int, target_dtype: str, source: int, source_dtype: str, count: int
    ) -> None:
        """Enqueue ``target += source``: the sum in fp32, rounded to the target's dtype, as PyTorch adds."""
        self._combine(stream, target, target_dtype, source, source_dtype, count, True)

    def convert(
        self, stream: Stream, target: int, target_dtype: str, source: int, source_dtype: str, count: int
    ) -> None:
        """Enqueue ``target = source``, rounded to the target's dtype; they do not overlap."""
        self._combine(stream, target, target_dtype, source, source_dtype, count, False)

    def _combine(
        self, stream: Stream, target: int, target_dtype: str, source: int, source_dtype: str, count: int, add: bool
    ) -> None:
        if not count:
            return
        into, of = Span(target, count * ITEMSIZE[target_dtype]), Span(source, count * ITEMSIZE[source_dtype])
        with self._driver.launch(
            stream, reads=[of, into] if add else [of], writes=[into], label="add" if add else "convert"
        ):
            self._combined(stream, target, target_dtype, source, source_dtype, count, add)

    @abstractmethod
    def _square_sum(
        self, stream: Stream, values: int, dtype: str, count: int, scratch: int, levels: list[int]
    ) -> None: ...

    @abstractmethod
    def _combined(
        self, stream: Stream, target: int, target_dtype: str, source: int, source_dtype: str, count: int, add: bool
    ) -> None: ...


class CudaGradients(DeviceGradients):
    """The kernels of an NVIDIA device.

    Raises
    ------
    DeviceKernelError
        They cannot be compiled here.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        super().__init__(driver)
        from .module import open_module  # the bindings are only needed where a device is used

        self._module = open_module(driver, device)

    def _square_sum(
        self, stream: Stream, values: int, dtype: str, count: int, scratch: int, levels: list[int]
    ) -> None:
        kind = DTYPES[dtype]
        for sums in levels:
            self._module.launch(
                "memferry_sums",
                stream,
                threads=sums * NORM_THREADS,
                arguments=[
                    ctypes.c_size_t(values),
                    ctypes.c_int(kind),
                    ctypes.c_size_t(count),
                    ctypes.c_size_t(scratch),
                ],
            )
            values, kind, count, scratch = scratch, -1, sums, scratch + sums * FP64

    def _combined(
        self, stream: Stream, target: int, target_dtype: str, source: int, source_dtype: str, count: int, add: bool
    ) -> None:
        arrays = [(target, ITEMSIZE[target_dtype]), (source, ITEMSIZE[source_dtype])]
        head, groups = aligned_groups(arrays, count)
        self._module.launch(
            "memferry_combine",
            stream,
            threads=max(groups, count - groups * GROUP),
            arguments=[
                ctypes.c_size_t(target),
                ctypes.c_int(DTYPES[target_dtype]),
                ctypes.c_size_t(source),
                ctypes.c_int(DTYPES[source_dtype]),
                ctypes.c_size_t(count),
                ctypes.c_int(add),
                *self._module.sizes(head, groups),
            ],
        )


class EmulatedGradients(DeviceGradients):
    """The CPU's kernels on the emulated device's memory, in the order of the stream."""

    def __init__(self, driver: Driver, kernels: GradientKernels) -> None:
        super().__init__(driver)
        self._kernels = kernels

    def _square_sum(
        self, stream: Stream, values: int, dtype: str, count: int, scratch: int, levels: list[int]
    ) -> None:
        total = self._kernels.square_sum(self._host(values, dtype, count), dtype, count)
        sums = self._driver.host_bytes(scratch, sum(levels) * FP64)
        np.frombuffer(sums, dtype=np.float64)[-1] = total  # type: ignore[arg-type]

    def _combined(
        self, stream: Stream, target: int, target_dtype: str, source: int, source_dtype: str, count: int, add: bool
    ) -> None:
        into, of = self._host(target, target_dtype, count), self._host(source, source_dtype, count)
        work = self._kernels.add if add else self._kernels.convert
        work(into, target_dtype, of, source_dtype, count)

    def _host(self, ptr: int, dtype: str, count: int) -> int:
        return on_the_host(self._driver, ptr, count * ITEMSIZE[dtype])


def open_device_gradients(driver: Driver, device: int) -> DeviceGradients:
    """The kernels of a device.

    Raises
    ------
    DeviceKernelError
        There are none on this machine; the CPU, or the framework, keeps the work.
    """
    if driver.name == "cuda":
        return CudaGradients(driver, device)
    require_emulated(driver)
    kernels = load_gradient_kernels()
    if kernels is None:
        raise DeviceKernelError(
            "the emulated device computes with the native kernels, and they are not installed; "
            "install the package again with gcc"
        )
    return EmulatedGradients(driver, kernels)
