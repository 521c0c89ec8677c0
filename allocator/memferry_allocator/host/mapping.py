"""Whether the pages at an address are still those that were there before.

A device keeps the pages that were registered.  If they are unmapped meanwhile, and others mapped at the same
address, host and device see different memory and no error tells.  A `Witness` remembers what lay under a few
addresses of a range; `Witness.contradiction` says what speaks against it now.  It never accuses pages that are
the same; private anonymous pages that were replaced *and* touched are told by nothing.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from io import RawIOBase
from typing import NamedTuple

from . import libc

SAMPLES = 16
_PRESENT, _SWAPPED = 1 << 63, 1 << 62


class _Sample(NamedTuple):
    page: int
    file: tuple[str, int, int] | None
    present: bool


@dataclass(frozen=True)
class Witness:
    """What lay behind a range when it was registered."""

    start: int
    nbytes: int
    samples: tuple[_Sample, ...]

    @classmethod
    def of(cls, address: int, nbytes: int) -> Witness:
        return cls(address, nbytes, tuple(_look(_pages(address, nbytes))))

    def contradiction(self) -> str:
        """Why these cannot be the same pages; empty if nothing says so."""
        if not libc.is_mapped(self.start, self.nbytes):
            return "its pages were unmapped"
        now = {sample.page: sample for sample in _look([sample.page for sample in self.samples])}
        for before in self.samples:
            after = now.get(before.page)
            if after is None:
                continue
            if before.file != after.file:
                return "its pages were unmapped, and others lie at that address now"
            if before.file is None and before.present and not after.present:
                return "its pages were given up, and others will lie at that address"
        return ""


def _pages(address: int, nbytes: int) -> list[int]:
    """Page addresses spread over the range, its first and last among them."""
    first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
    step = max((last - first) // (SAMPLES - 1), 1)
    return [page * mmap.PAGESIZE for page in sorted({*range(first, last, step), last})]


def _look(pages: list[int]) -> list[_Sample]:
    """What is mapped at each page; those at which nothing is are left out, and all where /proc is closed."""
    found = []
    try:
        with open("/proc/self/maps") as lines, open("/proc/self/pagemap", "rb", buffering=0) as entries:
            remaining = iter(pages)
            page = next(remaining, None)
            for line in lines:
                low, _, rest = line.partition("-")
                end = int(rest[: rest.index(" ")], 16)
                while page is not None and page < end:
                    start = int(low, 16)
                    if page >= start:
                        found.append(_sample(page, page - start, rest, entries))
                    page = next(remaining, None)
                if page is None:
                    break
    except OSError:
        return []
    return found


def _sample(page: int, into: int, line: str, entries: RawIOBase) -> _Sample:
    _, _, offset, device, inode = line.split(maxsplit=5)[:5]
    if inode != "0":
        return _Sample(page, (device, int(inode), int(offset, 16) + into), True)
    entries.seek(page // mmap.PAGESIZE * 8)
    entry = int.from_bytes(entries.read(8) or b"", "little")
    return _Sample(page, None, bool(entry & (_PRESENT | _SWAPPED)))
