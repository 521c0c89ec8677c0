"""The board on which ranks keep step: here all in one process, each rank a thread."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from memferry_rt import RankError
from memferry_rt.parallel import Board, BoardLayout, Meetings, ProcessIdentity, SharedWords
from memferry_rt.parallel import words as words_module

LAYOUT = BoardLayout(ranks=3, layers=2, message=16)


@pytest.fixture(params=[True, False], ids=["native", "plain"])
def boards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Board]:
    if not request.param:
        monkeypatch.setattr(words_module, "kernels", lambda: None)
    words = np.zeros(LAYOUT.nbytes // 8, np.int64)
    return [Board(SharedWords(words), LAYOUT, rank, timeout=5.0) for rank in range(LAYOUT.ranks)]


def _all(boards: list[Board], work: Callable[[Board, int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(boards)) as pool:
        return [future.result() for future in [pool.submit(work, b, n) for n, b in enumerate(boards)]]


def test_everybody_gets_every_message(boards: list[Board]) -> None:
    def work(board: Board, rank: int) -> list[list[int]]:
        return [
            [int(message[0]) for message in board.gather([100 * turn + rank], "a turn")] for turn in range(200)
        ]

    for found in _all(boards, work):
        assert found == [[100 * turn, 100 * turn + 1, 100 * turn + 2] for turn in range(200)]


def test_a_layer_is_written_when_all_have_written_it(boards: list[Board]) -> None:
    for number, board in enumerate(boards):
        assert not boards[0].written(1, 1)
        board.write(1, 1)
        assert boards[number].written(1, 1) is (number == LAYOUT.ranks - 1)
    assert not boards[0].written(1, 2)
    assert not boards[0].written(0, 1)


def test_a_failure_ends_who_waits(boards: list[Board]) -> None:
    def work(board: Board, rank: int) -> str:
        if rank == 1:
            board.fail(ValueError("no more data " * 100))
            board.fail(KeyError("later"))
            return ""
        with pytest.raises(RankError) as found:
            board.gather([], "a turn")
        return str(found.value)

    said = _all(boards, work)
    assert said[0] == said[2]
    assert said[0].startswith("rank 1 has failed: ValueError: no more data no more data")


def test_what_was_done_before_a_rank_left_counts(boards: list[Board]) -> None:
    boards[2].write(0, 1)
    boards[2].leave()
    boards[1].write(0, 1)
    boards[0].write(0, 1)
    boards[0].wait(lambda: boards[0].written(0, 1), "an update")
    with pytest.raises(RankError, match="rank 2 has closed its model or ended while rank 0 waits for more"):
        boards[0].wait(lambda: boards[0].written(0, 2), "more")


def test_nobody_waits_longer_than_the_time_out() -> None:
    words = np.zeros(LAYOUT.nbytes // 8, np.int64)
    board = Board(SharedWords(words), LAYOUT, 0, timeout=0.2)
    with pytest.raises(RankError, match=r"waited 0 s for a turn, the process group's time-out"):
        board.gather([], "a turn")


def _come_and_go(connection: Any) -> None:
    connection.send((os.getpid(), ProcessIdentity.own().started))


def test_a_process_that_has_ended_is_noticed(boards: list[Board]) -> None:
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_come_and_go, args=(sender,))
    process.start()
    gone = ProcessIdentity(*receiver.recv())
    process.join()
    assert not gone.alive
    assert ProcessIdentity.own().alive
    assert not ProcessIdentity(os.getpid(), 1).alive, "a number is used again"
    words = np.zeros(LAYOUT.nbytes // 8, np.int64)
    board = Board(SharedWords(words), LAYOUT, 0, timeout=5.0)
    words[LAYOUT.row + 2], words[LAYOUT.row + 3] = gone.pid, gone.started
    with pytest.raises(RankError, match=f"rank 1 .process {gone.pid}. has ended"):
        board.gather([], "a turn")


def test_ranks_of_other_hosts_are_heard_of() -> None:
    words, said = np.zeros(LAYOUT.nbytes // 8, np.int64), [None, None, "rank 1 has failed: on another host"]
    board = Board(SharedWords(words), LAYOUT, 0, timeout=5.0, first=6, elsewhere=lambda now: said.pop(0))
    with pytest.raises(RankError, match="rank 1 has failed: on another host"):
        board.gather([], "a turn")
    said[:] = [None] * 100
    Board(SharedWords(words), LAYOUT, 2, timeout=5.0, first=6).leave()
    with pytest.raises(RankError, match="rank 8 has closed its model or ended while rank 6 waits for a turn"):
        board.gather([], "a turn")


def test_meetings_agree(boards: list[Board]) -> None:
    def work(board: Board, rank: int) -> Any:
        meetings = Meetings(board.gather)
        order = meetings.begin(7, [1, 0] if rank == 1 else [0, 1], step=rank == 0)
        outcome = meetings.end([rank == 2, False], [False, rank == 1], [3.0 * (rank == 0), 4.0 * (rank > 0)])
        return order, outcome, meetings.begin(7, [0, 1], step=True)

    for order, outcome, again in _all(boards, work):
        assert order == [1, 0]
        assert outcome.late == [True, False]
        assert outcome.arrived == [False, True]
        assert outcome.norms == [3.0, 32.0**0.5]
        assert again is None
