"""The update on the device: what the runtime asks of a kernel there, and its stand-in on the emulated device."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from memferry_allocator import Driver, Span, Stream

from .native import AdamKernel, AdamOperands, AdamSettings

FP32 = 4
HALF = 2
ITEMSIZE = {"float32": FP32, "bfloat16": HALF, "float16": HALF}


class DeviceUpdate(Protocol):
    """An Adam kernel on the device, with the bits of the one on the CPU."""

    def prepare(self, settings: AdamSettings, step: float, scale: float) -> Any:
        """What a step's calls share; see `AdamKernel.prepare`."""
        ...

    def run(self, stream: Stream, prepared: Any, operands: AdamOperands) -> None:
        """Enqueue an update on `stream`; the pointers are the device's."""
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

    def run(self, stream: Stream, prepared: Any, operands: AdamOperands) -> None:
        spans = {name: Span(getattr(operands, name), operands.count * FP32) for name in STATE}
        spans["gradient"] = Span(operands.gradient, operands.count * ITEMSIZE[operands.gradient_dtype])
        reads, writes = list(spans.values()), [spans[name] for name in STATE]
        if operands.weight:
            spans["weight"] = Span(operands.weight, operands.count * ITEMSIZE[operands.weight_dtype])
            writes.append(spans["weight"])
        with self._driver.launch(stream, reads=reads, writes=writes, label="device Adam"):
            real: dict[str, Any] = {name: self._address(span) for name, span in spans.items()}
            self._kernel.run(prepared, dataclasses.replace(operands, **real))

    def _address(self, span: Span) -> int:
        data = self._driver.host_bytes(span.ptr, span.nbytes)
        assert data is not None, "emulated memory is host memory"
        return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)


STATE = ("parameter", "exp_avg", "exp_avg_sq")


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


def part_of(operands: AdamOperands, start: int, count: int) -> AdamOperands:
    """Elements `start` … ``start + count`` of an update in place; `start` is a whole number of vectors."""
    gradient = start * ITEMSIZE[operands.gradient_dtype]
    weight = start * ITEMSIZE[operands.weight_dtype]
    return dataclasses.replace(
        operands,
        parameter=operands.parameter + start * FP32,
        exp_avg=operands.exp_avg + start * FP32,
        exp_avg_sq=operands.exp_avg_sq + start * FP32,
        gradient=operands.gradient + gradient,
        weight=operands.weight + weight if operands.weight else 0,
        count=count,
        tail=operands.tail if start + count == operands.count else 0,
    )
