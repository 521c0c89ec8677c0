"""Which ways may carry data: errors counted, bad ways left alone for a while, edges checked before use."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..paths import Path

ERRORS, WITHIN_S = 3, 10.0  # so many errors in so many seconds ...
FIRST_BACK_OFF_S = 30.0  # ... and the way is left alone for so long, then twice as long, and so on


class Edge(NamedTuple):
    """One direction of one link; None is the host.

    Attributes
    ----------
    by : int, optional
        The device whose kernel carries the bytes over its links, from end to end; None: a driver copy.
    """

    source: int | None
    target: int | None
    by: int | None = None

    def __str__(self) -> str:
        text = " -> ".join("host" if end is None else f"device {end}" for end in (self.source, self.target))
        return text if self.by is None else f"{text} by a kernel of device {self.by}"


Way = Path | Edge  # a path to the host, or the link from one device to another


@dataclass
class _State:
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=ERRORS))
    total: int = 0
    until: float = -math.inf
    back_off_s: float = FIRST_BACK_OFF_S
    reason: str = ""


@dataclass(frozen=True)
class PathHealth:
    """One way, as `TransferEngine.health` shows it.

    Attributes
    ----------
    errors : int
        Of the engine's life.
    usable_in_s : float
        Seconds until it may carry data; 0: now; infinite: never again.
    reason : str
        Of the last error.
    """

    path: Way
    errors: int
    usable_in_s: float
    reason: str

    def __str__(self) -> str:
        if not self.errors:
            return f"{self.path}: well"
        left = self.usable_in_s
        state = "in use" if not left else "lost" if math.isinf(left) else f"left alone for {left:.0f} s"
        return f"{self.path}: {state}, {self.errors} error(s), the last: {self.reason}"


@dataclass(frozen=True)
class HealthReport:
    """What an engine knows of its ways; `str` gives one line a way."""

    paths: tuple[PathHealth, ...]
    verified: tuple[Edge, ...]

    def __str__(self) -> str:
        lines = [str(path) for path in self.paths]
        lines.append("verified: " + (", ".join(str(edge) for edge in self.verified) or "no edge yet"))
        return "\n".join(lines)


class Health:
    """The ways of one engine.  Thread-safe.

    Parameters
    ----------
    clock : callable
        Seconds, from any start.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states: dict[Way, _State] = {}
        self._verified: set[Edge] = set()
        self._lock = threading.Lock()

    def usable(self, path: Way) -> bool:
        """Whether a way may carry data now, its edges being verified."""
        state = self._states.get(path)
        return state is None or state.until <= self._clock()

    def failed(self, path: Way, reason: str) -> None:
        """Count an error; the third in ten seconds leaves the way alone."""
        with self._lock:
            state, now = self._states.setdefault(path, _State()), self._clock()
            state.total += 1
            state.reason = reason
            state.errors.append(now)
            if len(state.errors) == ERRORS and now - state.errors[0] <= WITHIN_S:
                self._leave(path, state, now)

    def suspend(self, path: Way, reason: str) -> None:
        """Leave a way alone at once: it gave wrong bytes, is far too slow, or has no memory."""
        with self._lock:
            state = self._states.setdefault(path, _State())
            state.total += 1
            state.reason = reason
            self._leave(path, state, self._clock())

    def lost(self, path: Way, reason: str) -> None:
        """Never use a way again: its device is gone."""
        with self._lock:
            state = self._states.setdefault(path, _State())
            state.total += 1
            state.reason = reason
            state.until = math.inf

    def _leave(self, path: Way, state: _State, now: float) -> None:
        state.until = max(state.until, now + state.back_off_s)
        state.back_off_s *= 2
        state.errors.clear()
        # What carried wrong bytes is looked at again before it carries more.
        if isinstance(path, Edge):
            self._verified = self._verified - {path}
        elif path.helper is not None:
            self._verified = {edge for edge in self._verified if path.helper not in edge}

    def is_verified(self, *edges: Edge) -> bool:
        return self._verified.issuperset(edges)

    def verified(self, *edges: Edge) -> None:
        """Note that a pattern came over each of `edges` as it was."""
        with self._lock:
            self._verified = self._verified | set(edges)

    def report(self, paths: list[Path]) -> HealthReport:
        """`paths`, and every other way that ever failed."""
        now = self._clock()
        with self._lock:
            known: dict[Way, _State] = {path: self._states.get(path, _State()) for path in (*paths, *self._states)}
            order = sorted(self._verified, key=lambda edge: [-1 if end is None else end for end in edge])
        found = tuple(
            PathHealth(path, state.total, max(0.0, state.until - now), state.reason)
            for path, state in known.items()
        )
        return HealthReport(found, tuple(order))
