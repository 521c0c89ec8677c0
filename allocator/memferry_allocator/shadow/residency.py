"""Which pages of a hybrid buffer lie where: a plan in pieces, each of one location."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from ..driver import PageKind, PageLocation, Span
from ..errors import InvalidRequestError
from ..sizes import align_up

Resident = float | Sequence[Span]
CELL = 32  # pieces end at multiples of so many pages, so that moving an edge moves few bytes


class Piece(NamedTuple):
    """Neighbouring pages of one location."""

    offset: int
    nbytes: int
    location: PageLocation


def plan(resident: Resident, nbytes: int, page: int, device: PageLocation, host: PageLocation) -> list[Piece]:
    """Cut a buffer of `nbytes` in pieces of pages.

    Parameters
    ----------
    resident : float or sequence of Span
        The share of the buffer that is on the device, from its start on, or the byte ranges (offset, size); a
        page that is touched by one is on the device whole.

    Raises
    ------
    InvalidRequestError
        The share is not 0 to 1, or a range leaves the buffer.
    """
    count = align_up(nbytes, page) // page
    wanted = _pages(resident, nbytes, page, count)
    pieces = []
    for (on_device, _), run in groupby(range(count), key=lambda index: (wanted[index], index // CELL)):
        pages = list(run)
        pieces.append(Piece(pages[0] * page, len(pages) * page, device if on_device else host))
    return pieces


def resident_ranges(pieces: Iterable[Piece], nbytes: int) -> tuple[Span, ...]:
    """The byte ranges on the device, as long as can be."""
    ranges: list[Span] = []
    for piece in sorted(pieces):
        if piece.location.kind is PageKind.HOST:
            continue
        size = min(piece.nbytes, nbytes - piece.offset)
        if ranges and ranges[-1].ptr + ranges[-1].nbytes == piece.offset:
            ranges[-1] = Span(ranges[-1].ptr, ranges[-1].nbytes + size)
        else:
            ranges.append(Span(piece.offset, size))
    return tuple(ranges)


def _pages(resident: Resident, nbytes: int, page: int, count: int) -> list[bool]:
    if isinstance(resident, (int, float)):
        if not 0 <= resident <= 1:
            raise InvalidRequestError(f"resident: {resident} is not a share of 0 to 1, nor a list of ranges")
        on_device = round(resident * count)
        return [index < on_device for index in range(count)]
    wanted = [False] * count
    for offset, size in resident:
        if offset < 0 or size < 0 or offset + size > nbytes:
            raise InvalidRequestError(f"resident: {size} bytes at {offset} leave a buffer of {nbytes} bytes")
        for index in range(offset // page, -(-(offset + size) // page) if size else 0):
            wanted[index] = True
    return wanted
