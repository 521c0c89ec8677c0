"""Transfers from a queue of slices: each way takes the next when it has room, so that none waits for another.

For links that others use too, or whose speed is not known: how fast a way takes slices is all that counts.  The
price is a thread that submits every slice and looks how far they are.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from memferry_allocator import Direction, DriverError, Event, Stream

from .job import Job
from .multipath import join
from .runs import Run

PAUSE_S = 20e-6  # between looks at the ways; a slice takes a hundred microseconds and more


class SharedQueue:
    """One direction's jobs, one after the other, in a thread of its own.

    Parameters
    ----------
    lock : Lock
        The engine's; held round every submission.
    lane : Stream
        The direct way's, which comes after all others at a job's end.
    outstanding : int
        Slices under way at once on each way.
    may_pull : callable
        Whether a relay may take a slice now: the job, the run, and the slices under way on it and directly.
    ended : callable
        Told of every job that is through, before anybody else; holds the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        lane: Stream,
        *,
        outstanding: int,
        may_pull: Callable[[Job, Run, int, int], bool],
        ended: Callable[[Job], None],
    ) -> None:
        self._lock, self._lane = lock, lane
        self._outstanding = outstanding
        self._may_pull, self._ended = may_pull, ended
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Job, direction: Direction) -> None:
        """Line a job up.  The engine's lock is held."""
        if self._thread is None:
            name = f"memferry transfers {direction.value} device {self._lane.device}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """Let the jobs come to their end, and the thread with them."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            under_way: list[deque[Event]] = [deque() for _ in job.runs]
            try:
                with self._lane.driver.beside_captures():
                    self._carry(job, under_way)
            except Exception as error:  # whoever waits for the job is told, and the next one has its turn
                job.abandon(error)
            self._end(job)

    def _carry(self, job: Job, under_way: Sequence[deque[Event]]) -> None:
        while job.left or any(under_way):
            if not (self._reap(job, under_way) | self._feed(job, under_way)):
                time.sleep(PAUSE_S)

    def _reap(self, job: Job, under_way: Sequence[deque[Event]]) -> bool:
        """Take note of slices that are there."""
        moved = False
        for run, events in zip(job.runs, under_way, strict=True):
            try:
                while events and events[0].query():
                    events.popleft()
                    moved = True
            except DriverError as error:
                events.clear()
                self._hand_over(job, run, error)
                moved = True
        return moved

    def _feed(self, job: Job, under_way: Sequence[deque[Event]]) -> bool:
        """Let the ways that have room take slices, the direct one first."""
        moved = False
        for run, events in zip(job.runs, under_way, strict=True):
            while run.error is None and len(events) < self._outstanding and job.left:
                direct = sum(
                    len(found) for other, found in zip(job.runs, under_way, strict=True) if other.path.direct
                )
                if not run.path.direct and not self._may_pull(job, run, len(events), direct):
                    break
                piece = job.take()
                if piece is None:  # cancelled meanwhile
                    break
                run.todo.append(piece)
                try:
                    with self._lock:
                        events.append(run.step().record())
                    moved = True
                except DriverError as error:
                    self._hand_over(job, run, error)
        return moved

    def _hand_over(self, job: Job, run: Run, error: DriverError) -> None:
        """Put what a failing way has not carried back into the queue; with no way left the job has failed."""
        with self._lock:
            left = run.fail(error)
            heirs = [other for other in job.runs if other.error is None]
            ends = run.end()
            for heir in heirs:
                heir.follow(ends)
            job.give_back(left)
            if not heirs:
                job.abandon(next(other.error for other in job.runs if other.error is not None))

    def _end(self, job: Job) -> None:
        """Record the end of everything that was submitted, whether it was all or not."""
        with self._lock:
            try:
                for run in job.runs:
                    run.note_loss()
                join(self._lane, job.runs)
                job.shares = tuple(share for run in job.runs if (share := run.share()).nbytes)
                job.event = self._lane.record()
                self._ended(job)
            except Exception as error:
                job.abandon(error)
            finally:
                job.finished.set()
