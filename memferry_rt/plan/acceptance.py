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


ROUNDS = 3  # of both, in turns
STEPS = 3  # of one at a time, the first of which brings weights and state where they belong, and does not count


class Acceptance:
    """Tries a plan against the plain one in turns, keeps the faster, and tries again when iterations drift.

    Parameters
    ----------
    rounds : int
        How often each is tried.
    steps : int
        Iterations at a time, 2 or more.

    Attributes
    ----------
    planned : bool
        Whether the next iteration shall be by the plan.
    trials : int
        Begun so far.
    """

    def __init__(self, rounds: int = ROUNDS, steps: int = STEPS) -> None:
        self._rounds = rounds
        self._steps = steps
        self.trials = 0
        self.planned = True
        self._done = 0
        self._taken: dict[bool, list[float]] = {}
        self._watch: DriftWatch | None = None
        self._begin()

    def learn(self, seconds: float) -> None:
        """Take in what the last iteration took; `planned` says what the next one shall be by."""
        if self._watch is not None:
            if self._watch.learn(seconds):
                self._begin()
            return
        if self._done % self._steps:
            self._taken[self.planned].append(seconds)
        self._done += 1
        if self._done == 2 * self._rounds * self._steps:
            self._settle()
        elif self._done % self._steps == 0:
            self.planned = not self.planned

    @property
    def settled(self) -> bool:
        """Whether the faster is known."""
        return self._watch is not None

    def _begin(self) -> None:
        self.planned = True
        self.trials += 1
        self._done = 0
        self._taken = {True: [], False: []}
        self._watch = None

    def _settle(self) -> None:
        self.planned = is_faster(self._taken[True], self._taken[False])
        self._watch = DriftWatch(statistics.median(self._taken[self.planned]))
