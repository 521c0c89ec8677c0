"""What bounds pinned memory, as the process's control groups and limits have it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from memferry_allocator.host.limits import CgroupMemory, cgroup_memory, memlock_limit


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
