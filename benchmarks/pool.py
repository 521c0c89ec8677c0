"""How fast the device pool is, and how much memory it holds for a training run; writes JSON.

    python -m benchmarks.pool [--device emulated] [--out FILE]

Nothing is moved: on the emulated device the figures are those of the pool's own code, on a CUDA device they
hold the driver's answers too.  Fragmentation is measured on a driver that only counts bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import timeit
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.training_log import TrainingLog
from memferry_allocator import DevicePool, Driver, SizeOnlyDriver, Stream, VirtualMemory, open_device, replay
from memferry_allocator.device import MemoryResource

SCHEMA, SCHEMA_VERSION = "memferry.pool", 1
MIB = 1 << 20
CALLS, SAMPLES = 20_000, 9
ROOM = 1 << 42
LOGS = {
    "plain": TrainingLog(),
    "checkpointed": TrainingLog(checkpointing=True),
    "accumulated": TrainingLog(accumulate=4, steps=6),
    "resident": TrainingLog(resident=1.0, steps=10),
    "small": TrainingLog(layers=8, hidden=512, feed_forward=1408, heads=8, batch=8, steps=40),
}


def pair_seconds(resource: MemoryResource, nbytes: int, stream: Stream) -> list[float]:
    """Seconds of one allocation and its free on the same stream, one figure a sample."""

    def pair() -> None:
        ptr = resource.allocate(nbytes, stream=stream)
        resource.deallocate(ptr, nbytes, stream=stream)

    pair()
    return [seconds / CALLS for seconds in timeit.repeat(pair, number=CALLS, repeat=SAMPLES)]


def torch_seconds(nbytes: int) -> list[float] | None:
    """The same for torch's caching allocator; None without torch and a device."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None

    def pair() -> None:
        torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    pair()
    return [seconds / CALLS for seconds in timeit.repeat(pair, number=CALLS, repeat=SAMPLES)]


def speed(driver: Driver, device: int) -> dict[str, Any]:
    pool, stream = DevicePool(driver, device, 64 * MIB), driver.create_stream(device)
    samples = {f"pool, {nbytes} bytes": pair_seconds(pool, nbytes, stream) for nbytes in (256, MIB)}
    stream.close()
    pool.close()
    torch = torch_seconds(MIB)
    return samples if torch is None else {**samples, f"torch, {MIB} bytes": torch}


def smallest_slab(log: TrainingLog, live_peak: int) -> int:
    """The smallest slab on which nothing is refused, to half a percent."""
    low, high = live_peak, 2 * live_peak
    while high - low > live_peak // 200:
        middle = (low + high) // 2
        if replay(log, DevicePool(SizeOnlyDriver(ROOM), 0, middle)).refused:
            low = middle
        else:
            high = middle
    return high


def fragmentation(log: TrainingLog) -> dict[str, Any]:
    driver = SizeOnlyDriver(ROOM)
    virtual = replay(log, DevicePool(driver, 0, 0, maximum=ROOM, source=VirtualMemory(driver, 0, 8 * ROOM)))
    segments = replay(log, DevicePool(SizeOnlyDriver(ROOM), 0, 0, maximum=ROOM))
    return {
        "log": asdict(log),
        "virtual": {**asdict(virtual), "fragmentation": virtual.fragmentation},
        "segments": {**asdict(segments), "fragmentation": segments.fragmentation},
        "slab": {"smallest": smallest_slab(log, virtual.live_peak)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    driver, device = open_device(arguments.device)
    result = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "machine": {"device": driver.device_info(device).name, "cpu": platform.machine(), "python": sys.version},
        "settings": {"calls_a_sample": CALLS, "samples": SAMPLES},
        "seconds": speed(driver, device),
        "fragmentation": {name: fragmentation(log) for name, log in LOGS.items()},
    }
    text = json.dumps(result, indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    for name, samples in result["seconds"].items():
        print(f"{name}: {sorted(samples)[len(samples) // 2] * 1e6:.2f} us an allocation and its free, median")
    for name, found in result["fragmentation"].items():
        live = found["virtual"]["live_peak"]
        beyond = {kind: found[kind]["fragmentation"] for kind in ("virtual", "segments")}
        beyond["smallest slab"] = found["slab"]["smallest"] / live - 1
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in beyond.items())
        print(f"{name}: live peak {live / (1 << 30):.2f} GiB; held beyond it: {shares}")


if __name__ == "__main__":
    main()
