"""A device to measure on: tensors in every memory, and the time of work by device events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from memferry_allocator import DevicePool, Direction, Driver, Event, HostArena, Span, Stream
from memferry_transport import TransferEngine

from ....panels import HostMatrix
from ..tensors import TensorFactory

WARM_UP = 3
CYCLES = 1.8e9  # of a device in a second, about: how long it is held back
LEAST_HELD, MOST_HELD = 2e-4, 0.1  # seconds


@dataclass(frozen=True, eq=False)
class Home:
    """A tensor in mapped host memory.

    Attributes
    ----------
    span : Span
        By its host address.
    mapped, host : Tensor
        As kernels of the device reach it, and as the CPU does.
    arena : HostArena
        Its pages, all of which are its own.
    """

    span: Span
    mapped: torch.Tensor
    host: torch.Tensor
    arena: HostArena

    @property
    def matrix(self) -> HostMatrix:
        rows, columns = self.host.shape
        return HostMatrix(self.span, rows, columns, self.host.element_size())

    def close(self) -> None:
        """Give the pages back; nothing enqueued reads or writes them."""
        self.arena.close()


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor in device memory, and where that is: on the emulated device pointers are not addresses."""

    span: Span
    tensor: torch.Tensor


class Stand:
    """A device, a stream on which torch computes, and lanes beside it.

    Parameters
    ----------
    driver : Driver
    device : int
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.factory = TensorFactory(driver, device)
        self.emulated = self.factory.emulated
        self.torch_device = self.factory.torch_device
        self.stream: Stream = driver.create_stream(device)
        self.engine = TransferEngine(driver, device)
        self._pools: list[DevicePool] = []
        self._buffers: list[int] = []
        self._enqueue_s = 0.0

    @contextlib.contextmanager
    def computing(self, stream: Stream | None = None) -> Iterator[None]:
        """Torch computes on a stream, by default the stand's, without gradients."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if not self.emulated:
                stack.enter_context(torch.cuda.stream(self._external(stream or self.stream)))
            yield

    def home(self, shape: tuple[int, ...], dtype: torch.dtype) -> Home:
        """Mapped host memory, contents undefined."""
        count = 1
        for size in shape:
            count *= size
        arena = HostArena(self.driver, count * dtype.itemsize)
        span = arena.allocate(count * dtype.itemsize)
        mapped, host = self.factory.mapped(arena, span), self.factory.host(arena, span)
        return Home(span, mapped.view(dtype).view(shape), host.view(dtype).view(shape), arena)

    def pool(self, nbytes: int) -> DevicePool:
        """Device memory beside torch's, until `close`."""
        pool = DevicePool(self.driver, self.device, nbytes)
        self._pools.append(pool)
        return pool

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        """Device memory that copy engines know on the emulated device too, until `close`."""
        count = 1
        for size in shape:
            count *= size
        nbytes = count * dtype.itemsize
        ptr = self.driver.malloc(self.device, nbytes)
        self._buffers.append(ptr)
        span = Span(ptr, nbytes)
        return Buffer(span, self.factory.device(span).view(dtype).view(shape))

    def settle(self) -> None:
        """Wait for everything enqueued."""
        self.driver.synchronize(self.device)

    def seconds(
        self,
        work: Callable[[], object],
        *,
        samples: int,
        warm_up: int = WARM_UP,
        before: Callable[[], object] | None = None,
    ) -> tuple[float, ...]:
        """How long work takes, from its start on the stream until it is done on the stream and on both lanes.

        The device is held back until all is enqueued, so that the time is the device's and not Python's.  On the
        emulated device it is the CPU's time.

        Parameters
        ----------
        before : callable, optional
            Called before each sample, untimed.
        """
        for _ in range(warm_up):
            if before is not None:
                before()
            start = time.perf_counter()
            work()
            self._enqueue_s = time.perf_counter() - start
            self.settle()
        return tuple(self._sample(work, before) for _ in range(samples))

    def _sample(self, work: Callable[[], object], before: Callable[[], object] | None) -> float:
        if before is not None:
            before()
        self.settle()
        if self.emulated:
            began = time.perf_counter()
            work()
            self.settle()
            return time.perf_counter() - began
        self.hold(self.stream)
        start = self.mark()
        for lane in self.lanes:
            lane.wait(start)
        work()
        for lane in self.lanes:
            self.stream.wait(lane.record())
        end = self.mark()
        end.synchronize()
        return end.elapsed_since(start)

    @property
    def lanes(self) -> list[Stream]:
        """What carries copies in either direction."""
        return [self.engine.lane(direction) for direction in Direction]

    def hold(self, stream: Stream) -> None:
        """Keep a stream busy for as long as the last warm-up took to enqueue, and half as long again."""
        seconds = min(1.5 * self._enqueue_s + LEAST_HELD, MOST_HELD)
        with torch.cuda.stream(self._external(stream)):
            torch.cuda._sleep(int(seconds * CYCLES))

    def _external(self, stream: Stream) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(stream.handle, device=self.torch_device)

    def mark(self) -> Event:
        """The stream's time now."""
        return self.stream.record(self.driver.create_event(self.device, timing=True))

    def copy_in(self, target: Buffer, source: Home) -> None:
        """Enqueue a copy into device memory on the lane, and let the stream wait for it."""
        self.engine.copy(target.span, source.span, Direction.HOST_TO_DEVICE, stream=self.stream)

    def copy_out(self, target: Home, source: Buffer) -> None:
        """Enqueue a copy home on the lane, and let the stream wait for it."""
        self.engine.copy(target.span, source.span, Direction.DEVICE_TO_HOST, stream=self.stream)

    def far(self, home: Home) -> int:
        """The pointer under which kernels reach a home."""
        return self.driver.host_device_pointer(home.span.ptr, self.device)

    def close(self) -> None:
        """Wait for everything, and give streams and pools back."""
        self.settle()
        self.engine.close()
        for pool in self._pools:
            pool.close()
        for ptr in self._buffers:
            self.driver.free(self.device, ptr)
        self._pools.clear()
        self._buffers.clear()
        self.stream.close()
