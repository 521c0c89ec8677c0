"""Whether a plan keeps what it promised: measured against the plain one first, and watched later."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.1
PATIENCE = 3  # iterations in a row that must be off before it is no accident


def is_faster(candidate: Sequence[float], baseline: Sequence[float]) -> bool:
    """Whether a plan's iterations were shorter than those of the plain one, by their medians.

    Parameters
    ----------
    candidate, baseline : sequence of float
        Seconds of iterations, measured in turns so that what changes with time hits both.

    Raises
    ------
    ValueError
        One of them is empty.
    """
    if not candidate or not baseline:
        raise ValueError("both must have been measured")
    return statistics.median(candidate) < statistics.median(baseline)


@dataclass
class DriftWatch:
    """Says when iterations take so much longer or shorter than expected that a new plan is due.

    Attributes
    ----------
    expected : float
        Seconds of an iteration, as measured when the plan was accepted.
    tolerance : float
        How far off an iteration may be, as a share of it.
    patience : int
        Iterations in a row that must be off, all to the same side.
    """

    expected: float
    tolerance: float = TOLERANCE
    patience: int = PATIENCE
    _off: int = 0

    def learn(self, seconds: float) -> bool:
        """Take an iteration in; whether a new plan is due."""
        change = seconds / self.expected - 1
        side = 0 if abs(change) <= self.tolerance else (1 if change > 0 else -1)
        same = side != 0 and self._off * side >= 0
        self._off = self._off + side if same else side
        return abs(self._off) >= self.patience
