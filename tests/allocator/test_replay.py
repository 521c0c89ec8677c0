"""Replaying allocation logs, and how much memory a training log makes each kind of pool hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.allocator.generated import TrainingLog
from memferry_allocator import (
    DevicePool,
    DriverError,
    DriverMemory,
    DriverOutOfMemory,
    InvalidRequestError,
    LoggedMemory,
    PageKind,
    PageLocation,
    SizeOnlyDriver,
    VirtualMemory,
    read_log,
    replay,
)
from memferry_allocator.device import Action, LogEntry
from memferry_allocator.sizes import align_up

from .machine import Machine

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def entry(action: Action, number: int, nbytes: int, stream: int = 0) -> LogEntry:
    return LogEntry(action, 0.0, 0, number, 0, nbytes, stream)


TAKE, GIVE, REFUSE = Action.ALLOCATE, Action.FREE, Action.REFUSE


def test_a_replay_counts(machine: Machine) -> None:
    pool = DevicePool(machine.driver, 0, MIB)
    log = [entry(TAKE, 1, 1000), entry(TAKE, 2, 500, 1), entry(GIVE, 1, 1000, 1), entry(REFUSE, 0, MIB)]
    report = replay([*log, entry(TAKE, 3, 2 * MIB), entry(GIVE, 3, 2 * MIB), entry(TAKE, 4, 1)], pool)
    assert (report.operations, report.refused, report.live_peak) == (4, 1, 1536)
    assert report.reserved_peak == MIB
    assert report.fragmentation == pytest.approx((MIB - 1536) / 1536)
    assert report.operations_per_second > 0
    assert "4 operations" in str(report)
    assert pool.used == 0  # what was live at the end went back
    pool.close()


def test_a_resource_that_cannot_tell_what_it_holds(machine: Machine) -> None:
    report = replay([entry(TAKE, 1, 1000)], DriverMemory(machine.driver, 0))
    assert (report.reserved_peak, report.fragmentation) == (None, None)
    assert "fragmentation" not in str(report)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ([entry(TAKE, 1, 10), entry(TAKE, 1, 10)], "allocates number 1 twice"),
        ([entry(GIVE, 7, 10)], "frees number 7, which is not live"),
        ([entry(TAKE, 1, 10), entry(GIVE, 1, 10), entry(GIVE, 1, 10)], "frees number 1"),
    ],
)
def test_logs_that_make_no_sense(machine: Machine, log: list[LogEntry], said: str) -> None:
    pool = DevicePool(machine.driver, 0, MIB)
    with pytest.raises(InvalidRequestError, match=said):
        replay(log, pool)
    assert pool.used == 0
    with pytest.raises(InvalidRequestError, match="not more than zero"):
        replay([], pool, scale=0)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, "2", None])
def test_scales_that_are_none(machine: Machine, scale: Any) -> None:
    with pytest.raises(InvalidRequestError, match="scale"):
        replay([entry(TAKE, 1, 10)], DevicePool(machine.driver, 0, MIB), scale=scale)


def test_a_log_replays_as_it_was(machine: Machine, tmp_path: Path) -> None:
    """The pool that is replayed against does what the first one did, address by address."""
    small = TrainingLog(layers=2, hidden=64, feed_forward=128, heads=2, vocabulary=100, longest=200, steps=2)
    paths = [tmp_path / "first.csv", tmp_path / "second.csv"]
    log = list(small)
    for path in paths:
        pool = DevicePool(machine.driver, 0, 128 * MIB)
        logged = LoggedMemory(pool, path)
        report = replay(log, logged, reserving=pool)
        assert report.reserved_peak == 128 * MIB
        logged.close()
        pool.close()
        log = list(read_log(path))
    offsets = []
    for path in paths:
        taken = [line.pointer for line in read_log(path) if line.action is TAKE]
        offsets.append([pointer - min(taken) for pointer in taken])
    assert offsets[0] == offsets[1]


def test_sizes_are_scaled(machine: Machine) -> None:
    pool = DevicePool(machine.driver, 0, MIB)
    assert replay([entry(TAKE, 1, 40 * GIB)], pool, scale=1 / (1 << 20)).live_peak == 40 * KIB
    assert replay([entry(TAKE, 1, 1)], pool, scale=1e-9).live_peak == 256
    pool.close()


# -- the driver without bytes ------------------------------------------------------------------------------
def test_a_driver_of_sizes_only() -> None:
    driver = SizeOnlyDriver(100 * GIB)
    source = VirtualMemory(driver, 0, 400 * GIB)
    pool, stream = DevicePool(driver, 0, 10 * GIB, maximum=90 * GIB, source=source), driver.create_stream(0)
    ptr = pool.allocate(80 * GIB, stream=stream)
    assert driver.memory_info(0) == (20 * GIB, 100 * GIB)
    with pytest.raises(DriverError):
        driver.fill(ptr, 1, 1, stream=stream)
    with pytest.raises(DriverOutOfMemory):
        driver.malloc(0, 21 * GIB)
    pool.deallocate(ptr, 80 * GIB, stream=stream)
    assert pool.trim() == 70 * GIB
    pool.close()
    source.close()
    assert driver.memory_info(0).free == 100 * GIB


def test_a_driver_of_sizes_only_refuses_what_makes_no_sense() -> None:
    driver = SizeOnlyDriver(8 * MIB)
    base, handle = driver.reserve_addresses(8 * MIB), driver.create_pages(PageLocation(PageKind.DEVICE), 4 * MIB)
    driver.map_pages(base, 4 * MIB, handle, device=0)
    calls: list[Callable[[], object]] = [
        lambda: driver.malloc(0, 0),
        lambda: driver.free(0, 12345),
        lambda: driver.map_pages(base + 2 * MIB, 4 * MIB, handle, device=0),
        lambda: driver.map_pages(base - 2 * MIB, 4 * MIB, handle, device=0),
        lambda: driver.unmap_pages(base, 2 * MIB),
        lambda: driver.release_pages(handle + 1),
        lambda: driver.create_pages(PageLocation(PageKind.DEVICE), 5 * MIB),
    ]
    for call in calls:
        with pytest.raises(DriverError):
            call()
    driver.free(0, 0)
    driver.unmap_pages(base, 4 * MIB)
    driver.release_pages(handle)
    driver.release_addresses(base, 8 * MIB)
    assert driver.memory_info(0).free == 8 * MIB


# -- fragmentation -----------------------------------------------------------------------------------------
LOGS = {
    "plain": TrainingLog(steps=4),
    "checkpointed": TrainingLog(layers=12, checkpointing=True, steps=6),
    "accumulated": TrainingLog(layers=12, accumulate=4, steps=2),
    "streamed": TrainingLog(layers=12, resident=0.0, batch=1, accumulate=4, longest=1024, steps=2),
    "resident": TrainingLog(layers=6, hidden=1024, feed_forward=2816, batch=1, resident=1.0, steps=8),
    "small": TrainingLog(layers=8, hidden=512, feed_forward=1408, heads=8, batch=8, steps=6),
}


@pytest.mark.parametrize("name", LOGS)
def test_training_on_virtual_memory_holds_little_more_than_it_needs(name: str) -> None:
    driver = SizeOnlyDriver(1 << 40)
    pool = DevicePool(driver, 0, 0, maximum=1 << 40, source=VirtualMemory(driver, 0, 1 << 43))
    report = replay(LOGS[name], pool)
    assert report.refused == 0
    assert report.fragmentation is not None
    assert 0 <= report.fragmentation <= 0.10


@pytest.mark.parametrize("name", LOGS)
def test_training_fits_a_slab_that_is_a_tenth_larger(name: str) -> None:
    log = list(LOGS[name])
    live = peak = 0
    for line in log:
        size = align_up(line.nbytes, 256)
        live += size if line.action is TAKE else -size
        peak = max(peak, live)
    pool = DevicePool(SizeOnlyDriver(1 << 40), 0, peak + peak // 10)
    report = replay(log, pool)
    assert (report.refused, report.live_peak) == (0, peak)


def test_training_logs_are_training_logs() -> None:
    """Everything but resident state goes back; sizes differ from step to step."""
    log = TrainingLog(layers=4, steps=4)
    entries = list(log)
    assert entries == list(log)
    taken = {line.id for line in entries if line.action is TAKE}
    given = {line.id for line in entries if line.action is GIVE}
    assert given < taken
    assert len(taken - given) == 2 * len(log.weights) + 2
    assert len({line.nbytes for line in entries}) > 40
    assert {line.stream for line in entries} == {0, 1}
