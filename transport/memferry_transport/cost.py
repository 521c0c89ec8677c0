"""What a way costs: a start-up time and a rate, and how bytes are shared out over several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearCost:
    """``alpha_s + nbytes / bytes_per_second``: the time of a transfer that has the way to itself.

    Attributes
    ----------
    alpha_s : float
        Seconds before the first byte, and after the last.
    bytes_per_second : float
        The rate of long transfers.
    """

    alpha_s: float
    bytes_per_second: float

    def seconds(self, nbytes: int) -> float:
        return self.alpha_s + nbytes / self.bytes_per_second if nbytes else 0.0

    def bytes_within(self, seconds: float) -> float:
        """How much is over after `seconds`."""
        return self.bytes_per_second * max(0.0, seconds - self.alpha_s)


def relay_cost(first: LinearCost, second: LinearCost, slice_bytes: int) -> LinearCost:
    """Two hops through staging buffers, slice by slice: the slower hop's rate, after both starts and one slice."""
    slower = min(first.bytes_per_second, second.bytes_per_second)
    faster = max(first.bytes_per_second, second.bytes_per_second)
    return LinearCost(first.alpha_s + second.alpha_s + slice_bytes / faster, slower)


def finish_time(nbytes: int, costs: Sequence[LinearCost]) -> float:
    """The earliest time by which all ways together have carried `nbytes`: the level of the water-filling.

    Raises
    ------
    ValueError
        There is no way.
    """
    if not costs:
        raise ValueError("no path to share bytes over")
    rate = started = 0.0  # of the ways taken so far: their rates, and rate times start-up time
    level = 0.0
    for cost in sorted(costs, key=lambda cost: cost.alpha_s):
        if rate and level <= cost.alpha_s:
            break
        rate += cost.bytes_per_second
        started += cost.bytes_per_second * cost.alpha_s
        level = (nbytes + started) / rate
    return level


def water_fill(nbytes: int, costs: Sequence[LinearCost]) -> list[float]:
    """Bytes for each way such that all that carry anything end together."""
    level = finish_time(nbytes, costs)
    return [cost.bytes_within(level) for cost in costs]
