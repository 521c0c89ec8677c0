"""One GPU's host link, and those of others that relay to it; all GPUs at once; what it costs the processors.

    python -m benchmarks.scale.links --device cuda|emulated [--gpus N] [--small] [--budget SECONDS] --json FILE

The first GPU's ways are calibrated.  The others are taken to be like it where all of them pull at once.
What there is no time for in the budget is left out, and says so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from memferry_allocator import Direction, Driver, open_driver
from memferry_transport import Calibration, TransferOptions
from memferry_transport import Path as Way
from memferry_transport.measure import CASES, NEVER, Bench, MeasureOptions, calibrate_on, run_case
from memferry_transport.measure.calibrate import engine_load, open_engine
from memferry_transport.measure.copies import check, clear
from memferry_transport.topology import discover, emulated_options, machine

SIZES = (16 << 20, 64 << 20, 256 << 20, 1 << 30)
SMALL_SIZES = (64 << 10, 256 << 10, 1 << 20)
FIXTURE = "hgx-h200-x8"
TOGETHER = ("both_pulling", "cpu_share", "predicted_over_measured")  # of memferry bandwidth


def measure(
    driver: Driver, gpus: int, options: MeasureOptions, sizes: Sequence[int], end: float
) -> dict[str, Any]:
    """All parts; a part that cannot begin before `end`, by the monotonic clock, is null."""
    devices = tuple(range(gpus))
    with Bench(driver, devices, options, machine=discover(driver).machine) as bench:
        known = calibrate_on(bench, devices=devices[:1])
        bench.use(spread(known, devices))

        def in_time(part: Callable[[], Any]) -> Any:
            return part() if time.monotonic() < end else None

        found: dict[str, Any] = {"gpus": gpus, "emulated": driver.name == "emulated"}
        found["break_even_bytes"] = _break_even(known)
        found["relays"] = in_time(lambda: [_relays(bench, count, sizes) for count in range(gpus)])
        for name in TOGETHER:
            found[name] = in_time(lambda name=name: run_case(bench, CASES[name]).to_json())  # type: ignore[misc]
        return found


def spread(known: Calibration, devices: Sequence[int]) -> Calibration:
    """What is known of the first device's ways, for all of them: the helpers of each are the others, in turn."""
    count = len(devices)
    place = {device: number for number, device in enumerate(devices)}

    def moved(device: int, by: int) -> int:
        return devices[(place[device] + by) % count]

    return replace(
        known,
        ways={
            (_renamed(path, lambda device, by=by: moved(device, by)), direction): measured  # type: ignore[misc]
            for (path, direction), measured in known.ways.items()
            for by in range(count)
        },
        break_even_bytes=_for_all(known.break_even_bytes, devices),
        join_s=_for_all(known.join_s, devices),
        duplex=dict.fromkeys(devices, known.duplex[devices[0]]),
    )


def _renamed(path: Way, name: Callable[[int], int]) -> Way:
    return replace(path, device=name(path.device), helper=None if path.helper is None else name(path.helper))


def _for_all(found: Any, devices: Sequence[int]) -> Any:
    return {(device, direction): value for (_, direction), value in found.items() for device in devices}


def _break_even(known: Calibration) -> dict[str, int | None]:
    """From what size on several ways pay, by direction; null where they never do."""
    return {
        direction.value: None if size >= NEVER else size for (_, direction), size in known.break_even_bytes.items()
    }


def _relays(bench: Bench, count: int, sizes: Sequence[int]) -> dict[str, Any]:
    """GB/s of the first device with so many helpers, by direction and size."""
    device, helpers = bench.devices[0], bench.devices[1 : count + 1]
    options = TransferOptions(helpers=helpers, break_even_bytes=0 if helpers else None)
    row: dict[str, Any] = {"helpers": count}
    calibration = bench.calibration() if helpers else None
    with open_engine(bench, device, options, calibration) as engine:
        for direction in Direction:
            clear(bench, device, direction, sizes[0])
            rates = {}
            for nbytes in sizes:
                (seconds,) = bench.seconds([engine_load(bench, engine, direction, nbytes)])
                rates[str(nbytes)] = nbytes / median(seconds) / 1e9
            check(bench, device, direction, sizes[0])
            row[direction.value] = rates
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--small", action="store_true", help="sizes that only try the benchmark out")
    parser.add_argument("--budget", type=float, default=120, help="seconds after which no part begins")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.budget
    driver = open_driver(arguments.device, emulated=emulated_options(machine(FIXTURE), eagerness=0.0))
    sizes = SMALL_SIZES if arguments.small else SIZES
    options = MeasureOptions(nbytes=sizes[-1] // 2, samples=1 if arguments.small else 3, copies=4)
    gpus = arguments.gpus or driver.device_count
    arguments.json.write_text(json.dumps(measure(driver, gpus, options, sizes, end)))


if __name__ == "__main__":
    main()
