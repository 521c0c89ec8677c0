"""What bounds pinned memory, told where pinning fails."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ..driver import Span
from ..errors import DriverError, OutOfMemory, RegistrationError
from ..sizes import format_size

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2**63
_FILES = {True: ("memory.max", "memory.current"), False: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
_ADVICE = {
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "either another library has registered it: ask for "
    "foreign=Foreign.BORROW, or register before it does; or its former owner unmapped the pages without "
    "unregistering them: unregister them there before they are unmapped, or keep the owner with owner=",
    "CUDA_ERROR_INVALID_VALUE": "every byte of it must be mapped, and writable unless read_only=True",
    "CUDA_ERROR_OPERATING_SYSTEM": "raise the lock limit (ulimit -l) or the container's memory limit, or pin less",
    "CUDA_ERROR_OUT_OF_MEMORY": "raise the container's memory limit, free host memory, or pin less",
}


class CgroupMemory(NamedTuple):
    """The tightest memory limit of the control groups that this process is in, and what counts against it."""

    limit: int
    used: int


def memlock_limit() -> int | None:
    """Bytes that this process may lock (RLIMIT_MEMLOCK); None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def cgroup_memory(root: Path = Path("/")) -> CgroupMemory | None:
    """The control group's memory limit, of either version; None without one, or where it cannot be read."""
    found = []
    for folder, second in _cgroup_folders(root):
        limit, used = (_number(folder / name) for name in _FILES[second])
        if limit is not None and limit < _UNLIMITED:
            found.append(CgroupMemory(limit, used or 0))
    return min(found, default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that pages can be made of without swapping; None where that cannot be read.

    Of the control group the limit counts, not what is left of it: files that were read count as used there.
    """
    group = cgroup_memory(root)
    found = [] if group is None else [group.limit]
    lines = _lines(root / "proc/meminfo")
    found.extend(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min(found, default=None)


def require_memory(nbytes: int, what: str) -> None:
    """Refuse to take pages that are not there: the kernel would kill a process for them, this or another one.

    Raises
    ------
    OutOfMemory
        The machine or the container has less.
    """
    available = available_memory()
    if available is not None and nbytes > available:
        raise OutOfMemory(
            f"{what}: asked for {format_size(nbytes)}, this machine or its container has "
            f"{format_size(available)} available; ask for less, or free host memory",
            size=nbytes,
            used=0,
            limit=available,
            budget="host memory",
        )


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of the process's memory control group and of those above it, and whether they are version 2."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        second = controllers == ""
        if not second and "memory" not in controllers.split(","):
            continue
        base = mount if second else mount / "memory"
        group = PurePosixPath(path)
        for part in (group, *group.parents):  # in a container the upper ones may be all that is to be seen
            yield base / str(part).lstrip("/"), second


def _number(path: Path) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def explained(error: DriverError, asked: Span, piece: Span, pinned: int, found: Span | None) -> DriverError:
    """The driver's refusal to pin `piece` of what was asked for, with what bounds it and what to do."""
    advice = _ADVICE.get(error.code)
    if advice is None:
        return error
    locked, group = memlock_limit(), cgroup_memory()
    parts = [f"asked to pin {format_size(asked.nbytes)} ({asked.nbytes} bytes) at {asked.ptr:#x}"]
    if piece != asked:
        parts.append(f"refused at its {piece.nbytes} bytes at {piece.ptr:#x}")
    if found is not None:
        parts.append(f"in the way are {found.nbytes} bytes at {found.ptr:#x} that MemFerry has not registered")
    parts.append(f"{format_size(pinned)} pinned by MemFerry already")
    parts.append(f"lock limit {'none' if locked is None else format_size(locked)}")
    parts.append(
        "no cgroup memory limit"
        if group is None
        else f"cgroup memory limit {format_size(group.limit)}, {format_size(group.used)} of it in use"
    )
    return RegistrationError(
        error.code,
        error.call,
        f"{', '.join(parts)}; {advice}",
        address=asked.ptr,
        nbytes=asked.nbytes,
        pinned=pinned,
        memlock_limit=locked,
        cgroup_limit=None if group is None else group.limit,
    )
