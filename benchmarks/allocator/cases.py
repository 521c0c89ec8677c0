"""What is measured of the allocator, and the figures of its table."""

from __future__ import annotations

import statistics
import time
from typing import Any

from memferry_allocator import (
    DevicePool,
    DriverMemory,
    HostArena,
    Mode,
    Place,
    ShadowSpace,
    SizeOnlyDriver,
    VirtualMemory,
    open_driver,
    replay,
)
from memferry_allocator.device import MemoryResource
from memferry_allocator.device.log import LogEntry

from ..runner import Benchmark, Settings
from ..timing import per_call, summary
from . import peers

MIB, GIB = 1 << 20, 1 << 30


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Microseconds, ratios and shares, as the documentation's table has them."""
    summary: dict[str, Any] = {}
    for name in ("pool", "driver", "torch", "cupy", "rmm"):
        timed = found.get(f"pair_{name}")
        summary[f"pair_{name}_us"] = None if timed is None else timed["median_s"] * 1e6
    pool = summary["pair_pool_us"]
    for name in ("driver", "torch"):
        other = summary[f"pair_{name}_us"]
        summary[f"pair_{name}_over_pool"] = None if other is None or pool is None else other / pool
    replayed = found.get("replays") or {}
    for name in ("slab", "segments", "virtual", "torch", "rmm"):
        summary[f"fragmentation_{name}"] = replayed.get(name, {}).get("fragmentation")
    arena, pinned = found.get("arena"), found.get("pinned_torch")
    if arena is not None:
        summary["arena_s"] = arena["seconds"]
        summary["arena_resident_over_asked"] = arena["resident_bytes"] / arena["asked_bytes"]
    if arena is not None and pinned is not None:
        summary["pinned_torch_s"] = pinned["seconds"]
        summary["pinned_torch_over_arena"] = pinned["seconds"] / arena["seconds"]
        summary["pinned_torch_resident_over_asked"] = pinned["resident_bytes"] / pinned["asked_bytes"]
    acquired = found.get("acquire")
    if acquired is not None:
        summary["acquire_us"] = acquired["acquire"]["median_s"] * 1e6
        summary["release_us"] = acquired["release"]["median_s"] * 1e6
        summary["acquire_over_copy_us"] = acquired["over_copy_s"] * 1e6
    return summary


BENCHMARK = Benchmark("allocator", summarise)
case = BENCHMARK.case


@case
def machine(settings: Settings) -> Any:
    driver = open_driver(settings.device)
    versions = {name: getattr(peers.library(name), "__version__", None) for name in ("torch", "cupy", "rmm")}
    return {"device": driver.device_info(0).name, **versions}


# -- allocate and free 1 MiB -----------------------------------------------------------------------------
@case
def pair_pool(settings: Settings) -> Any:
    driver = open_driver(settings.device)
    stream = driver.create_stream(0)
    pool = DevicePool(driver, 0, 256 * MIB)

    def pair() -> None:
        pool.deallocate(pool.allocate(MIB, stream=stream), MIB, stream=stream)

    return per_call(pair, settle=stream.synchronize)


@case
def pair_driver(settings: Settings) -> Any:
    driver = open_driver(settings.device)
    return per_call(lambda: driver.free(0, driver.malloc(0, MIB)), calls=200)


@case
def pair_torch(settings: Settings) -> Any:
    return peers.torch_pair(MIB) if settings.cuda else None


@case
def pair_cupy(settings: Settings) -> Any:
    return peers.cupy_pair(MIB) if settings.cuda else None


@case
def pair_rmm(settings: Settings) -> Any:
    return peers.rmm_pair(MIB) if settings.cuda else None


