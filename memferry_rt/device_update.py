"""The update on the device: what the runtime asks of a kernel there, and which kernel it gets."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from memferry_allocator import Driver, HostArena, Stream

from .device_kernels import open_device_adam
from .errors import DeviceKernelError
from .native import AdamKernel, AdamOperands, AdamSettings
from .native.adam import VECTOR

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


def open_device_update(driver: Driver, device: int, kernel: AdamKernel | None) -> DeviceUpdate | None:
    """The kernel for a device, or None where there is none: then the CPU makes every update.

    Parameters
    ----------
    kernel : AdamKernel or None
        The native CPU kernel, if it is trusted; a device kernel has its bits, or is not used.
    """
    if kernel is None:
        return None
    try:
        update = open_device_adam(driver, device, kernel=kernel)
    except DeviceKernelError as error:
        warnings.warn(f"the CPU makes every update: {error}", RuntimeWarning, stacklevel=2)
        return None
    if not device_agrees(driver, device, update, kernel):
        warnings.warn(
            f"the update kernel of device {device} and the native one ({kernel.variant}) differ in the last bit: "
            "the CPU makes every update",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return update


def device_agrees(driver: Driver, device: int, update: DeviceUpdate, kernel: AdamKernel) -> bool:
    """Whether both kernels give the same bits, for fp32 and bf16 gradients over the whole range of fp32."""
    nbytes = len(_OPERANDS) * _ROOM
    arena = HostArena(driver, nbytes)
    pages = arena.array(arena.cut(nbytes))
    stream = driver.create_stream(device)
    ptr = driver.malloc(device, nbytes)
    try:
        for settings in _TRIED:
            for dtype in ("float32", "bfloat16"):
                pages[:] = start = _random_state(dtype)
                driver.copy(ptr, arena.address, nbytes, stream=stream)
                update.run(stream, update.prepare(settings, 3.0, 0.7), _operands(ptr, dtype))
                driver.copy(arena.address, ptr, nbytes, stream=stream)
                stream.synchronize()
                kernel.run(kernel.prepare(settings, 3.0, 0.7), _operands(start.ctypes.data, dtype))
                if not np.array_equal(start, pages):
                    return False
    finally:
        stream.synchronize()
        driver.free(device, ptr)
        stream.close()
        arena.close()
    return True


_COUNT = 4096 + 7  # whole vectors, and a tail that PyTorch rounds differently
_ROOM = 4 * 4352  # bytes for each operand, aligned
_OPERANDS = ("parameter", "exp_avg", "exp_avg_sq", "gradient", "weight")
_TRIED = (
    AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False),
    AdamSettings(3e-2, 0.3, 0.95, 1e-5, 0.1, decoupled=False, maximize=True),
)


def _operands(base: int, dtype: str) -> AdamOperands:
    places: dict[str, Any] = {name: base + number * _ROOM for number, name in enumerate(_OPERANDS)}
    if dtype == "float32":
        places["weight"] = 0
    return AdamOperands(**places, gradient_dtype=dtype, count=_COUNT, tail=_COUNT % VECTOR)


def _random_state(dtype: str) -> npt.NDArray[np.uint8]:
    generator = np.random.default_rng(1)
    state = np.zeros((len(_OPERANDS), _ROOM // FP32), dtype=np.float32)
    noise = generator.standard_normal((4, _COUNT), dtype=np.float32)
    spread = 10.0 ** generator.integers(-38, 8, _COUNT).astype(np.float32)
    state[0, :_COUNT], state[1, :_COUNT] = noise[0], noise[1] * np.float32(0.1)
    state[2, :_COUNT] = noise[2] ** 2
    gradient = noise[3] * spread
    if dtype == "float32":
        state[3, :_COUNT] = gradient
    else:
        state[3].view(np.uint16)[:_COUNT] = gradient.view(np.uint32) >> 16
    return state.view(np.uint8).reshape(-1)


def part_of(operands: AdamOperands, start: int, count: int) -> AdamOperands:
    """Elements `start` … ``start + count`` of an update; `start` is a whole number of vectors."""

    def state(ptr: int | None) -> int | None:
        return None if ptr is None else ptr + start * FP32

    gradient = start * ITEMSIZE[operands.gradient_dtype]
    weight = start * ITEMSIZE[operands.weight_dtype]
    return dataclasses.replace(
        operands,
        parameter=operands.parameter + start * FP32,
        exp_avg=operands.exp_avg + start * FP32,
        exp_avg_sq=operands.exp_avg_sq + start * FP32,
        gradient=operands.gradient + gradient,
        weight=operands.weight + weight if operands.weight else 0,
        out_parameter=state(operands.out_parameter),
        out_exp_avg=state(operands.out_exp_avg),
        out_exp_avg_sq=state(operands.out_exp_avg_sq),
        count=count,
        tail=operands.tail if start + count == operands.count else 0,
    )
