"""Optimizer state streamed through the device: in by one copy engine, out by the other, the kernel between.

Three streams and a ring of buffers in device memory.  While the kernel works on one piece the next comes in and
the last goes out; nothing but events orders them, and no thread waits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from memferry_allocator import DevicePool, Driver, Event, Stream, registrations

from .device_update import FP32, ITEMSIZE, DeviceUpdate, part_of
from .native import AdamOperands
from .rings import BYTES, SLOTS, UNIT

__all__ = ["BYTES", "SLOTS", "UNIT", "StateStream", "ring_elements"]


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

    Attributes
    ----------
    compute, out : Stream
        Where the kernel runs, and where results go home.
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
        self._streams: list[Stream] = []
        self.elements = ring_elements(nbytes)
        self.nbytes = nbytes
        try:
            for _ in range(3):
                self._streams.append(driver.create_stream(device))
            self._in, self.compute, self.out = self._streams
            self._base = pool.allocate(nbytes, stream=self._in)
        except BaseException:
            self._close_streams()
            raise
        size = self.elements * BYTES
        self._slots = [_Slot(self._base + number * size) for number in range(SLOTS)]
        self._next = 0
        self._measure = measure
        self._span: tuple[Event, Event, int] | None = None
        self.bytes_in = 0
        self.bytes_out = 0

    def run(self, operands: AdamOperands, prepared: Any, *, weights_stay: bool = False) -> None:
        """Enqueue the update of elements at home, any number, by their host addresses.

        Parameters
        ----------
        operands : AdamOperands
        prepared : object
            Of `DeviceUpdate.prepare`.
        weights_stay : bool
            `operands.weight` points to device memory: `compute` writes the rounded weights there, and they do not
            go home.
        """
        begin = self._mark(self._in) if self._measure and self._span is None else None
        for start in range(0, operands.count, self.elements):
            count = min(self.elements, operands.count - start)
            self._run(part_of(operands, start, count), prepared, weights_stay)
        if self._measure:
            first, count = (begin, 0) if self._span is None else (self._span[0], self._span[2])
            assert first is not None
            self._span = (first, self._mark(self.out), count + operands.count)

    def rate(self) -> float | None:
        """Parameters a second since the last call; None if there were none, or they are still on their way."""
        span, self._span = self._span, None
        if span is None or not span[1].query():
            return None
        first, last, count = span
        seconds = last.elapsed_since(first)
        return count / seconds if seconds > 0 else None

    def close(self, stream: Stream) -> None:
        """Wait for what is under way, and give buffers and streams back; `stream` is any of the device.

        A further call goes on where one has failed.
        """
        self._close_streams()
        self._pool.deallocate(self._base, self.nbytes, stream=stream, uses={})

    def _close_streams(self) -> None:
        while self._streams:
            self._streams[-1].synchronize()
            self._streams.pop().close()

    def _run(self, home: AdamOperands, prepared: Any, weights_stay: bool) -> None:
        slot = self._claim()
        here = self._in_slot(slot, home)
        if weights_stay:
            here = dataclasses.replace(here, weight=home.weight)
        gradient = (here.gradient, home.gradient, home.count * ITEMSIZE[home.gradient_dtype])
        state = [
            (here.parameter, home.parameter, home.count * FP32),
            (here.exp_avg, home.exp_avg, home.count * FP32),
            (here.exp_avg_sq, home.exp_avg_sq, home.count * FP32),
        ]
        for device, host, nbytes in (*state, gradient):
            for part in self._pages.split(host, nbytes):  # no copy may cross the edge of a registration
                self._driver.copy(device + part.ptr - host, part.ptr, part.nbytes, stream=self._in)
            self.bytes_in += nbytes
        self.compute.wait(self._in.record())
        self._update.run(self.compute, prepared, here)
        updated = self.compute.record()
        self.out.wait(updated)
        self._let_others_in(updated)
        if home.weight and not weights_stay:
            state.append((here.weight, home.weight, home.count * ITEMSIZE[home.weight_dtype]))
        for device, host, nbytes in state:
            for part in self._pages.split(host, nbytes):
                self._driver.copy(part.ptr, device + part.ptr - host, part.nbytes, stream=self.out)
            self.bytes_out += nbytes
        slot.emptied = self.out.record()

    def _let_others_in(self, updated: Event) -> None:
        """Pause between two pieces.  A stream of copies that never runs dry keeps the copy engine to itself: on an
        H200 another stream's copy waited for 115 ms of it, and for 1 ms of one that pauses."""
        self._in.wait(updated)

    def _claim(self) -> _Slot:
        """The next slot, safe to be filled once what was in it has gone out."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        if slot.emptied is not None:
            self._in.wait(slot.emptied)
        return slot

    def _in_slot(self, slot: _Slot, home: AdamOperands) -> AdamOperands:
        parameter, exp_avg, exp_avg_sq, rest = (slot.base + number * FP32 * self.elements for number in range(4))
        return dataclasses.replace(
            home,
            parameter=parameter,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            gradient=rest,
            weight=rest + ITEMSIZE[home.gradient_dtype] * self.elements if home.weight else 0,
        )

    def _mark(self, stream: Stream) -> Event:
        event = self._driver.create_event(self._device, timing=True)
        return stream.record(event)
