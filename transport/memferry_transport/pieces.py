"""A transfer as driver copies: regions checked, cut where registrations end, and cut into slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from memferry_allocator import Direction, Driver, RegistrationMap, Span

from .errors import InvalidTransferError


class Piece(NamedTuple):
    """One driver copy."""

    dst: int
    src: int
    nbytes: int


def host_pieces(known: RegistrationMap, dst: Span, src: Span, direction: Direction) -> list[Piece]:
    """A region between host and device as driver copies: none may cross the edge of a registration."""
    if dst.nbytes != src.nbytes or dst.nbytes < 0:
        require_same_size(dst, src, direction.value)
    host = src if direction is Direction.HOST_TO_DEVICE else dst
    if known.is_whole(host.ptr, host.nbytes):
        return [Piece(dst.ptr, src.ptr, dst.nbytes)]
    if not known.covers(host.ptr, host.nbytes):
        raise InvalidTransferError(
            f"{direction.value} copy: the {host.nbytes} host bytes at {host.ptr:#x} are not all registered; "
            "take them from a HostArena, or register them with registrations(driver).register"
        )
    return [
        Piece(dst.ptr + piece.ptr - host.ptr, src.ptr + piece.ptr - host.ptr, piece.nbytes)
        for piece in known.split(host.ptr, host.nbytes)
    ]


def require_same_size(dst: Span, src: Span, what: str) -> None:
    if dst.nbytes != src.nbytes or dst.nbytes < 0:
        raise InvalidTransferError(
            f"{what} copy: source has {src.nbytes} bytes and destination {dst.nbytes}; give two ranges of one size"
        )


def require_apart(regions: Sequence[tuple[Span, Span]]) -> None:
    """Refuse regions of which one writes what another reads or writes: the result would depend on their order."""
    written = _merged(dst for dst, _ in regions)
    shared = overlap(dst for dst, _ in regions) or overlap([*written, *_merged(src for _, src in regions)])
    if shared:
        ranges = ", ".join(f"{src.nbytes} bytes from {src.ptr:#x} to {dst.ptr:#x}" for dst, src in regions[:4])
        raise InvalidTransferError(
            f"d2d copy: source and destination ranges overlap ({ranges}); copy by way of a third range, or one "
            "region after the other"
        )


def overlap(spans: Iterable[tuple[int, int]]) -> bool:
    """Whether any two ``(start, nbytes)`` share a byte."""
    end = 0
    for start, nbytes in sorted(spans):
        if start < end and nbytes:
            return True
        end = max(end, start + nbytes)
    return False


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as ranges that are apart."""
    merged: list[tuple[int, int]] = []
    for start, nbytes in sorted(spans):
        if merged and start <= sum(merged[-1]):
            merged[-1] = (merged[-1][0], max(merged[-1][1], start + nbytes - merged[-1][0]))
        else:
            merged.append((start, nbytes))
    return merged


def inferred(driver: Driver, known: RegistrationMap, regions: Sequence[tuple[Span, Span]]) -> Direction | None:
    """Where regions go from and to, by the first that is not empty; None: from device to device.

    Raises
    ------
    InvalidTransferError
        Both sides are host memory, one is neither registered nor a device's, or there is nothing to tell by.
    """
    for dst, src in regions:
        if not dst.nbytes and not src.nbytes:
            continue
        homes = [known.covers(span.ptr, max(span.nbytes, 1)) for span in (dst, src)]
        if all(homes):
            raise InvalidTransferError(
                f"copy: {src.ptr:#x} and {dst.ptr:#x} are both host memory; the host copies that by itself"
            )
        if any(homes):
            return Direction.DEVICE_TO_HOST if homes[0] else Direction.HOST_TO_DEVICE
        for span in (dst, src):
            if driver.device_of(span.ptr) is None:
                raise InvalidTransferError(
                    f"copy: the {span.nbytes} bytes at {span.ptr:#x} are neither all registered host memory nor "
                    "an allocation of a device; register them, or give the direction"
                )
        return None
    raise InvalidTransferError("copy: no region has any bytes to tell the direction by; give the direction")


def slices(pieces: Iterable[Piece], slice_bytes: int) -> Iterator[Piece]:
    """`pieces` in order, none longer than `slice_bytes`, none over the edge of a piece."""
    for dst, src, nbytes in pieces:
        for offset in range(0, nbytes, slice_bytes):
            yield Piece(dst + offset, src + offset, min(slice_bytes, nbytes - offset))


def deal(pieces: Iterable[Piece], quotas: Sequence[int]) -> list[list[Piece]]:
    """The bytes of `pieces`, in order, as one list for each quota; the quotas add up to them."""
    hands: list[list[Piece]] = [[] for _ in quotas]
    waiting = iter(pieces)
    piece = Piece(0, 0, 0)
    for hand, quota in zip(hands, quotas, strict=True):
        room = quota
        while room:
            if not piece.nbytes:
                piece = next(waiting)
            taken = min(room, piece.nbytes)
            if taken:
                hand.append(Piece(piece.dst, piece.src, taken))
            piece = Piece(piece.dst + taken, piece.src + taken, piece.nbytes - taken)
            room -= taken
    return hands
