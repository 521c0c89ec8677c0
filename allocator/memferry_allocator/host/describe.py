"""What of this process's host memory is pinned, by whom, and since when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..driver import Driver
from ..sizes import format_size
from .registration import all_maps


@dataclass(frozen=True)
class PinnedRange:
    """One registered range.

    Attributes
    ----------
    driver : str
        Name of the driver that it is registered with.
    address, nbytes : int
    names : tuple of str
        Who has registered it: one name a reference.
    owner : str
        The type of what its pages depend on; empty if nobody said.
    since : float
        When it was registered, in seconds since the epoch.
    read_only : bool
        Devices only read it.
    borrowed : bool
        Somebody else has registered it, and will unregister it.
    references : int
        Registrations that are open on it; 0 after an undo that the driver refused.
    stale : str
        Why devices may see other pages than the host does; empty if nothing says so.
    """

    driver: str
    address: int
    nbytes: int
    names: tuple[str, ...]
    owner: str
    since: float
    read_only: bool
    borrowed: bool
    references: int
    stale: str


@dataclass(frozen=True)
class PinnedMemory:
    """The pinned host ranges of a process, in order of address; ``str()`` makes a table of it."""

    rows: tuple[PinnedRange, ...]

    def __iter__(self) -> Iterator[PinnedRange]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes that MemFerry has pinned; borrowed ones are their owner's."""
        return sum(row.nbytes for row in self.rows if not row.borrowed)

    def __str__(self) -> str:
        head = ("driver", "address", "size", "references", "since", "by", "owner", "notes")
        table = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(head))]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        return "\n".join([*lines, f"{len(self.rows)} ranges, {format_size(self.nbytes)} pinned by MemFerry"])


def describe(driver: Driver | None = None) -> PinnedMemory:
    """What is pinned through MemFerry in this process now, with every driver or one.

    Returns
    -------
    PinnedMemory
        A value: it does not follow what happens later.
    """
    rows = [
        PinnedRange(
            driver=known.driver.name,
            address=chunk.start,
            nbytes=chunk.nbytes,
            names=tuple(sorted(hold.name or "unnamed" for hold in chunk.holders)),
            owner="" if chunk.owner is None else type(chunk.owner).__name__,
            since=chunk.since,
            read_only=chunk.read_only,
            borrowed=chunk.borrowed,
            references=len(chunk.holders),
            stale=why,
        )
        for known in all_maps()
        if driver is None or known.driver is driver
        for chunk, why in known.snapshot()
    ]
    return PinnedMemory(tuple(sorted(rows, key=lambda row: row.address)))


def _cells(row: PinnedRange) -> tuple[str, ...]:
    notes = ["read-only"] * row.read_only + ["borrowed"] * row.borrowed
    if row.stale:
        notes.append(f"stale: {row.stale}")
    return (
        row.driver,
        f"{row.address:#x}",
        format_size(row.nbytes),
        str(row.references),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.since)),
        ", ".join(row.names) or "nobody",
        row.owner or "-",
        ", ".join(notes),
    )
