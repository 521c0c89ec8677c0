"""The update's workers: layers are updated on the CPU, in order, beside the thread that launches kernels."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass


@dataclass(frozen=True)
class _Update:
    pieces: list[Future[None]]
    end: Callable[[], None]


class UpdateQueue:
    """Runs the pieces of updates in threads of its own, in the order in which they were submitted.

    The submitting thread lends its rights to the memory: it acquires before it submits, and `wait` gives
    them back once every piece has run.

    Parameters
    ----------
    threads : int
        By default all processors this process may use but one, which is left to the launching thread, and
        another with a feeder.
    start : callable, optional
        Called once in every thread before its first piece.
    feeder : bool
        Enqueue device work in a thread of its own, not in the one that calls `feed`.
    """

    def __init__(
        self, threads: int | None = None, *, start: Callable[[], None] | None = None, feeder: bool = False
    ) -> None:
        left = 2 if feeder else 1
        self.threads = threads or max(1, len(os.sched_getaffinity(0)) - left)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="memferry-update")
        self._feeder = ThreadPoolExecutor(1, thread_name_prefix="memferry-feeder") if feeder else None
        self._pending: dict[int, _Update] = {}
        self._times: list[tuple[float, float]] = []
        together = threading.Barrier(self.threads)

        def begin() -> None:
            together.wait()  # so that every thread exists, and is prepared, from the start
            if start is not None:
                start()

        for begun in [self._pool.submit(begin) for _ in range(self.threads)]:
            begun.result()

    def submit(self, layer: int, pieces: Iterable[Callable[[], None]], end: Callable[[], None]) -> None:
        """Queue the update of a layer; its previous one must have been waited for.

        Parameters
        ----------
        pieces : iterable of callable
            They touch disjoint memory and may run in any order, at the same time.
        end : callable
            Called by whoever waits for the layer, when every piece has run or failed.
        """
        self._pending[layer] = _Update([self._pool.submit(self._timed, piece) for piece in pieces], end)

    def feed(self, layer: int, enqueue: Callable[[], None], end: Callable[[], None]) -> None:
        """Queue the update of a layer that the device makes; its previous one must have been waited for.

        Parameters
        ----------
        enqueue : callable
            Enqueues the work, after that of the layers before.
        end : callable
            Called by whoever waits for the layer, when all is enqueued.
        """
        if self._feeder is not None:
            self._pending[layer] = _Update([self._feeder.submit(enqueue)], end)
            return
        fed: Future[None] = Future()
        try:
            enqueue()
        except Exception as error:
            fed.set_exception(error)
        else:
            fed.set_result(None)
        self._pending[layer] = _Update([fed], end)

    def busy(self) -> float:
        """Seconds from the first to the last piece that have run since the last call."""
        times, self._times = self._times, []
        return max((end for _, end in times), default=0.0) - min((begin for begin, _ in times), default=0.0)

    def _timed(self, piece: Callable[[], None]) -> None:
        begin = time.perf_counter()
        piece()
        self._times.append((begin, time.perf_counter()))

    def poll(self, layer: int) -> bool:
        """Whether a layer's update is over, without blocking."""
        update = self._pending.get(layer)
        if update is not None and not all(piece.done() for piece in update.pieces):
            return False
        self.wait(layer)
        return True

    def wait(self, layer: int) -> None:
        """Block until a layer's update is over; raises what its first failing piece raised."""
        update = self._pending.pop(layer, None)
        if update is not None:
            wait(update.pieces)
            update.end()
            for piece in update.pieces:
                piece.result()

    def wait_all(self) -> None:
        """Block until every update is over; raises what the first failing one raised."""
        failure: BaseException | None = None
        for layer in list(self._pending):
            try:
                self.wait(layer)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Finish what is queued and end the threads; a second call does nothing."""
        self._pool.shutdown()
        if self._feeder is not None:
            self._feeder.shutdown()
