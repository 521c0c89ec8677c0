"""Which pages of a hybrid buffer lie where: a plan in pieces, each of one location."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

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


def runs(resident: Resident, nbytes: int, page: int) -> list[tuple[int, int]]:
    """The pages that are on the device, as first and last plus one: in order, none touching another.

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
    if isinstance(resident, Real):
        share = float(resident)
        if not 0 <= share <= 1:
            raise _no_residency(resident)
        end = round(share * (align_up(nbytes, page) // page))
        return [(0, end)] if end else []
    if not isinstance(resident, Iterable):
        raise _no_residency(resident)
    found: list[tuple[int, int]] = []
    for start, end in sorted(_pages_of(span, nbytes, page) for span in resident):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return found


def plan(
    on_device: Iterable[tuple[int, int]], nbytes: int, page: int, device: PageLocation, host: PageLocation
) -> list[Piece]:
    """Cut a buffer of `nbytes` in pieces of pages, of which the runs `on_device` are on the device."""
    pieces, position = [], 0
    for start, end in on_device:
        pieces += [Piece(*cell, host) for cell in _cells(position, start, page)]
        pieces += [Piece(*cell, device) for cell in _cells(start, end, page)]
        position = end
    pieces += [Piece(*cell, host) for cell in _cells(position, align_up(nbytes, page) // page, page)]
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


def _cells(start: int, end: int, page: int) -> Iterator[tuple[int, int]]:
    """Offsets and sizes of the cells that pages from `start` to `end` are cut in."""
    while start < end:
        stop = min(end, (start // CELL + 1) * CELL)
        yield start * page, (stop - start) * page
        start = stop


def _pages_of(span: Any, nbytes: int, page: int) -> tuple[int, int]:
    try:
        offset, size = map(operator.index, span)
    except (TypeError, ValueError):
        raise _no_residency(span) from None
    if offset < 0 or size < 0 or offset + size > nbytes:
        raise InvalidRequestError(f"resident: {size} bytes at {offset} leave a buffer of {nbytes} bytes")
    return offset // page, -(-(offset + size) // page) if size else offset // page


def _no_residency(found: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"resident: {found!r} is not a share of 0 to 1, nor a list of ranges (offset, size)"
    )
