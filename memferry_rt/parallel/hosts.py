"""Which processes are on one host, and whether they still live."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

HOST = "MEMFERRY_HOST"  # environment: makes hosts of what is one machine, for tests


def host_key() -> str:
    """The same for processes that can share memory: of one boot, and of one process namespace."""
    named = os.environ.get(HOST, "")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{named or platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of this host; a later one with the same number is another."""

    pid: int
    started: int

    @classmethod
    def own(cls) -> ProcessIdentity:
        pid = os.getpid()
        return cls(pid, _started(pid))

    @property
    def alive(self) -> bool:
        return _started(self.pid) == self.started


def _started(pid: int) -> int:
    """When a process was started, in clock ticks since boot; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *rest = text.rpartition(")")[2].split()  # its name may hold anything
    return 0 if state in "ZX" else int(rest[18])
