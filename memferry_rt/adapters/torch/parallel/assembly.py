"""Meetings of all ranks: on the board of a host, and between hosts over the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ....errors import RankError
from ....parallel import Board, Share
from .notice import Notice

PURPOSE = 8  # words at the head of a message: what it is for, as text


def message_words(hosts: int, words: int) -> int:
    """Words that a board's message needs, for those of `words` words from every host."""
    return hosts * (PURPOSE + words)


class Assembly:
    """Brings all ranks together.

    On several hosts peers, the ranks with one local number, exchange what they say, and then each tells its
    neighbours on the board.

    Parameters
    ----------
    board : Board
        Of this host.
    share : Share
    words : int
        Of the longest message of one rank.
    carriers : ProcessGroup, optional
        The peers, for CPU tensors; None on one host.
    notice : Notice, optional
        What ranks of other hosts say when they end.
    """

    def __init__(
        self, board: Board, share: Share, words: int, carriers: Any = None, notice: Notice | None = None
    ) -> None:
        self._board = board
        self._share = share
        self._words = words
        self._carriers = carriers
        self._notice = notice

    def gather(self, message: Sequence[int] | npt.NDArray[np.int64], what: str) -> list[npt.NDArray[np.int64]]:
        """See `Board.gather`; of all hosts, by rank.

        Raises
        ------
        RankError
            A rank is in another meeting than this one.
        """
        if self._share.hosts == 1:
            own = self._headed(message, what)
            rows = self._board.gather(own, what)
            self._compare(own, rows, self._share.neighbours, what)
            return [row[PURPOSE : PURPOSE + len(message)] for row in rows]
        met = self._board.gather(self.meet(message, what).ravel(), what)
        rows = [met[rank % self._share.locals].reshape(self._share.hosts, -1) for rank in range(self._share.size)]
        return [row[rank // self._share.locals][PURPOSE : PURPOSE + len(message)] for rank, row in enumerate(rows)]

    def meet(self, message: Sequence[int] | npt.NDArray[np.int64], what: str) -> npt.NDArray[np.int64]:
        """What the peers say, with its heads, by host: shape (hosts, words)."""
        own = self._headed(message, what)
        found = np.stack([row.numpy() for row in self.exchange(torch.from_numpy(own), what)])
        self._compare(own, found, self._share.peers, what)
        return found

    def _headed(self, message: Sequence[int] | npt.NDArray[np.int64], what: str) -> npt.NDArray[np.int64]:
        """A message that says what it is for; of one length for all that are sent."""
        own = np.zeros(PURPOSE + self._words, np.int64)
        text = what.encode()[: 8 * PURPOSE]
        own[:PURPOSE].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
        own[PURPOSE : PURPOSE + len(message)] = message
        return own

    def _compare(self, own: npt.NDArray[np.int64], found: Any, others: Sequence[Share], what: str) -> None:
        for other, row in zip(others, found, strict=True):
            if not np.array_equal(row[:PURPOSE], own[:PURPOSE]):
                theirs = row[:PURPOSE].tobytes().rstrip(b"\0").decode(errors="replace")
                alike = "all ranks call step() and load()"
                if self._share.hosts > 1:
                    alike = "on several hosts all call step(), save(), load(), restore() and state_dict()"
                raise RankError(
                    f"ranks go different ways: rank {self._share.rank} is at {what}, and rank {other.rank} at "
                    f"{theirs}; {alike} alike"
                )

    def exchange(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Every peer's tensor, by host; flat, of the CPU, and of the same form on all."""
        found = [torch.empty_like(mine) for _ in range(self._share.hosts)]
        self.finish(lambda: dist.all_gather(found, mine, group=self._carriers, async_op=True), what)
        return found

    def bring(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        """As `exchange`, to the first host's rank; the others get nothing."""
        first = self._share.host == 0
        found = [torch.empty_like(mine) for _ in range(self._share.hosts)] if first else None
        self.finish(lambda: dist.gather(mine, found, group=self._carriers, group_dst=0, async_op=True), what)
        return found or []

    def spread(self, tensor: torch.Tensor, what: str) -> None:
        """Fill a tensor with what the first host's rank has in its own."""
        self.finish(lambda: dist.broadcast(tensor, group=self._carriers, group_src=0, async_op=True), what)

    # -- waiting --------------------------------------------------------------------------------------
    def finish(self, begin: Any, what: str) -> None:
        """Begin something of a process group for CPU tensors and block until it is over, watching the others.

        Raises
        ------
        RankError
        """
        try:
            work = begin()
        except RuntimeError as error:
            raise self.ended(error) from error
        self._board.wait(work.is_completed, what)
        self.wait(work)

    def wait(self, work: Any) -> None:
        """As a work's own ``wait``.

        Raises
        ------
        RankError
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self.ended(error) from error

    def ended(self, error: Exception) -> RankError:
        """What has happened to another rank, if somebody knows; else what the process group says."""
        self._board.check()
        why = None if self._notice is None else self._notice.read(True)
        others = ", ".join(str(peer.rank) for peer in self._share.peers if peer != self._share)
        which = f"one of other hosts, of {others}," if others else "a rank"
        return RankError(why or f"the process group has failed, perhaps because {which} has ended: {error}")
