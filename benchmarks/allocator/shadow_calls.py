"""What a view of the shadow space costs in Python: acquire and release, by place and mode, with and without moves.

On a driver that does nothing only the space's own time is left.  Writes JSON with every sample, in seconds::

    python -m benchmarks.allocator.shadow_calls [null|emulated|cuda] [result.json]
"""

from __future__ import annotations

import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from memferry_allocator import ArenaOptions, Driver, Event, Mode, Place, ShadowSpace, Stream, open_driver
from memferry_allocator.driver import DeviceInfo, MemoryInfo

SIZE, PARTS, ROOM, SAMPLES, WARM_UP = 4096, 96, 32, 2000, 200


class NullDriver(Driver):
    """Answers at once and does nothing."""

    name = "null"
    device_count = 1

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def device_info(self, device: int) -> DeviceInfo:
        return DeviceInfo(device, "null", "null", 1 << 60, None, None, None)

    def memory_info(self, device: int) -> MemoryInfo:
        return MemoryInfo(1 << 60, 1 << 60)

    def malloc(self, device: int, nbytes: int) -> int:
        return next(self._numbers) << 40

    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        return Stream(self, device, next(self._numbers), owned=True)

    def stream_from_handle(self, device: int, handle: int) -> Stream:
        return Stream(self, device, handle, owned=False)

    def create_event(self, device: int, *, timing: bool = False) -> Event:
        return Event(self, device, None, timing)

    def event_record(self, event: Event, stream: Stream) -> None:
        event.recorded_on(stream)

    def event_elapsed(self, start: Event, end: Event) -> float:
        return 0.0

    def host_device_pointer(self, address: int, device: int) -> int:
        return address

    def host_registration(self, address: int) -> None:
        return None

    def host_bytes(self, ptr: int, nbytes: int) -> None:
        return None

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    def _yes(self, *_: Any, **__: Any) -> bool:
        return True

    synchronize = free = host_register = host_unregister = destroy_stream = stream_wait = _nothing
    stream_synchronize = event_synchronize = copy = fill = close = _nothing
    enable_peer_access = disable_peer_access = _nothing
    stream_query = event_query = can_access_peer = _yes


def seconds(begin: Callable[[int], Any], end: Callable[[Any], object]) -> dict[str, list[float]]:
    """Samples of `begin` and of `end`, which gets what `begin` gave."""
    samples: dict[str, list[float]] = {"begin": [], "end": []}
    for turn in range(WARM_UP + SAMPLES):
        start = time.perf_counter()
        held = begin(turn)
        middle = time.perf_counter()
        end(held)
        if turn >= WARM_UP:
            samples["end"].append(time.perf_counter() - middle)
            samples["begin"].append(middle - start)
    return samples


def measure(driver: Driver) -> dict[str, dict[str, list[float]]]:
    results = {}
    with ShadowSpace(driver, device_budget=ROOM * SIZE) as space:
        parts = space.allocate("b", PARTS * SIZE, partition_nbytes=SIZE, options=ArenaOptions(touch=False))
        stream = driver.create_stream(0)
        for place, mode in itertools.product(Place, Mode):
            where = None if place is Place.HOST else stream

            def acquire(_: int, place: Place = place, mode: Mode = mode, where: Stream | None = where) -> Any:
                return parts[0].acquire(place, mode, stream=where)

            results[f"{place.value} {mode.value}"] = seconds(acquire, lambda view: view.release())

        def load_over_another(turn: int) -> Any:
            return parts[turn % PARTS].acquire(Place.DEVICE, Mode.READ, stream=stream)

        def load_into_free_room(_: int) -> Any:
            return parts[0].acquire(Place.DEVICE, Mode.READ, stream=stream)

        def release_and_evict(view: Any) -> None:
            view.release()
            parts[0].evict()

        results["device read, evicting and loading"] = seconds(load_over_another, lambda view: view.release())
        space.resize(ROOM * SIZE)
        results["device read, loading into free room"] = seconds(load_into_free_room, release_and_evict)
        stream.close()
    return results


def main() -> None:
    kind, path = (*sys.argv[1:], "null", "")[:2] if len(sys.argv) > 1 else ("null", "")
    driver = NullDriver() if kind == "null" else open_driver(kind)
    results = measure(driver)
    for name, samples in results.items():
        begin, end = (statistics.median(samples[part]) * 1e6 for part in ("begin", "end"))
        print(f"{name:40} acquire {begin:8.2f} µs   release {end:8.2f} µs")
    if path:
        with open(path, "w") as file:
            json.dump(
                {
                    "schema": "memferry.shadow-calls",
                    "schema_version": 1,
                    "machine": {"processor": platform.processor(), "python": platform.python_version()},
                    "driver": driver.name,
                    "settings": {"partition_nbytes": SIZE, "partitions": PARTS, "room": ROOM, "samples": SAMPLES},
                    "seconds": results,
                },
                file,
            )


if __name__ == "__main__":
    main()
