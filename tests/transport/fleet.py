"""A machine with several devices, an engine on each, and what its ways are said to cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from memferry_allocator import DeviceLostError, Direction, Driver, EmulatedDriver, EmulatedOptions, Span, Stream
from memferry_allocator.driver import LinkModel
from memferry_transport import Calibration, LinearCost, Measured, Path, TransferEngine, TransferOptions

from ..allocator.machine import Bytes, Machine, address, pattern

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
FAST = LinkModel(0.0, 1e18)
RATE = 1000.0  # bytes per second of a host link of the slow machines below


def calibrated(
    devices: int,
    rates: Mapping[int, float] | None = None,
    *,
    slice_bytes: int = 100,
    direct: float = RATE,
    kernels: Mapping[int, LinearCost] | None = None,
) -> Calibration:
    """Ways of all devices over all others: `rates` by helper, `direct` otherwise; nothing takes time to start.

    `kernels` is by helper, too; the others have none.
    """
    ways = {}
    for direction in Direction:
        for device in range(devices):
            ways[Path(device), direction] = Measured(LinearCost(0.0, direct))
            for helper in set(range(devices)) - {device}:
                cost = LinearCost(0.0, (rates or {}).get(helper, direct))
                ways[Path(device, helper), direction] = Measured(cost)
                if kernels is not None and helper in kernels:
                    ways[Path(device, helper, "kernel"), direction] = Measured(kernels[helper])
    return Calibration("test", "emulated", "2020-01-01T00:00:00Z", ways, slice_bytes)


def slow_links(devices: int = 2, **options: Any) -> EmulatedDriver:
    """Host links of a thousand bytes a second; everything else takes no time."""
    link = LinkModel(0.0, RATE)
    settings: dict[str, Any] = {"eagerness": 0.0, "host_to_device": link, "device_to_host": link}
    settings.update(device_count=devices, peer=FAST, on_device=FAST, **options)
    return EmulatedDriver(EmulatedOptions(**settings))


class Crying(EmulatedDriver):
    """Raises once, instead of a chosen copy on a device, though nothing is the matter with it."""

    error: Exception = DeviceLostError("CUDA_ERROR_CONTEXT_IS_DESTROYED", "copy")
    on, left = 1, 0

    def cry(self, after: int, error: Exception | None = None, *, on: int = 1) -> None:
        self.left, self.on, self.error = after, on, error or self.error

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        if stream.device == self.on and self.left:
            self.left -= 1
            if not self.left:
                raise self.error
        super().copy(dst, src, nbytes, stream=stream)


class Losing(EmulatedDriver):
    """Loses device 1 once some more copies were submitted, on whatever device."""

    after = 0

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        super().copy(dst, src, nbytes, stream=stream)
        if self.after:
            self.after -= 1
            if not self.after:
                self.lose(1)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """A driver, memory at both ends, and an engine on device 0."""

    def __init__(
        self,
        driver: Driver,
        nbytes: int = 4000,
        *,
        calibration: Calibration | None = None,
        device: int = 0,
        clock: Callable[[], float] | None = None,
        **options: Any,
    ) -> None:
        self.driver = driver
        self.nbytes = nbytes
        self.machine = Machine(driver)
        self.clock = clock or Clock()
        self.engine = TransferEngine(
            driver,
            device,
            options=TransferOptions(**{"slice_bytes": 100, **options}),
            calibration=calibration or calibrated(driver.device_count),
            clock=self.clock,
        )
        self.home, self.ptr = self.machine.pinned(nbytes), self.machine.device(nbytes, device)
        self.stream: Stream = self.machine.stream(device)
        self.home[:] = pattern(nbytes)
        self.machine.write(self.ptr, pattern(nbytes, 1), device=device)
        driver.synchronize(device)

    @property
    def host(self) -> Span:
        return Span(address(self.home), self.nbytes)

    @property
    def device(self) -> Span:
        return Span(self.ptr, self.nbytes)

    def ends(self, direction: Direction) -> tuple[Span, Span]:
        return (self.device, self.host) if direction is IN else (self.host, self.device)

    def on_device(self) -> Bytes:
        return self.machine.read(self.ptr, self.nbytes, device=self.engine.device)

    def arrived(self, direction: Direction) -> bool:
        """Whether what was at the other end is at this one."""
        if direction is IN:
            return bool(np.array_equal(self.on_device(), pattern(self.nbytes)))
        with self.driver.host_access(reads=[self.host]):
            return bool(np.array_equal(self.home, pattern(self.nbytes, 1)))

    def close(self) -> None:
        self.engine.close()
        self.machine.close()
