"""Updates of which every rank makes a part: a layer is new when all parts of it are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from memferry_allocator import Event

from ....errors import RankError
from ....native import NativeCalls
from ....updates import UpdateQueue
from ..layer import LayerState
from .new_weights import NewWeights
from .ranks import Ranks


class RankUpdates(UpdateQueue):
    """An `UpdateQueue` that also waits for the other ranks.

    Parameters
    ----------
    ranks : Ranks
    layers : sequence of LayerState
    emulated : bool
        The device does nothing before somebody waits for it.
    options
        As for `UpdateQueue`.

    Attributes
    ----------
    streamed_until : callable
        The event after which what the device makes of a layer's update is at home; None where that is over.
    """

    streamed_until: Callable[[int], Event | None]

    def __init__(
        self, ranks: Ranks, layers: Sequence[LayerState], *, emulated: bool, feeder: bool, **options: Any
    ) -> None:
        super().__init__(max(1, ranks.cores - (2 if feeder else 1)), feeder=feeder, **options)
        self._ranks = ranks
        self._board = ranks.board
        self._emulated = emulated
        self._numbers: dict[int, int] = {}  # of the last update of each layer; all ranks count alike
        self._told: dict[int, int] = {}
        self._across = NewWeights(ranks, layers, self._board.write) if ranks.several_hosts else None
        self._broken = False

    def submit(self, layer: int, pieces: Iterable[Callable[[], None]], end: Callable[[], None]) -> None:
        self._count(layer)
        super().submit(layer, pieces, end)

    def submit_native(self, layer: int, calls: NativeCalls, end: Callable[[], None], *, elements: int) -> None:
        self._count(layer)
        super().submit_native(layer, calls, end, elements=elements)

    def feed(self, layer: int, enqueue: Callable[[], None]) -> None:
        self._count(layer)
        super().feed(layer, enqueue)

    def _count(self, layer: int) -> None:
        self._numbers[layer] = self._numbers.get(layer, 0) + 1
        if self._across is not None:
            self._across.expect(layer)

    def poll(self, layer: int) -> bool:
        self._tell()
        if not self._board.written(layer, self._numbers.get(layer, 0)):
            return False
        return super().poll(layer)

    def wait(self, layer: int) -> None:
        """Block until every rank's part is over; raises what the own first failing piece raised."""
        try:
            super().wait(layer)
        except BaseException as error:
            self._broken = True
            self._ranks.fail(error)
            raise
        self._tell()
        number = self._numbers.get(layer, 0)

        def written() -> bool:
            self._tell()  # while this rank waits, others may wait for what it has ready
            return self._board.written(layer, number)

        try:
            self._board.wait(written, "their parts of an update")
        except RankError as error:
            self._ranks.fail(error)
            raise

    def wait_all(self) -> None:
        super().wait_all()
        for layer in self._numbers:
            self.wait(layer)

    def _tell(self) -> None:
        """Let the others know of every part that is over."""
        for layer, number in () if self._broken else self._numbers.items():
            if self._told.get(layer) == number:
                continue
            update = self._pending.get(layer)
            if (update is None or (update.done() and not update.failed())) and self._at_home(layer):
                self._told[layer] = number
                if self._across is None:
                    self._board.write(layer, number)
                else:
                    self._across.ready(layer, number)
        if self._across is not None:
            with self._ranks.told():
                self._across.go_on()

    def _at_home(self, layer: int) -> bool:
        """Whether the device has sent home what it was to make of a layer's update, all of which is enqueued."""
        until = self.streamed_until(layer)
        if until is None:
            return True
        if self._emulated:
            until.synchronize()
        return until.query()
