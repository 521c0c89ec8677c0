"""A board in shared memory on which the ranks of one host keep step.

Ranks are numbered within the host here, but for what people read.  Every rank writes only into its own rows; a row
is read once its number says that it is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import RankError
from .hosts import ProcessIdentity
from .words import SharedWords

GOING, FAILED, LEFT = 0, 1, 2
_NUMBER, _STATE, _PID, _STARTED, _LENGTH = range(5)
_HEAD = 8  # words: a cache line
_TEXT = 64  # words for why a rank has failed
_SPINS = 50
_SHORTEST, _LONGEST = 20e-6, 2e-4  # seconds between two looks; a layer is waited for some twenty times a step
_LOOK_AFTER = 0.05  # seconds between two looks at whether the others live


@dataclass(frozen=True)
class BoardLayout:
    """How the words lie.

    Attributes
    ----------
    ranks, layers : int
    message : int
        Words of the longest message.
    """

    ranks: int
    layers: int
    message: int

    @property
    def row(self) -> int:
        words = _HEAD + _TEXT + 2 * self.message + self.layers
        return -(-words // _HEAD) * _HEAD

    @property
    def nbytes(self) -> int:
        return self.ranks * self.row * 8


class Board:
    """One rank's view of the board.  One thread uses it at a time.

    Parameters
    ----------
    words : SharedWords
        As many as `layout` says, zero before anybody uses them.
    layout : BoardLayout
    rank : int
        On this host.
    timeout : float
        Seconds after which a rank that does not come is given up.
    first : int
        The number that this host's first rank has among those of all hosts; what people read has such numbers.
    elsewhere : callable, optional
        Why a rank of another host cannot go on, if one cannot; asked again and again, and with True where it
        matters to know now.
    """

    def __init__(
        self,
        words: SharedWords,
        layout: BoardLayout,
        rank: int,
        timeout: float,
        *,
        first: int = 0,
        elsewhere: Callable[[bool], str | None] = lambda _: None,
    ) -> None:
        self._words = words
        self._layout = layout
        self._rank = rank
        self._timeout = timeout
        self._first = first
        self._elsewhere = elsewhere
        self._number = 0
        me = ProcessIdentity.own()
        words.store(self._at(rank, _PID), me.pid)
        words.store(self._at(rank, _STARTED), me.started)
        self._looked = 0.0

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self._layout.ranks) if rank != self._rank]

    # -- messages -------------------------------------------------------------------------------------
    def gather(self, message: Sequence[int] | npt.NDArray[np.int64], what: str) -> list[npt.NDArray[np.int64]]:
        """Every rank's message, by rank; blocks until each has given its own.

        It is a fence, too: what a rank wrote to shared memory before is seen by all behind it.

        Parameters
        ----------
        message : sequence of int
            As long on every rank.
        what : str
            For the error: what the others are waited for.

        Raises
        ------
        RankError
            A rank has failed, left, ended, or not come in time.
        """
        self._number += 1
        own = self._message(self._rank)
        own[: len(message)] = message
        self._words.store(self._at(self._rank, _NUMBER), self._number)
        for rank in self.others:
            self.wait(lambda rank=rank: self._words.load(self._at(rank, _NUMBER)) >= self._number, what)  # type: ignore[misc]
        # A row is written to again two messages later, when all have been here once more.
        return [self._message(rank)[: len(message)].copy() for rank in range(self._layout.ranks)]

    def _message(self, rank: int) -> npt.NDArray[np.int64]:
        half = self._number % 2
        start = self._at(rank, _HEAD + _TEXT + half * self._layout.message)
        return self._words.plain(start, self._layout.message)

    # -- layers ---------------------------------------------------------------------------------------
    def write(self, layer: int, number: int) -> None:
        """This rank's part of the layer's update with that number is at home."""
        self._words.store(self._layer(self._rank, layer), number)

    def written(self, layer: int, number: int) -> bool:
        """Whether every rank's part of that update is at home."""
        return all(self._words.load(self._layer(rank, layer)) >= number for rank in range(self._layout.ranks))

    def _layer(self, rank: int, layer: int) -> int:
        return self._at(rank, _HEAD + _TEXT + 2 * self._layout.message + layer)

    # -- waiting --------------------------------------------------------------------------------------
    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Block until the condition holds, without keeping a core busy.

        Raises
        ------
        RankError
            A rank has failed, left or ended before, or the time is over.
        """
        begin, pause = time.monotonic(), _SHORTEST
        spins = 0
        while not condition():
            spins += 1
            if spins < _SPINS:
                time.sleep(0)
                continue
            self._check(condition, what)
            if time.monotonic() - begin > self._timeout:
                raise RankError(
                    f"rank {self._first + self._rank} waited {self._timeout:.0f} s for {what}, the process "
                    "group's time-out; a rank is slower than that, or does something else than the others"
                )
            time.sleep(pause)
            pause = min(_LONGEST, pause * 1.5)

    def check(self) -> None:
        """Raise what has happened to another rank, if something has."""
        self._check(lambda: False, "the other ranks")

    def _check(self, condition: Callable[[], bool], what: str) -> None:
        for rank in self.others:
            state = self._words.load(self._at(rank, _STATE))
            if state != GOING and not condition():
                raise RankError(
                    self._why(rank)
                    if state == FAILED
                    else f"rank {self._first + rank} has closed its model or ended while rank "
                    f"{self._first + self._rank} waits for {what}"
                )
        now = time.monotonic()
        if now - self._looked < _LOOK_AFTER:
            return
        self._looked = now
        for rank in self.others:
            pid, started = (self._words.load(self._at(rank, key)) for key in (_PID, _STARTED))
            if pid and not ProcessIdentity(pid, started).alive and not condition():
                raise RankError(
                    self._elsewhere(True)
                    or f"rank {self._first + rank} (process {pid}) has ended; training cannot go on without it"
                )
        why = self._elsewhere(False)
        if why is not None and not condition():
            raise RankError(why)

    # -- ends -----------------------------------------------------------------------------------------
    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on, and why; only the first reason counts."""
        if self._words.load(self._at(self._rank, _STATE)) != GOING or isinstance(error, RankError):
            return
        text = f"{type(error).__name__}: {error}".encode()[: 8 * _TEXT]
        self._words.plain(self._at(self._rank, _HEAD), _TEXT).view(np.uint8)[: len(text)] = np.frombuffer(
            text, np.uint8
        )
        self._words.store(self._at(self._rank, _LENGTH), len(text))
        self._words.store(self._at(self._rank, _STATE), FAILED)

    def leave(self) -> None:
        """This rank takes part no more, and owes nobody anything."""
        if self._words.load(self._at(self._rank, _STATE)) == GOING:
            self._words.store(self._at(self._rank, _STATE), LEFT)

    def _why(self, rank: int) -> str:
        length = self._words.load(self._at(rank, _LENGTH))
        text = self._words.plain(self._at(rank, _HEAD), _TEXT).view(np.uint8)[:length].tobytes()
        return f"rank {self._first + rank} has failed: {text.decode(errors='replace')}"

    def _at(self, rank: int, word: int) -> int:
        return rank * self._layout.row + word
