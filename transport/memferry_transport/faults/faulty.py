"""Copies that fail, arrive changed, take longer, or take their device with them: for tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from memferry_allocator import DeviceLostError, Driver, DriverError, Stream
from memferry_allocator.driver import COPY_BLOCKS, require_stream

from ..health import Edge
from .delegating import DelegatingDriver

SPOILT = 16  # bytes that a corrupted copy gets wrong, or all of a shorter one
_VALUE = 0xA5


class FaultKind(Enum):
    """What becomes of a copy."""

    FAIL = "fail"  # refused, nothing enqueued
    CORRUPT = "corrupt"  # carried out, its first bytes wrong; not into host memory that is not registered
    DELAY = "delay"  # carried out several times
    VANISH = "vanish"  # refused, and the device of its stream is lost


@dataclass(frozen=True)
class Fault:
    """A fault, and which copies it befalls.

    Attributes
    ----------
    kind : FaultKind
    first : int
        How many copies that fit are left alone before.
    count : int, optional
        How many it befalls then; None: all.
    edge : Edge, optional
        Only copies from and to there.
    on : int, optional
        Only copies on streams of this device.
    kernel : bool, optional
        Only copies by a kernel, or only others.
    times : int
        How often a delayed copy is carried out.
    """

    kind: FaultKind
    first: int = 0
    count: int | None = 1
    edge: Edge | None = None
    on: int | None = None
    kernel: bool | None = None
    times: int = 10


class FaultyDriver(DelegatingDriver):
    """A driver with faults in its copies.  Thread-safe.

    Parameters
    ----------
    driver : Driver
    plan : sequence of Fault
        Of those that befall a copy the first counts.
    """

    def __init__(self, driver: Driver, plan: Sequence[Fault] = ()) -> None:
        super().__init__(driver)
        self._plan: tuple[Fault, ...] = ()
        self._seen: list[int] = []
        self._vanished: set[int] = set()
        self._lock_plan = threading.Lock()
        self.arm(*plan)

    def arm(self, *plan: Fault) -> None:
        """Take another plan from now on, its counts at zero."""
        with self._lock_plan:
            self._plan, self._seen = plan, [0] * len(plan)

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        def carry() -> None:
            self.driver.copy(dst, src, nbytes, stream=stream)

        def spoil() -> None:
            home = self.driver.device_of(dst)
            ptr = dst if home is not None else self.driver.host_device_pointer(dst, stream.device)
            self._spoil(ptr, min(nbytes, SPOILT), stream)

        self._befall(dst, src, nbytes, stream, carry, spoil)

    def kernel_copy(self, dst: int, src: int, nbytes: int, *, stream: Stream, blocks: int = COPY_BLOCKS) -> None:
        def carry() -> None:
            self.driver.kernel_copy(dst, src, nbytes, stream=stream, blocks=blocks)

        self._befall(
            dst, src, nbytes, stream, carry, lambda: self._spoil(dst, min(nbytes, SPOILT), stream), kernel=True
        )

    def _befall(
        self,
        dst: int,
        src: int,
        nbytes: int,
        stream: Stream,
        carry: Callable[[], None],
        spoil: Callable[[], None],
        *,
        kernel: bool = False,
    ) -> None:
        """Carry a copy out, or what is planned for it instead."""
        fault = self._fault(dst, src, require_stream(stream).device, kernel)
        self._require_present(stream.device)
        for device in (self.driver.device_of(ptr) for ptr in (dst, src)) if self._vanished else ():
            self._require_present(device)
        if fault is None:
            carry()
        elif fault.kind is FaultKind.FAIL:
            raise DriverError("CUDA_ERROR_UNKNOWN", "copy", f"a fault in {nbytes} bytes from {src:#x} to {dst:#x}")
        elif fault.kind is FaultKind.VANISH:
            self.vanish(stream.device)
            self._require_present(stream.device)
        else:
            for _ in range(fault.times if fault.kind is FaultKind.DELAY else 1):
                carry()
            if fault.kind is FaultKind.CORRUPT:
                spoil()

    def malloc(self, device: int, nbytes: int) -> int:
        self._require_present(device)
        return super().malloc(device, nbytes)

    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        self._require_present(device)
        return super().create_stream(device, priority=priority)

    def free(self, device: int, ptr: int) -> None:
        self._require_present(device)
        super().free(device, ptr)

    def vanish(self, device: int) -> None:
        """Lose a device now; an emulated one in earnest."""
        self._vanished.add(device)
        lose = getattr(self.driver, "lose", None)
        if lose is not None:
            lose(device)

    def _fault(self, dst: int, src: int, device: int, kernel: bool) -> Fault | None:
        with self._lock_plan:
            found = None
            for index, fault in enumerate(self._plan):
                if fault.on not in (None, device) or fault.kernel not in (None, kernel):
                    continue
                if not self._fits(fault.edge, dst, src):
                    continue
                number = self._seen[index]
                self._seen[index] += 1
                last = None if fault.count is None else fault.first + fault.count
                if found is None and fault.first <= number and (last is None or number < last):
                    found = fault
            return found

    def _fits(self, edge: Edge | None, dst: int, src: int) -> bool:
        return edge is None or edge == Edge(self.driver.device_of(src), self.driver.device_of(dst))

    def _spoil(self, ptr: int, nbytes: int, stream: Stream) -> None:
        home = self.driver.device_of(ptr)
        if home in (None, stream.device):
            self.driver.fill(ptr, _VALUE, nbytes, stream=stream)
            return
        with contextlib.closing(self.driver.create_stream(home)) as own:  # a device fills its own memory only
            own.wait(stream.record())
            self.driver.fill(ptr, _VALUE, nbytes, stream=own)
            stream.wait(own.record())

    def _require_present(self, device: int | None) -> None:
        if device in self._vanished:
            raise DeviceLostError("CUDA_ERROR_CONTEXT_IS_DESTROYED", "device", f"device {device} has vanished")
