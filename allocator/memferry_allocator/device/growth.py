"""How much a pool asks its source for."""

from __future__ import annotations

from ..sizes import align_up

KIB, MIB = 1 << 10, 1 << 20


def segment_size(size: int, granularity: int, *, joins: bool) -> int:
    """Bytes of the next segment, for a request that lacks `size` bytes.

    Where segments join, nothing is gained by more than what is needed.  Where they do not, a request has a
    segment to itself if it is large, and shares one with its like if it is not.
    """
    if joins:
        return align_up(size, granularity)
    if size <= MIB:
        wanted = 2 * MIB
    elif size <= 10 * MIB:
        wanted = 20 * MIB
    else:
        wanted = align_up(size, 2 * MIB)
    return align_up(wanted, granularity)
