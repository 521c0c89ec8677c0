"""The update's workers: layers are updated on the CPU, in order, beside the thread that launches kernels."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from memferry_allocator.driver import Bracket

from .native import NativeBatch, NativeCalls, NativePool

T = TypeVar("T")


@dataclass(frozen=True)
class _Update:
    work: list[Future[None]] | NativeBatch
    end: Callable[[], None]
    size: int = 0

    def done(self) -> bool:
        if isinstance(self.work, NativeBatch):
            return self.work.done()
        return all(piece.done() for piece in self.work)

    def wait(self) -> None:
        if isinstance(self.work, NativeBatch):
            self.work.wait()
        else:
            wait(self.work)

    def failed(self) -> bool:
        """Whether it is over, and a piece has failed."""
        return not isinstance(self.work, NativeBatch) and any(piece.exception() is not None for piece in self.work)

    def raise_failure(self) -> None:
        for piece in () if isinstance(self.work, NativeBatch) else self.work:
            piece.result()


class UpdateQueue:
    """Runs updates in threads of its own, in the order in which they were submitted.

    The submitting thread lends its rights to the memory: it acquires before it submits, and `wait` gives
    them back once everything has run.

    Parameters
    ----------
    threads : int
        By default all processors this process may use but one, which is left to the launching thread, and
        another with a feeder.
    start : callable, optional
        Called once in every thread before its first piece.
    native : bool
        The threads run native calls and never take the interpreter's lock, and `submit_native` is what feeds
        them; otherwise they run Python, and `submit` does.
    feeder : bool
        Enqueue device work in a thread of its own, not in the one that calls `feed`.

    Attributes
    ----------
    rate : float or None
        Elements a second of native calls, as seen last when somebody had to wait for them.
    """

    def __init__(
        self,
        threads: int | None = None,
        *,
        start: Callable[[], None] | None = None,
        native: bool = False,
        feeder: bool = False,
    ) -> None:
        left = 2 if feeder else 1
        self.threads = threads or max(1, len(os.sched_getaffinity(0)) - left)
        self._native = NativePool(self.threads) if native else None
        self._pool = None if native else self._start(start)
        self._feeder = ThreadPoolExecutor(1, thread_name_prefix="memferry-feeder") if feeder else None
        self._pending: dict[int, _Update] = {}
        self._running_since = 0.0
        self._updated = 0
        self.rate: float | None = None

    def _start(self, start: Callable[[], None] | None) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="memferry-update")
        together = threading.Barrier(self.threads)

        def begin() -> None:
            together.wait()  # so that every thread exists, and is prepared, from the start
            if start is not None:
                start()

        for begun in [pool.submit(begin) for _ in range(self.threads)]:
            begun.result()
        return pool

    def submit(self, layer: int, pieces: Iterable[Callable[[], None]], end: Callable[[], None]) -> None:
        """Queue the update of a layer; its previous one must have been waited for.

        Parameters
        ----------
        pieces : iterable of callable
            They touch disjoint memory and may run in any order, at the same time.
        end : callable
            Called by whoever waits for the layer, when every piece has run or failed.
        """
        assert self._pool is not None, "made for native calls"
        self._pending[layer] = _Update([self._pool.submit(piece) for piece in pieces], end)

    def submit_native(self, layer: int, calls: NativeCalls, end: Callable[[], None], *, elements: int) -> None:
        """Queue the update of a layer as native calls; `elements` is how many they update."""
        assert self._native is not None, "made for Python"
        if not any(isinstance(update.work, NativeBatch) for update in self._pending.values()):
            self._running_since, self._updated = time.perf_counter(), 0
        self._pending[layer] = _Update(self._native.submit(calls), end, elements)

    def feed(self, layer: int, enqueue: Callable[[], None]) -> None:
        """Queue the update of a layer that the device makes; its previous one must have been waited for.

        Parameters
        ----------
        enqueue : callable
            Enqueues the work, after that of the layers before.
        """
        self._pending[layer] = _Update([self.in_feeder(enqueue)], lambda: None)

    def in_feeder(self, job: Callable[[], T]) -> Future[T]:
        """Run a job in the feeder, or at once where there is none."""
        if self._feeder is not None:
            return self._feeder.submit(job)
        done: Future[T] = Future()
        try:
            done.set_result(job())
        except Exception as error:
            done.set_exception(error)
        return done

    def run_early(self, bracket: Callable[[], Bracket], calls: NativeCalls) -> NativeBatch:
        """Start native calls of no layer's update, from within `in_feeder`.

        Without a feeder they are over on return: a bracket may not stay open beside those of the caller.
        """
        assert self._native is not None, "made for Python"
        if self._feeder is not None:
            return self._native.submit(calls)
        with bracket():
            batch = self._native.submit(calls)
            batch.wait()
        return batch

    def poll(self, layer: int) -> bool:
        """Whether a layer's update is over, without blocking."""
        update = self._pending.get(layer)
        if update is not None and not update.done():
            return False
        self.wait(layer)
        return True

    def wait(self, layer: int) -> None:
        """Block until a layer's update is over; raises what its first failing piece raised."""
        update = self._pending.pop(layer, None)
        if update is None:
            return
        early = not update.done()
        update.wait()
        self._updated += update.size
        if early and update.size:
            self.rate = self._updated / (time.perf_counter() - self._running_since)
        update.end()
        update.raise_failure()

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
        for pool in (self._pool, self._feeder):
            if pool is not None:
                pool.shutdown()
        if self._native is not None:
            self._native.close()
