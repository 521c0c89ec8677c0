"""The update on the device: what the runtime asks of a kernel there, and its stand-in on the emulated device."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from memferry_allocator import Driver, Span, Stream

from .native import AdamKernel, AdamSettings

FP32 = 4
ITEMSIZE = {"float32": 4, "bfloat16": 2}


class DeviceUpdate(Protocol):
    """An Adam kernel on the device, with the bits of the one on the CPU."""

    def prepare(self, settings: AdamSettings, step: float, scale: float) -> Any:
        """What a step's calls share; see `AdamKernel.prepare`."""
        ...

    def update(
        self,
        stream: Stream,
        prepared: Any,
        *,
        parameter: int,
        gradient: int,
        gradient_dtype: str,
        exp_avg: int,
        exp_avg_sq: int,
        weight: int,
        count: int,
    ) -> None:
        """Enqueue the update of `count` elements on `stream`; the pointers are the device's, `weight` may be 0."""
        ...


class EmulatedAdam:
    """The native CPU kernel on an emulated device's memory, as a kernel launched there.

    Parameters
    ----------
    driver : Driver
        The emulated one.
    kernel : AdamKernel
    """

    def __init__(self, driver: Driver, kernel: AdamKernel) -> None:
        self._driver = driver
        self._kernel = kernel
        self.prepare = kernel.prepare

    def update(
        self,
        stream: Stream,
        prepared: Any,
        *,
        parameter: int,
        gradient: int,
        gradient_dtype: str,
        exp_avg: int,
        exp_avg_sq: int,
        weight: int,
        count: int,
    ) -> None:
        state = [Span(ptr, count * FP32) for ptr in (parameter, exp_avg, exp_avg_sq)]
        read = Span(gradient, count * ITEMSIZE[gradient_dtype])
        rounded = [Span(weight, count * ITEMSIZE["bfloat16"])] if weight else []
        with self._driver.launch(stream, reads=[*state, read], writes=[*state, *rounded], label="device Adam"):
            self._kernel.update(
                prepared,
                parameter=self._address(state[0]),
                gradient=self._address(read),
                gradient_dtype=gradient_dtype,
                exp_avg=self._address(state[1]),
                exp_avg_sq=self._address(state[2]),
                weight=self._address(rounded[0]) if weight else 0,
                count=count,
            )

    def _address(self, span: Span) -> int:
        data = self._driver.host_bytes(span.ptr, span.nbytes)
        assert data is not None, "emulated memory is host memory"
        return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)


def open_device_update(driver: Driver, device: int, kernel: AdamKernel | None) -> DeviceUpdate | None:
    """The kernel for a device, or None where there is none: then the CPU makes every update.

    Parameters
    ----------
    kernel : AdamKernel or None
        The native CPU kernel, if it is trusted; a device kernel has its bits, or is not used.
    """
    if kernel is None or driver.name != "emulated":
        return None
    return EmulatedAdam(driver, kernel)
