"""Updates of which every rank makes a part: a layer is new when all parts of it are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ....native import NativeCalls
from ....parallel import Board
from ....updates import UpdateQueue


class RankUpdates(UpdateQueue):
    """An `UpdateQueue` that also waits for the other ranks.

    Parameters
    ----------
    board : Board
    options
        As for `UpdateQueue`.
    """

    def __init__(self, board: Board, **options: Any) -> None:
        super().__init__(**options)
        self._board = board
        self._numbers: dict[int, int] = {}  # of the last update of each layer; all ranks count alike
        self._told: dict[int, int] = {}
        self._broken = False

    def submit(self, layer: int, pieces: Iterable[Callable[[], None]], end: Callable[[], None]) -> None:
        self._count(layer)
        super().submit(layer, pieces, end)

    def submit_native(self, layer: int, calls: NativeCalls, end: Callable[[], None], *, elements: int) -> None:
        self._count(layer)
        super().submit_native(layer, calls, end, elements=elements)

    def _count(self, layer: int) -> None:
        self._numbers[layer] = self._numbers.get(layer, 0) + 1

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
            self._board.fail(error)
            raise
        self._tell()
        number = self._numbers.get(layer, 0)

        def written() -> bool:
            self._tell()  # while this rank waits, others may wait for what it has ready
            return self._board.written(layer, number)

        self._board.wait(written, "their parts of an update")

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
            if update is None or (update.done() and not update.failed()):
                self._told[layer] = number
                self._board.write(layer, number)
