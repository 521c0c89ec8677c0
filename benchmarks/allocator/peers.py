"""The same calls on other allocators; each function returns None where its library is not installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from memferry_allocator.device.log import Action, LogEntry

from ..timing import per_call

Pair = Callable[[], object]


def library(name: str) -> ModuleType | None:
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


def torch_pair(nbytes: int) -> Any:
    """``torch.empty`` on the device, and dropping it."""
    import torch

    device = torch.device("cuda", 0)
    return per_call(lambda: torch.empty(nbytes, dtype=torch.uint8, device=device), settle=torch.cuda.synchronize)


def cupy_pair(nbytes: int) -> Any:
    cupy = library("cupy")
    if cupy is None:
        return None
    pool = cupy.cuda.MemoryPool()
    return per_call(lambda: pool.malloc(nbytes), settle=cupy.cuda.runtime.deviceSynchronize)


def rmm_pair(nbytes: int) -> Any:
    rmm = library("rmm")
    if rmm is None:
        return None
    from rmm.pylibrmm.stream import DEFAULT_STREAM

    pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=1 << 30)

    def pair() -> None:
        pool.deallocate(pool.allocate(nbytes, DEFAULT_STREAM), nbytes, DEFAULT_STREAM)

    return per_call(pair)


def torch_reserved(entries: list[LogEntry]) -> int:
    """What torch's caching allocator reserves at the most for a log."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    live = {}
    for entry in entries:
        if entry.action is Action.ALLOCATE:
            live[entry.id] = torch.empty(entry.nbytes, dtype=torch.uint8, device="cuda")
        else:
            del live[entry.id]
    return torch.cuda.max_memory_reserved()


def rmm_reserved(entries: list[LogEntry], first: int) -> int | None:
    """What rmm's pool, begun with `first` bytes, takes from the device at the most for a log."""
    rmm = library("rmm")
    if rmm is None:
        return None
    from rmm.pylibrmm.stream import DEFAULT_STREAM

    counted = rmm.mr.StatisticsResourceAdaptor(rmm.mr.CudaMemoryResource())
    pool = rmm.mr.PoolMemoryResource(counted, initial_pool_size=first)
    live: dict[int, int] = {}
    for entry in entries:
        if entry.action is Action.ALLOCATE:
            live[entry.id] = pool.allocate(entry.nbytes, DEFAULT_STREAM)
        else:
            pool.deallocate(live.pop(entry.id), entry.nbytes, DEFAULT_STREAM)
    return int(counted.allocation_counts.peak_bytes)


def torch_pinned(nbytes: int) -> Any:
    """Seconds of one ``torch.empty(..., pin_memory=True)``, in a process of its own, and what became resident."""
    import time

    import torch

    torch.cuda.init()
    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    before, start = resident(), time.perf_counter()
    kept = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "resident_bytes": resident() - before, "asked_bytes": kept.nbytes}


def resident() -> int:
    """Bytes of this process that are in memory: its own pages and those the driver has pinned for it."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmRSS"].split()[0]) * 1024
