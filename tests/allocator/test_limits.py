"""What bounds pinned memory, as the process's control groups and limits have it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from memferry_allocator import Driver, EmulatedDriver, HostArena, OutOfMemory, SharedArena
from memferry_allocator.host import libc, limits
from memferry_allocator.host.limits import CgroupMemory, available_memory, cgroup_memory, memlock_limit


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A file system that says so."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


V2 = {
    "sys/fs/cgroup/memory.max": "max",
    "sys/fs/cgroup/a/memory.max": "5000",
    "sys/fs/cgroup/a/memory.current": "300",
    "sys/fs/cgroup/a/b/memory.max": "7000",
    "sys/fs/cgroup/a/b/memory.current": "200",
}
V1 = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4000",
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "100",
}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b", V2, CgroupMemory(5000, 300)),  # a group's limit holds for those inside
        ("0::/a", {**V2, "sys/fs/cgroup/a/memory.max": "max"}, None),
        ("0::/elsewhere", {"sys/fs/cgroup/memory.max": "600", "sys/fs/cgroup/memory.current": "5"}, (600, 5)),
        ("4:cpu,memory:/a\n3:cpuset:/\n0::/", V1, CgroupMemory(4000, 100)),
        ("4:memory:/outside/of/the/container", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "80"}, (80, 0)),
        ("4:memory:/", V1, None),  # as version 1 writes "no limit"
        ("3:cpuset:/", V1, None),
        ("0::/", {}, None),
    ],
)
def test_the_tightest_limit(
    tmp_path: Path, groups: str, files: dict[str, str], expected: tuple[int, int] | None
) -> None:
    assert cgroup_memory(machine(tmp_path, groups, files)) == expected


def test_no_control_groups(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path) is None


def test_the_lock_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, 1))
    assert memlock_limit() is None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 << 10, resource.RLIM_INFINITY))
    assert memlock_limit() == 64 << 10


@pytest.mark.parametrize(
    ("limit", "available", "expected"),
    [("max", 9, 9 << 10), ("5000", 9, 5000), ("50000", 9, 9 << 10), ("5000", None, 5000), ("max", None, None)],
)
def test_available_memory(tmp_path: Path, limit: str, available: int | None, expected: int | None) -> None:
    files = {"sys/fs/cgroup/memory.max": limit, "sys/fs/cgroup/memory.current": "4999"}
    if available is not None:
        files["proc/meminfo"] = f"MemTotal: 99 kB\nMemAvailable:  {available} kB"
    assert available_memory(machine(tmp_path, "0::/", files)) == expected


@pytest.mark.parametrize("make", [HostArena, SharedArena.create])
def test_pages_that_are_not_there_are_never_touched(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Driver, int], object]
) -> None:
    """The kernel would give them out until it kills somebody for them."""
    monkeypatch.setattr(limits, "available_memory", lambda: 1 << 20)
    for taken in ("map_anonymous", "map_shared"):
        monkeypatch.setattr(libc, taken, None)
    monkeypatch.setattr(os, "memfd_create", None)
    with pytest.raises(OutOfMemory, match=r"1\.00 MiB available; ask for less") as caught:
        make(EmulatedDriver(), (1 << 20) + 1)
    error = caught.value
    assert (error.limit, error.budget) == (1 << 20, "host memory")
