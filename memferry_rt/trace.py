"""Which layer is needed when: the order of the last iteration, as a forecast of this one.

A forecast decides only what is loaded early and what is evicted first.  A model that skips layers, calls them
twice or changes its order stays right; it only waits more often.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

NEVER = 1 << 60


class Use(NamedTuple):
    """One use of a layer, in forward or in backward."""

    layer: int
    backward: bool


class AccessTrace:
    """Forecasts the use of layers 0 … n-1 within one iteration, from one update to the next.

    Parameters
    ----------
    layers : int
    loads : callable, optional
        Whether a layer is in device memory for a use in forward or in backward; always, by default.
    """

    def __init__(self, layers: int, loads: Callable[[int, bool], bool] | None = None) -> None:
        self.loads = loads or (lambda layer, backward: True)
        self._forecast: Sequence[Use] = ()
        self._positions: dict[int, list[int]] = {}
        self._loading: dict[int, list[int]] = {}
        self._seen: list[Use] = []
        self._next = 0
        self._adopt([*(Use(i, False) for i in range(layers)), *(Use(i, True) for i in reversed(range(layers)))])

    def use(self, layer: int, *, backward: bool = False) -> bool:
        """A layer is being used now; whether it is another one than the last time, or used otherwise."""
        use = Use(layer, backward)
        if self._seen:
            last = self._seen[-1]
            if last.layer == layer and self.loads(*last) == self.loads(*use):
                return False
        self._seen.append(use)
        found = self._after(self._positions, layer)
        if found is not None:
            self._next = found + 1
        return True

    def next_use(self, layer: int) -> int:
        """How many uses of layers lie before this one must be in device memory again; NEVER if it need not."""
        found = self._after(self._loading, layer)
        return NEVER if found is None else found - self._next

    def upcoming(self) -> Iterator[int]:
        """The layers in the order in which they must be in device memory next, each once."""
        told = set()
        for use in self._forecast[self._next :]:
            if use.layer not in told and self.loads(*use):
                told.add(use.layer)
                yield use.layer

    def end_iteration(self) -> None:
        """An update has been made: what was seen since the last one is the new forecast."""
        if self._seen:
            self._adopt(self._seen)
        self._seen = []
        self._next = 0

    def replan(self) -> None:
        """What `loads` says has changed."""
        self._adopt(self._forecast)

    def _after(self, places: dict[int, list[int]], layer: int) -> int | None:
        positions = places.get(layer, [])
        index = bisect.bisect_left(positions, self._next)
        return positions[index] if index < len(positions) else None

    def _adopt(self, forecast: Sequence[Use]) -> None:
        self._forecast = forecast
        self._positions, self._loading = {}, {}
        for position, use in enumerate(forecast):
            self._positions.setdefault(use.layer, []).append(position)
            if self.loads(*use):
                self._loading.setdefault(use.layer, []).append(position)
