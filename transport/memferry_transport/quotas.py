"""Shares of a transfer, in whole slices, or in smaller units where a way needs none."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .cost import LinearCost, water_fill

SLOWEST = 0.25  # of the best rate: a way below it holds the others up more than it helps


def worthwhile(costs: Sequence[LinearCost]) -> list[bool]:
    """Which ways are not slower than a quarter of the best."""
    best = max((cost.bytes_per_second for cost in costs), default=0.0)
    return [cost.bytes_per_second >= SLOWEST * best for cost in costs]


def slice_quotas(nbytes: int, costs: Sequence[LinearCost], units: int | Sequence[int]) -> list[int]:
    """Share bytes out so that all ways end together, but for the size of a slice.

    The water-filling is rounded down to slices.  What that leaves goes to the first way, and from there slice by
    slice to whichever other would end first, as long as that lets the whole end earlier.

    Parameters
    ----------
    units : int or sequence of int
        Bytes of a slice, for all ways or for each.

    Returns
    -------
    list of int
        Bytes of each way, together `nbytes`.  All but the first are multiples of the way's slice.
    """
    slices = [units] * len(costs) if isinstance(units, int) else units
    quotas = [int(share // size) * size for share, size in zip(water_fill(nbytes, costs), slices, strict=True)]
    quotas[0] = nbytes - sum(quotas[1:])
    while len(costs) > 1:
        ends = [
            cost.seconds(quota + size) if size <= quotas[0] else math.inf
            for cost, quota, size in zip(costs[1:], quotas[1:], slices[1:], strict=True)
        ]
        soonest = 1 + min(range(len(ends)), key=ends.__getitem__)
        if ends[soonest - 1] >= costs[0].seconds(quotas[0]):
            break
        quotas[0] -= slices[soonest]
        quotas[soonest] += slices[soonest]
    return quotas


def shift(quotas: Sequence[int], slices: Sequence[int], slice_bytes: int) -> list[int]:
    """`quotas` with `slices` more on each way, or fewer; what a way has not got is not taken from it.

    `slices` add up to zero.  The whole stays what it was: what cannot be taken is not given either, from the last
    way on.
    """
    moved = [max(-(quota // slice_bytes), change) for quota, change in zip(quotas, slices, strict=True)]
    excess = sum(moved)
    for index in reversed(range(len(moved))):
        less = min(excess, max(0, moved[index]))
        moved[index] -= less
        excess -= less
    return [quota + change * slice_bytes for quota, change in zip(quotas, moved, strict=True)]


def worth_pulling(
    left: int, own: int, direct: int, slice_bytes: int, relay_cost: LinearCost, direct_cost: LinearCost
) -> bool:
    """Whether a relay ends its next slice before the direct way would end all that is left: the tail guard.

    Parameters
    ----------
    left, own, direct : int
        Slices that nobody has taken, and those under way on the relay and on the direct way.
    """
    relay_s = relay_cost.alpha_s + (own + 1) * slice_bytes / relay_cost.bytes_per_second
    direct_s = direct_cost.alpha_s + (direct + left) * slice_bytes / direct_cost.bytes_per_second
    return relay_s <= direct_s
