"""Sizes and host ranges of partitions, and how much host memory there may be of them."""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from ..device import ALIGNMENT
from ..driver import Span
from ..errors import InvalidRequestError, OutOfMemory
from ..sizes import align_up, format_size, parse_size

HOST_ALIGNMENT = 16  # the widest element of a kernel
LARGEST = 1 << 60
MOST_PARTITIONS = 1 << 24


class HostBudget:
    """How many bytes of host pages a space may take, and has taken."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0

    def reserve(self, name: str, nbytes: int) -> None:
        self.require(name, nbytes)
        self.used += nbytes

    def require(self, name: str, nbytes: int) -> None:
        """Refuse what does not fit now."""
        if self.limit is not None and self.used + nbytes > self.limit:
            raise OutOfMemory(
                f"buffer {name!r}: asked for {format_size(nbytes)} of host memory, {format_size(self.used)} of "
                f"{format_size(self.limit)} in use; close a buffer, or raise host_budget",
                size=nbytes,
                used=self.used,
                limit=self.limit,
                budget="host budget",
            )


class HostRanges:
    """The host ranges of all buffers of a space: no byte may belong to two partitions."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, what: str, spans: Iterable[Span]) -> None:
        """Take ranges in, all or none."""
        fresh = sorted(spans)
        for one, other in itertools.pairwise(fresh):
            _require_apart(what, one, other)
        for span in fresh:
            index = bisect_left(self._spans, span)
            for neighbour in self._spans[max(index - 1, 0) : index + 1]:
                _require_apart(what, *sorted((span, neighbour)))
        self._spans = sorted(self._spans + fresh)

    def remove(self, spans: Iterable[Span]) -> None:
        gone = set(spans)
        self._spans = [span for span in self._spans if span not in gone]


def _require_apart(what: str, first: Span, second: Span) -> None:
    if first.ptr + first.nbytes > second.ptr:
        raise InvalidRequestError(
            f"{what}: the {second.nbytes} bytes at {second.ptr:#x} overlap {first.nbytes} bytes at "
            f"{first.ptr:#x}; give every partition bytes of its own, and close the buffer that has them first"
        )


def require_fitting(name: str, sizes: Iterable[int], device_budget: int | None) -> None:
    """Refuse empty partitions, and with a budget those that could never have a device copy."""
    for index, size in enumerate(sizes):
        if device_budget is None:
            if size <= 0:
                raise InvalidRequestError(f"buffer {name!r}: partition {index} is empty; give it some bytes")
            continue
        if size <= 0 or align_up(size, ALIGNMENT) > device_budget:
            raise InvalidRequestError(
                f"buffer {name!r}: partition {index} has {format_size(size)}; a partition needs "
                f"more than 0 bytes and, as a multiple of {ALIGNMENT}, at most the device budget, "
                f"{format_size(device_budget)}"
            )


def cut(
    name: str, nbytes: Any, partitions: Any, partition_nbytes: Any, *, device_budget: int, host: HostBudget
) -> list[int]:
    """The sizes of the partitions meant by the arguments of `ShadowSpace.allocate`.

    What the budgets refuse is refused before so many partitions are listed.
    """
    what = f"buffer {name!r}"
    if (nbytes is None) == (partitions is None) or (partition_nbytes is not None and nbytes is None):
        raise InvalidRequestError(
            f"{what}: give nbytes, with partition_nbytes if it is to be cut evenly, or partitions=[sizes]"
        )
    if partitions is not None:
        if not isinstance(partitions, Iterable) or isinstance(partitions, (str, bytes)):
            raise InvalidRequestError(f"{what}: partitions={partitions!r} is no list of sizes; give [sizes]")
        return [_size(size, f"{what}: partition {index}") for index, size in enumerate(partitions)]
    total = 0 if _is_zero(nbytes) else _size(nbytes, f"{what}: nbytes")
    piece = total if partition_nbytes is None else _size(partition_nbytes, f"{what}: partition_nbytes")
    if not total:
        return []
    require_fitting(name, [min(piece, total)], device_budget)
    count = -(-total // piece)
    host.require(name, (count - 1) * (align_up(piece, ALIGNMENT) - piece) + total)
    if count > MOST_PARTITIONS:
        raise InvalidRequestError(f"{what}: {count} partitions, at most {MOST_PARTITIONS}; make them larger")
    return [min(piece, total - start) for start in range(0, total, piece)]


def _size(value: Any, name: str) -> int:
    size = parse_size(value, name=name)
    if size > LARGEST:
        raise InvalidRequestError(f"{name}: {size} bytes are more than any machine has; check the size")
    return size


def _is_zero(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) == 0
    except TypeError:
        return False


def layout(sizes: Iterable[int], alignment: int) -> tuple[list[int], int]:
    """Where partitions of these sizes begin, each aligned, and where the last ends."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(align_up(end, alignment))
        end = offsets[-1] + size
    return offsets, end


def host_span(name: str, index: int, span: Any) -> Span:
    """A range given by the caller of `ShadowSpace.buffer`."""
    try:
        ptr, nbytes = map(operator.index, span)
        sound = 0 < ptr < 1 << 63 and nbytes < LARGEST and not any(isinstance(value, bool) for value in span)
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise InvalidRequestError(f"buffer {name!r}: partition {index} is {span!r}; give a Span(address, bytes)")
    if ptr % HOST_ALIGNMENT:
        raise InvalidRequestError(
            f"buffer {name!r}: partition {index} begins at {ptr:#x}; let it begin at a multiple of "
            f"{HOST_ALIGNMENT}"
        )
    return Span(ptr, nbytes)