# -- a training log --------------------------------------------------------------------------------------
@case
def replays(settings: Settings) -> Any:
    """What each pool holds at the most for one log, against what is live at the most."""
    from .recorded import record  # torch, which the other cases do without

    log = record("tiny", steps=4) if settings.small else record(steps=8)
    counting = SizeOnlyDriver(1 << 44)
    live = replay(log, DevicePool(counting, 0, 0, maximum=1 << 44)).live_peak
    driver = open_driver("cuda") if settings.cuda else counting
    found = {
        "slab": {"reserved_peak": _smallest_slab(log, live, counting)},
        "segments": _replayed(log, DriverMemory(driver, 0)),
        "virtual": _replayed(log, VirtualMemory(driver, 0, 256 * GIB)),
    }
    if settings.cuda:
        found["torch"] = {"reserved_peak": peers.torch_reserved(log)}
        found["rmm"] = {"reserved_peak": peers.rmm_reserved(log, 256 * MIB)}
    for replayed in found.values():
        reserved = replayed["reserved_peak"]
        replayed["fragmentation"] = None if reserved is None else (reserved - live) / live
    return {"live_peak": live, **found}


def _smallest_slab(log: list[LogEntry], live: int, driver: SizeOnlyDriver) -> int | None:
    """The smallest slab that takes the log, in steps of 1% of its live peak."""
    for percent in range(100, 131):
        pool = DevicePool(driver, 0, live * percent // 100)
        if replay(log, pool).refused == 0:
            return pool.nbytes
    return None


def _replayed(log: list[LogEntry], source: MemoryResource) -> dict[str, Any]:
    pool = DevicePool(source.driver, 0, 0, maximum=128 * GIB, source=source)
    report = replay(log, pool)
    pool.close()
    source.close()
    return {
        "reserved_peak": report.reserved_peak,
        "operations": report.operations,
        "operations_per_second": report.operations_per_second,
    }


# -- host memory -----------------------------------------------------------------------------------------
def _arena_nbytes(settings: Settings) -> int:
    return (256 * MIB if settings.small else 16 * GIB) + 3 * MIB  # no power of two


@case
def arena(settings: Settings) -> Any:
    driver = open_driver(settings.device)
    if settings.cuda:
        driver.memory_info(0)  # the context is there, as it is for others
    nbytes = _arena_nbytes(settings)
    HostArena(driver, MIB).close()
    before, start = peers.resident(), time.perf_counter()
    made = HostArena(driver, nbytes)
    seconds = time.perf_counter() - start
    after = peers.resident()
    made.close()
    return {"seconds": seconds, "resident_bytes": after - before, "asked_bytes": nbytes}


@case
def pinned_torch(settings: Settings) -> Any:
    return peers.torch_pinned(_arena_nbytes(settings)) if settings.cuda else None


# -- the shadow space ------------------------------------------------------------------------------------
@case
def acquire(settings: Settings) -> Any:
    """Views of what is there, and of what has to be copied in while the budget is full and something must go."""
    driver = open_driver(settings.device)
    stream = driver.create_stream(0)
    nbytes = 16 * MIB
    space = ShadowSpace(driver, 0, device_budget=2 * nbytes)
    pages = HostArena(driver, 3 * nbytes)
    parts = space.buffer("measured", [pages.cut(nbytes) for _ in range(3)])
    target = DevicePool(driver, 0, nbytes)
    ptr = target.allocate(nbytes, stream=stream)
    parts[0].acquire(Place.DEVICE, Mode.READ, stream=stream).release()
    taken, given = [], []
    for _ in range(30):
        views = []
        start = time.perf_counter()
        for _ in range(200):
            views.append(parts[0].acquire(Place.DEVICE, Mode.READ, stream=stream))
        middle = time.perf_counter()
        for view in views:
            view.release()
        taken.append((middle - start) / 200)
        given.append((time.perf_counter() - middle) / 200)
        stream.synchronize()
    with_copy, bare = [], []
    for number in range(1, 121):
        part = parts[number % 3]
        stream.synchronize()
        start = time.perf_counter()
        view = part.acquire(Place.DEVICE, Mode.READ, stream=stream)
        stream.synchronize()
        with_copy.append(time.perf_counter() - start)
        view.release()
        stream.synchronize()
        start = time.perf_counter()
        driver.copy(ptr, part.host.ptr, nbytes, stream=stream)
        stream.synchronize()
        bare.append(time.perf_counter() - start)
    return {
        "acquire": summary(taken),
        "release": summary(given),
        "with_copy": summary(with_copy),
        "copy": summary(bare),
        "over_copy_s": statistics.median(with_copy) - statistics.median(bare),
    }
