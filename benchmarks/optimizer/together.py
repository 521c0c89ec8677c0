"""CPU and device update together, and the host memory traffic that the machine carries meanwhile.

    python -m benchmarks.optimizer.together [--device cuda:0] [--parameters N] [--threads 14,16] --json FILE

No state lives on the device.  Layers are shared as the runtime shares them: the CPU updates some, the others are
streamed through the device, at the share at which both end together.  ``traffic`` is the same bytes with nothing
to compute and no order to keep: the CPU's loads and stores, and copies in both directions that wait for nothing.
Either takes its turn, sample by sample, at the share that balances it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from memferry_allocator import DevicePool, Driver, Event, HostArena, Stream, open_device, registrations
from memferry_rt.adapters.torch.budget import LARGEST_STREAM, SMALLEST_STREAM
from memferry_rt.adapters.torch.update import cut_work
from memferry_rt.device_kernels.adam import operands_read, operands_written
from memferry_rt.device_update import open_device_update
from memferry_rt.native import AdamKernel, AdamOperands, NativeCalls, load_adam
from memferry_rt.split import UpdateRates, spread
from memferry_rt.streaming import UNIT, StateStream
from memferry_rt.updates import UpdateQueue

from .slabs import BYTES, SETTINGS, Slabs

DTYPE = "bfloat16"
COPY = 32 << 20  # bytes: as large as those of the runtime's ring
SCRATCH = 1 << 30  # bytes that copies from the device go round in: more than any cache holds


class Work(Protocol):
    """What is done to layers, by either side.

    Attributes
    ----------
    name : str
    layers : list of AdamOperands
        At home in host memory, in order.
    """

    name: str
    layers: list[AdamOperands]

    def calls(self, layer: AdamOperands) -> NativeCalls:
        """On the CPU."""

    def enqueue(self, layer: AdamOperands) -> None:
        """The same on the device, after the layers before."""

    def finish(self) -> None:
        """Block until the device is done."""

    def rate(self) -> float | None:
        """Elements a second of the device since the last call; None if there were none."""

    def close(self, stream: Stream) -> None:
        """Give the device's memory back; `stream` is any of the device."""


class Update:
    """The update, made by the runtime's own classes."""

    name = "adam"

    def __init__(
        self,
        driver: Driver,
        device: int,
        kernel: AdamKernel,
        layers: list[AdamOperands],
        pool: DevicePool,
        ring: int,
    ) -> None:
        update = open_device_update(driver, device, kernel)
        if update is None:
            raise SystemExit("there is no update kernel for this device")
        self.layers = layers
        self._kernel = kernel
        self._on_cpu = kernel.prepare(SETTINGS, 10.0, 1.0)
        self._on_device = update.prepare(SETTINGS, 10.0, 1.0)
        self._streaming = StateStream(driver, device, update, pool, ring, measure=True)

    def calls(self, layer: AdamOperands) -> NativeCalls:
        return self._kernel.calls(cut_work([(self._on_cpu, layer)]))

    def enqueue(self, layer: AdamOperands) -> None:
        self._streaming.run(layer, self._on_device)

    def finish(self) -> None:
        self._streaming.out.synchronize()

    def rate(self) -> float | None:
        return self._streaming.rate()

    def close(self, stream: Stream) -> None:
        self._streaming.close(stream)


class Traffic:
    """The same bytes: loads and stores on the CPU, copies in both directions that wait for nothing."""

    name = "traffic"

    def __init__(
        self, driver: Driver, device: int, kernel: AdamKernel, layers: list[AdamOperands], pool: DevicePool
    ) -> None:
        self.layers = layers
        self._driver = driver
        self._device = device
        self._kernel = kernel
        self._pool = pool
        self._pages = registrations(driver)
        self._in, self._out = driver.create_stream(device), driver.create_stream(device)
        nbytes = 4 * max(layer.count for layer in layers)
        self._copy = min(COPY, nbytes)
        self._scratch = HostArena(driver, min(SCRATCH, 8 * self._copy))
        self._at = 0
        self._to = pool.allocate(self._copy, stream=self._in)
        self._of = pool.allocate(self._copy, stream=self._out)
        driver.copy(self._of, self._scratch.address, self._copy, stream=self._out)
        self._begun: list[Event] | None = None
        self._ended: list[Event] = []
        self._elements = 0

    def calls(self, layer: AdamOperands) -> NativeCalls:
        return self._kernel.traffic([part for _, part in cut_work([(None, layer)])])

    def enqueue(self, layer: AdamOperands) -> None:
        if self._begun is None:
            self._begun, self._elements = self._marks(), 0
        for span in operands_read(layer):
            for start in range(0, span.nbytes, self._copy):
                nbytes = min(self._copy, span.nbytes - start)
                for part in self._pages.split(span.ptr + start, nbytes):
                    self._driver.copy(self._to, part.ptr, part.nbytes, stream=self._in)
        for span in operands_written(layer):
            for start in range(0, span.nbytes, self._copy):
                self._send_back(min(self._copy, span.nbytes - start))
        self._elements += layer.count

    def finish(self) -> None:
        self._ended = self._marks()
        self._in.synchronize()
        self._out.synchronize()

    def rate(self) -> float | None:
        if self._begun is None:
            return None
        seconds = max(end.elapsed_since(begin) for end, begin in zip(self._ended, self._begun, strict=True))
        self._begun = None
        return self._elements / seconds if seconds > 0 else None

    def close(self, stream: Stream) -> None:
        for own, ptr in ((self._in, self._to), (self._out, self._of)):
            own.synchronize()
            own.close()
            self._pool.deallocate(ptr, self._copy, stream=stream, uses={})
        self._scratch.close()

    def _send_back(self, nbytes: int) -> None:
        if self._at + nbytes > self._scratch.nbytes:
            self._at = 0
        for part in self._pages.split(self._scratch.address + self._at, nbytes):
            self._driver.copy(part.ptr, self._of, part.nbytes, stream=self._out)
        self._at += nbytes

    def _marks(self) -> list[Event]:
        return [
            stream.record(self._driver.create_event(self._device, timing=True)) for stream in (self._in, self._out)
        ]


