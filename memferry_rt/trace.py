"""Which layer is needed when: the order of the last iteration, as a forecast of this one.

A forecast decides only what is loaded early and what is evicted first.  A model that skips layers, calls them
twice or changes its order stays right; it only waits more often.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

NEVER = 1 << 60


class AccessTrace:
    """Forecasts the use of layers 0 … n-1 within one iteration, from one update to the next."""

    def __init__(self, layers: int) -> None:
        forward = list(range(layers))
        self._forecast: Sequence[int] = ()
        self._positions: dict[int, list[int]] = {}
        self._seen: list[int] = []
        self._next = 0
        self._adopt(forward + forward[::-1])

    def use(self, layer: int) -> bool:
        """A layer is being used now; whether it is another one than the last time."""
        if self._seen and self._seen[-1] == layer:
            return False
        self._seen.append(layer)
        found = self._after(layer)
        if found is not None:
            self._next = found + 1
        return True

    def next_use(self, layer: int) -> int:
        """How many uses of layers lie before the next use of this one; NEVER if there is none."""
        found = self._after(layer)
        return NEVER if found is None else found - self._next

    def upcoming(self) -> Iterator[int]:
        """The layers in the order in which they are needed next, each once."""
        told = set()
        for layer in self._forecast[self._next :]:
            if layer not in told:
                told.add(layer)
                yield layer

    def first_uses(self) -> list[int]:
        """The layers used in this iteration so far, each once, in the order of their first use."""
        return list(dict.fromkeys(self._seen))

    def end_iteration(self) -> None:
        """An update has been made: what was seen since the last one is the new forecast."""
        if self._seen:
            self._adopt(self._seen)
        self._seen = []
        self._next = 0

    def _after(self, layer: int) -> int | None:
        positions = self._positions.get(layer, [])
        index = bisect.bisect_left(positions, self._next)
        return positions[index] if index < len(positions) else None

    def _adopt(self, forecast: Sequence[int]) -> None:
        self._forecast = forecast
        self._positions = {}
        for position, layer in enumerate(forecast):
            self._positions.setdefault(layer, []).append(position)
