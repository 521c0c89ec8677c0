"""Optimizer state streamed through the device: in by one copy engine, out by the other, the kernel between.

Three streams and a ring of buffers in device memory.  While the kernel works on one piece the next comes in and
the last goes out; nothing but events orders them, and no thread waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memferry_allocator import DevicePool, Driver, Event, Stream, registrations

from .device_update import FP32, ITEMSIZE, DeviceUpdate

SLOTS = 3  # one comes in, one is computed, one goes out
BYTES = 16  # an element in the ring: fp32 parameter and moments, and 4 bytes of gradient and new weight
UNIT = 64  # elements; every array of a slot begins at a multiple of 128 bytes


@dataclass(frozen=True)
class StatePiece:
    """Elements of one parameter, by the host addresses of everything that is theirs.

    Attributes
    ----------
    parameter, exp_avg, exp_avg_sq : int
        fp32, updated in place.
    gradient : int
        Of `gradient_dtype`, only read.
    weight : int
        bfloat16 that gets the new parameter rounded; 0 for none.
    """

    index: int
    parameter: int
    gradient: int
    gradient_dtype: str
    exp_avg: int
    exp_avg_sq: int
    weight: int
    count: int


@dataclass(eq=False)
class _Slot:
    base: int
    emptied: Event | None = None


def ring_elements(nbytes: int) -> int:
    """Elements of one slot of a ring of `nbytes` bytes."""
    return nbytes // (SLOTS * BYTES * UNIT) * UNIT


class StateStream:
    """Updates state at home in host memory on the device.

    Parameters
    ----------
    driver : Driver
    device : int
    update : DeviceUpdate
    pool : DevicePool
    nbytes : int
        Size of the ring; at least ``SLOTS * BYTES * UNIT``.
    measure : bool
        Take the time of each step's streaming, for `rate`.

    Notes
    -----
    One thread uses it at a time.  Host pages must be registered, and what is done to them before must be known
    to that thread; it is over for a stream that has waited for an event of `out`, and for nobody else.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        update: DeviceUpdate,
        pool: DevicePool,
        nbytes: int,
        *,
        measure: bool = False,
    ) -> None:
        self._driver = driver
        self._device = device
        self._update = update
        self._pool = pool
        self._pages = registrations(driver)
        self._streams = [driver.create_stream(device) for _ in range(3)]
        self._in, self._compute, self.out = self._streams
        self.elements = ring_elements(nbytes)
        self.nbytes = nbytes
        self._base = pool.allocate(nbytes, stream=self._in)
        size = self.elements * BYTES
        self._slots = [_Slot(self._base + number * size) for number in range(SLOTS)]
        self._next = 0
        self._measure = measure
        self._span: tuple[Event, Event, int] | None = None
        self.bytes_in = 0
        self.bytes_out = 0

    def run(self, piece: StatePiece, prepared: Any) -> None:
        """Enqueue the update of a piece of any length."""
        begin = self._mark(self._in) if self._measure and self._span is None else None
        for start in range(0, piece.count, self.elements):
            self._run(piece, start, min(self.elements, piece.count - start), prepared)
        if self._measure:
            first, count = (begin, 0) if self._span is None else (self._span[0], self._span[2])
            assert first is not None
            self._span = (first, self._mark(self.out), count + piece.count)

    def rate(self) -> float | None:
        """Parameters a second since the last call, if what was enqueued is done; None otherwise."""
        if self._span is None:
            return None
        first, last, count = self._span
        if not last.query():
            return None
        self._span = None
        seconds = last.elapsed_since(first)
        return count / seconds if seconds > 0 else None

    def close(self, stream: Stream) -> None:
        """Wait for what is under way, and give buffers and streams back; `stream` is any of the device."""
        for own in self._streams:
            own.synchronize()
            own.close()
        self._pool.deallocate(self._base, self.nbytes, stream=stream, uses={})

    def _run(self, piece: StatePiece, start: int, count: int, prepared: Any) -> None:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        itemsize = ITEMSIZE[piece.gradient_dtype]
        parameter, exp_avg, exp_avg_sq, rest = (slot.base + number * FP32 * self.elements for number in range(4))
        weight = rest + itemsize * self.elements if piece.weight else 0
        state = [
            (parameter, piece.parameter + start * FP32, count * FP32),
            (exp_avg, piece.exp_avg + start * FP32, count * FP32),
            (exp_avg_sq, piece.exp_avg_sq + start * FP32, count * FP32),
        ]
        if slot.emptied is not None:
            self._in.wait(slot.emptied)
        for device, host, nbytes in [*state, (rest, piece.gradient + start * itemsize, count * itemsize)]:
            for part in self._pages.split(host, nbytes):  # no copy may cross the edge of a registration
                self._driver.copy(device + part.ptr - host, part.ptr, part.nbytes, stream=self._in)
            self.bytes_in += nbytes
        self._compute.wait(self._in.record())
        self._update.update(
            self._compute,
            prepared,
            parameter=parameter,
            gradient=rest,
            gradient_dtype=piece.gradient_dtype,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            weight=weight,
            count=count,
        )
        self.out.wait(self._compute.record())
        if weight:
            half = ITEMSIZE["bfloat16"]
            state.append((weight, piece.weight + start * half, count * half))
        for device, host, nbytes in state:
            for part in self._pages.split(host, nbytes):
                self._driver.copy(part.ptr, device + part.ptr - host, part.nbytes, stream=self.out)
            self.bytes_out += nbytes
        slot.emptied = self.out.record()

    def _mark(self, stream: Stream) -> Event:
        event = self._driver.create_event(self._device, timing=True)
        return stream.record(event)
