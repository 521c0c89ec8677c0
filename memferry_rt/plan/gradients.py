"""Which gradients stay on the device and which are written to host memory by the kernels that make them.

The dynamic program of MemFerry's gradient offload, in two versions.  Both choose, within a limit on the bytes of
gradients on the device, what costs least; the first knows what each gradient costs, the second also when its copy
would leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SMALLEST_UNIT = 1 << 20
MOST_UNITS = 4096
Taken = NDArray[np.bool_]
MOST_POINTS = 256  # of a front, in the version with time


@dataclass(frozen=True)
class Gradient:
    """A layer's gradient, in the order of backward.  Times are seconds.

    Attributes
    ----------
    nbytes : int
    kept : float
        Of the backward that writes it to device memory.
    inplace : float or None
        Of the backward that writes it to host memory; None if it may not.
    copy : float
        Of copying it home.
    """

    nbytes: int
    kept: float
    inplace: float | None
    copy: float = 0.0

    def cost(self, exposed: float = 0.0) -> float | None:
        """What writing it to host memory costs more; `exposed` is how much of its copy nothing hides."""
        return None if self.inplace is None else max(0.0, self.inplace - self.kept - exposed)


@dataclass(frozen=True)
class Offload:
    """Which gradients are written to host memory.

    Attributes
    ----------
    inplace : tuple of bool
    seconds : float
        Added to backward, or, in the version with time, when the last copy and the last kernel are over.
    device_nbytes : int
        Of gradients that stay on the device, or, in the version with time, the most at one moment.
    """

    inplace: tuple[bool, ...]
    seconds: float
    device_nbytes: int


def device_limit(gradients: Sequence[Gradient], reserve: float) -> int:
    """Bytes that may stay on the device by a reserve factor: the share of all gradients, 0 to 1."""
    if not 0 <= reserve <= 1:
        raise ValueError(f"reserve: {reserve} is not a share from 0 to 1")
    return int(reserve * sum(gradient.nbytes for gradient in gradients))


def offload_gradients(
    gradients: Sequence[Gradient], limit: int, *, exposed: Sequence[float] = (), unit: int | None = None
) -> Offload | None:
    """Keep at most `limit` bytes on the device, at the least cost.

    Parameters
    ----------
    gradients : sequence of Gradient
    limit : int
    exposed : sequence of float
        Of each gradient, how much of the copy that it saves would be exposed; nothing by default.
    unit : int, optional
        Bytes that the program counts in.  What each gradient frees is rounded down to it and what is needed
        rounded up, so that no more stays than `limit`.

    Returns
    -------
    Offload or None
        None if not enough of them may be written to host memory.
    """
    total = sum(gradient.nbytes for gradient in gradients)
    unit = unit or max(SMALLEST_UNIT, total // MOST_UNITS)
    need = max(0, -(-(total - limit) // unit))
    exposed = exposed or [0.0] * len(gradients)
    costs = [gradient.cost(out) for gradient, out in zip(gradients, exposed, strict=True)]
    best = np.full(need + 1, np.inf)
    best[0] = 0.0
    places = np.arange(need + 1)
    taken: list[Taken] = []
    for gradient, cost in zip(gradients, costs, strict=True):
        row = np.zeros(need + 1, dtype=bool)
        frees = gradient.nbytes // unit
        if cost is not None and frees:
            with_it = best[np.maximum(0, places - frees)] + cost
            row[1:] = with_it[1:] < best[1:]
            best = np.where(row, with_it, best)
        taken.append(row)
    if not np.isfinite(best[need]):
        return None
    chosen, freed = [False] * len(gradients), need
    for number in range(len(gradients) - 1, -1, -1):
        if taken[number][freed]:
            chosen[number] = True
            freed = max(0, freed - gradients[number].nbytes // unit)
    stays = sum(gradient.nbytes for gradient, out in zip(gradients, chosen, strict=True) if not out)
    return Offload(tuple(chosen), float(best[need]), stays)


@dataclass(frozen=True)
class _State:
    """After some gradients: when kernel and copy engine are free, and which gradients still leave until when."""

    ended: float
    copied: float
    leaving: tuple[tuple[float, int], ...]
    peak: int
    inplace: tuple[bool, ...]

    @property
    def live(self) -> int:
        return sum(nbytes for _, nbytes in self.leaving)


def offload_in_time(gradients: Sequence[Gradient], limit: int) -> Offload | None:
    """The version that knows the pipeline: gradients leave by a copy engine, in turn, and are live until then.

    A kernel whose gradient has no room within `limit` waits until earlier ones have left.  A state is dropped if
    another is no later in both and has no more bytes live at any moment from there on.

    Returns
    -------
    Offload or None
        The earliest end of both; None if a gradient that must be kept is larger than `limit`.
    """
    states = [_State(0.0, 0.0, (), 0, ())]
    for gradient in gradients:
        reached = []
        for state in states:
            if gradient.inplace is not None:
                reached.append(_written(state, gradient, gradient.inplace))
            if gradient.nbytes <= limit:
                reached.append(_kept(state, gradient, limit))
        states = _undominated(reached)
        if not states:
            return None
    best = min(states, key=lambda state: (max(state.ended, state.copied), sum(state.inplace)))
    return Offload(best.inplace, max(best.ended, best.copied), best.peak)


def _written(state: _State, gradient: Gradient, seconds: float) -> _State:
    ended = state.ended + seconds
    leaving = tuple((end, nbytes) for end, nbytes in state.leaving if end > ended)
    return _State(ended, state.copied, leaving, state.peak, (*state.inplace, True))


def _kept(state: _State, gradient: Gradient, limit: int) -> _State:
    begin, leaving = state.ended, list(state.leaving)
    leaving = [(end, nbytes) for end, nbytes in leaving if end > begin]
    while sum(nbytes for _, nbytes in leaving) + gradient.nbytes > limit:
        begin = max(begin, leaving.pop(0)[0])
    live = sum(nbytes for _, nbytes in leaving) + gradient.nbytes
    ended = begin + gradient.kept
    copied = max(ended, state.copied) + gradient.copy
    later = [(end, nbytes) for end, nbytes in (*leaving, (copied, gradient.nbytes)) if end > ended]
    return _State(ended, copied, tuple(later), max(state.peak, live), (*state.inplace, False))


def _undominated(states: list[_State]) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states, key=lambda each: (each.ended, each.copied, each.live)):
        if not any(_beats(other, state) for other in kept):
            kept.append(state)
    return kept[:MOST_POINTS]


def _beats(first: _State, second: _State) -> bool:
    """Whether the first is at least as good whatever follows: earlier, and never with more bytes live."""
    if first.ended > second.ended or first.copied > second.copied:
        return False
    times = (second.ended, *(end for end, _ in second.leaving))
    return all(_live_after(first, time) <= _live_after(second, time) for time in times)


def _live_after(state: _State, time: float) -> int:
    return sum(nbytes for end, nbytes in state.leaving if end > time)
