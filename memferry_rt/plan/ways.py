"""The order of a forward or a backward as a recurrence, and the plans that no other plan beats in it.

After DeepPlan and MemFerry, with one difference: instead of a greedy choice, the Pareto front over (end of the
last load, end of the last kernel) is kept for every prefix.  Both grow with both, so that nothing better is lost:
the result equals that of trying all combinations.  Contention between loads and kernels that read host memory is
not in it; the simulator judges what it finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class Way(Enum):
    """How a step gets its weights."""

    LOAD = "load"  # a copy first
    HERE = "here"  # they are in device memory
    DIRECT = "direct"  # kernels read host memory


@dataclass(frozen=True)
class Step:
    """A layer in the order.  Times are seconds.

    Attributes
    ----------
    seconds : float
        With its weights in device memory.
    load : float or None
        Of a copy; None if it may not be loaded.
    direct : float or None
        With its weights in host memory; None if it may not read them there.
    here : bool
        Whether its weights may be in device memory without a load.
    release : float
        When its weights are new at home.
    room : float
        When there is device memory for a load.
    """

    seconds: float
    load: float | None = None
    direct: float | None = None
    here: bool = False
    release: float = 0.0
    room: float = 0.0

    def after(self, way: Way, loaded: float, ended: float) -> tuple[float, float] | None:
        """The ends of the last load and the last kernel, after those before; None if it has no such way."""
        if way is Way.LOAD:
            if self.load is None:
                return None
            loaded = max(loaded, self.release, self.room) + self.load
            return loaded, max(ended, loaded) + self.seconds
        if way is Way.HERE:
            return (loaded, max(ended, self.release) + self.seconds) if self.here else None
        return None if self.direct is None else (loaded, max(ended, self.release) + self.direct)


@dataclass(frozen=True)
class Found:
    """The ways of all steps, and when the last kernel ends by the recurrence."""

    seconds: float
    ways: tuple[Way, ...]


@dataclass(frozen=True)
class _Point:
    loaded: float
    ended: float
    way: Way | None
    before: _Point | None

    def ways(self) -> tuple[Way, ...]:
        found: list[Way] = []
        point: _Point | None = self
        while point is not None and point.way is not None:
            found.append(point.way)
            point = point.before
        return tuple(reversed(found))


def best_ways(steps: Sequence[Step], *, count: int = 1, loaded: float = 0.0, ended: float = 0.0) -> list[Found]:
    """The best ways through a sequence of steps.

    Parameters
    ----------
    steps : sequence of Step
        Each must have a way.
    count : int
        How many to return, at the most: those that end earliest of the last front, the best first.
    loaded, ended : float
        When the link and the compute stream are free.

    Returns
    -------
    list of Found
    """
    front = [_Point(loaded, ended, None, None)]
    for step in steps:
        front = _front(
            _Point(*reached, way, point)
            for point in front
            for way in Way
            if (reached := step.after(way, point.loaded, point.ended)) is not None
        )
    return [Found(point.ended, point.ways()) for point in reversed(front)][:count]


def ends_at(steps: Sequence[Step], ways: Sequence[Way]) -> float:
    """When the last kernel ends by the recurrence; infinity if a step has not its way."""
    loaded = ended = 0.0
    for step, way in zip(steps, ways, strict=True):
        reached = step.after(way, loaded, ended)
        if reached is None:
            return float("inf")
        loaded, ended = reached
    return ended


def _front(points: Iterable[_Point]) -> list[_Point]:
    """Those that no other beats in both, by `loaded` upwards, so by `ended` downwards."""
    front: list[_Point] = []
    for point in sorted(points, key=lambda each: (each.loaded, each.ended)):
        if not front or point.ended < front[-1].ended:
            front.append(point)
    return front
