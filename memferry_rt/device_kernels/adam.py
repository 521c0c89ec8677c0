"""Adam on the device, with the bits of the CPU's kernel: on a real device, and on the emulated one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from memferry_allocator import Driver, Span, Stream

from ..errors import DeviceKernelError
from ..native import AdamCoefficients, AdamKernel, AdamOperands, AdamSettings, adam_coefficients, load_adam
from ..native.module import ITEMSIZE
from .emulated import on_the_host, require_emulated
from .layout import GROUP, aligned_groups, coefficients_structure, operands_structure

MAPPED_BLOCKS = 32  # enough to keep the link to host memory busy; the other multiprocessors stay free
FP32 = 4


class DeviceAdam(ABC):
    """The update kernel of one device; `open_device_adam` gives the one that fits.

    Every pointer is one that kernels of the device can use: of device memory, or of mapped host memory.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @abstractmethod
    def prepare(self, settings: AdamSettings, step: float, scale: float) -> Any:
        """What a step's calls share; see `adam_coefficients`."""

    def update(self, stream: Stream, prepared: Any, *, blocks: int | None = None, **operands: Any) -> None:
        """Enqueue the update of some elements on `stream`.

        Parameters
        ----------
        prepared
            Of `prepare`.
        blocks : int, optional
            At most so many thread blocks: `MAPPED_BLOCKS` suffice for state in host memory; by default as many
            as fill the device.
        **operands
            Of `AdamOperands`.
        """
        self.run(stream, prepared, AdamOperands(**operands), blocks=blocks)

    def run(self, stream: Stream, prepared: Any, operands: AdamOperands, *, blocks: int | None = None) -> None:
        """The same, with the operands made before."""
        if operands.count:
            with self._driver.launch(
                stream, reads=operands_read(operands), writes=operands_written(operands), label="device Adam"
            ):
                self._enqueue(stream, prepared, operands, blocks)

    @abstractmethod
    def _enqueue(self, stream: Stream, prepared: Any, operands: AdamOperands, blocks: int | None) -> None: ...


class CudaAdam(DeviceAdam):
    """The kernel of an NVIDIA device, compiled with NVRTC once in a process.

    Raises
    ------
    DeviceKernelError
        It cannot be compiled here.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        super().__init__(driver)
        from .module import open_module  # the bindings are only needed where a device is used

        self._module = open_module(driver, device)

    def prepare(self, settings: AdamSettings, step: float, scale: float) -> AdamCoefficients:
        return adam_coefficients(settings, step, scale)

    def _enqueue(self, stream: Stream, prepared: Any, operands: AdamOperands, blocks: int | None) -> None:
        head, groups = aligned_groups(_arrays(operands), operands.count - operands.tail)
        self._module.launch(
            "memferry_adam_update",
            stream,
            threads=max(groups, operands.count - groups * GROUP),
            blocks=blocks,
            arguments=[
                operands_structure(operands),
                coefficients_structure(prepared),
                *self._module.sizes(head, groups),
            ],
        )


class EmulatedAdam(DeviceAdam):
    """The CPU's kernel on the emulated device's memory, in the order of the stream."""

    def __init__(self, driver: Driver, kernel: AdamKernel) -> None:
        super().__init__(driver)
        self._kernel = kernel

    def prepare(self, settings: AdamSettings, step: float, scale: float) -> Any:
        return self._kernel.prepare(settings, step, scale)

    def _enqueue(self, stream: Stream, prepared: Any, operands: AdamOperands, blocks: int | None) -> None:
        def state(ptr: int | None) -> int | None:
            return None if ptr is None else on_the_host(self._driver, ptr, operands.count * FP32)

        def half(ptr: int, dtype: str) -> int:
            return on_the_host(self._driver, ptr, operands.count * ITEMSIZE[dtype])

        self._kernel.update(
            prepared,
            parameter=state(operands.parameter),
            exp_avg=state(operands.exp_avg),
            exp_avg_sq=state(operands.exp_avg_sq),
            out_parameter=state(operands.out_parameter),
            out_exp_avg=state(operands.out_exp_avg),
            out_exp_avg_sq=state(operands.out_exp_avg_sq),
            gradient=half(operands.gradient, operands.gradient_dtype),
            gradient_dtype=operands.gradient_dtype,
            weight=half(operands.weight, operands.weight_dtype) if operands.weight else 0,
            weight_dtype=operands.weight_dtype,
            count=operands.count,
            tail=operands.tail,
        )


def open_device_adam(driver: Driver, device: int, *, kernel: AdamKernel | None = None) -> DeviceAdam:
    """The update kernel of a device.

    Parameters
    ----------
    kernel : AdamKernel, optional
        What runs on the emulated device; by default the fastest native kernel.

    Raises
    ------
    DeviceKernelError
        There is none on this machine; the CPU keeps the work.
    """
    if driver.name == "cuda":
        return CudaAdam(driver, device)
    require_emulated(driver)
    kernel = kernel or load_adam()
    if kernel is None:
        raise DeviceKernelError(
            "the emulated device computes with the native kernels, and they are not installed; "
            "install the package again with gcc"
        )
    return EmulatedAdam(driver, kernel)


def operands_read(operands: AdamOperands) -> list[Span]:
    """What an update reads."""
    state = [Span(ptr, operands.count * FP32) for ptr in operands.native[:3]]
    return [*state, Span(operands.gradient, operands.count * ITEMSIZE[operands.gradient_dtype])]


def operands_written(operands: AdamOperands) -> list[Span]:
    """What an update writes."""
    state = [Span(ptr, operands.count * FP32) for ptr in operands.native[3:6]]
    weight = Span(operands.weight, operands.count * ITEMSIZE[operands.weight_dtype])
    return [*state, weight] if operands.weight else state


def _arrays(operands: AdamOperands) -> list[tuple[int, int]]:
    return [
        (span.ptr, span.nbytes // operands.count) for span in operands_read(operands) + operands_written(operands)
    ]