class Sharing:
    """Makes one pass over all layers, by CPU and device.

    Parameters
    ----------
    driver : Driver
    threads : int
        Of the CPU; one more feeds the device, and one waits.
    """

    def __init__(self, driver: Driver, threads: int) -> None:
        self._driver = driver
        self._queue = UpdateQueue(threads, native=True, feeder=True)
        self.close = self._queue.close

    def run(self, work: Work, share: float) -> tuple[float, float | None, float | None]:
        """Seconds, and elements a second of CPU and device; `share` is the device's."""
        chosen = spread([layer.count for layer in work.layers], share)
        self._queue.rate = None
        start = time.perf_counter()
        for number, (layer, on_device) in enumerate(zip(work.layers, chosen, strict=True)):
            if on_device:
                self._feed(number, work, layer)
            else:
                self._submit(number, work, layer)
        self._queue.wait_all()
        work.finish()
        seconds = time.perf_counter() - start
        return seconds, self._queue.rate, work.rate()

    def _submit(self, number: int, work: Work, layer: AdamOperands) -> None:
        access = self._driver.host_access(reads=operands_read(layer), writes=operands_written(layer))
        self._queue.submit_native(number, work.calls(layer), access.end, elements=layer.count)

    def _feed(self, number: int, work: Work, layer: AdamOperands) -> None:
        known = self._driver.publish()

        def enqueue() -> None:
            self._driver.observe(known)
            work.enqueue(layer)

        self._queue.feed(number, enqueue)


@dataclass(frozen=True)
class Plan:
    """How much is measured: passes to find the balance, and passes that count."""

    balancing: int
    samples: int
    balanced: bool


def measure(sharing: Sharing, works: Sequence[Work], who: str, plan: Plan) -> list[dict[str, Any]]:
    """Both works, in turns; `who` is ``"both"``, ``"cpu"`` or ``"device"``."""
    alone = {"cpu": 0.0, "device": 1.0}
    rates = {work.name: UpdateRates() for work in works}
    samples: dict[str, list[tuple[float, float]]] = {work.name: [] for work in works}
    for number in range(plan.balancing + plan.samples):
        for work in works:
            share = alone.get(who, rates[work.name].device_share)
            seconds, cpu, device = sharing.run(work, share)
            if plan.balanced and who == "both":
                rates[work.name] = rates[work.name].measured(cpu, device)
            if number >= plan.balancing:
                samples[work.name].append((seconds, share))
    found = []
    for work in works:
        rate = sum(layer.count for layer in work.layers) / statistics.median(s for s, _ in samples[work.name])
        found.append(
            {
                "work": work.name,
                "who": who,
                "samples_s": [seconds for seconds, _ in samples[work.name]],
                "device_shares": [share for _, share in samples[work.name]],
                "gparam_per_s": rate / 1e9,
                "gb_per_s": BYTES * rate / 1e9,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parameters", type=int, default=1 << 30)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--threads", default=",".join(map(str, sorted({max(1, cores - 2), cores}))))
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    kernel = load_adam()
    if kernel is None:
        raise SystemExit("the native kernels are not installed")
    driver, device = open_device(arguments.device)
    slabs = Slabs(driver, arguments.parameters, [DTYPE])
    slabs.fill()
    size = -(-arguments.parameters // arguments.layers // UNIT) * UNIT
    starts = range(0, arguments.parameters, size)
    layers, carried = (
        [slabs.operands(DTYPE, at, min(size, slabs.numel - at), zeros=zeros) for at in starts]
        for zeros in (False, True)
    )
    ring = min(LARGEST_STREAM, -(-size // UNIT) * SMALLEST_STREAM)
    pool = DevicePool(driver, device, ring + 2 * COPY + (1 << 20))
    works: list[Work] = [
        Update(driver, device, kernel, layers, pool, ring),
        Traffic(driver, device, kernel, carried, pool),
    ]
    balanced = driver.name != "emulated"  # whose clock knows nothing of the CPU's work
    cases = []
    for threads in [int(text) for text in arguments.threads.split(",")]:
        sharing = Sharing(driver, threads)
        for who in ("both", "cpu", "device"):
            plan = Plan(4 if who == "both" else 1, arguments.samples, balanced)
            for case in measure(sharing, works, who, plan):
                cases.append({"threads": threads, **case})
                print(f"{case['gparam_per_s']:6.2f}  {case['work']:8} {who:7} {threads} threads", flush=True)
        sharing.close()
    stream = driver.create_stream(device)
    for work in works:
        work.close(stream)
    result = {
        "settings": {
            "device": f"{driver.name}:{device}",
            "parameters": arguments.parameters,
            "layers": len(layers),
            "dtype": DTYPE,
            "ring_nbytes": ring,
            "copy_nbytes": COPY,
            "samples": arguments.samples,
        },
        "device_name": driver.device_info(device).name,
        "variant": kernel.variant,
        "cases": cases,
    }
    arguments.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
