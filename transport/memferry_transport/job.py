"""A transfer whose slices are handed out one by one, and its handle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from memferry_allocator import Direction, Event, Stream

from .errors import TransferCancelledError
from .pieces import Piece
from .runs import PathShare, Run
from .transfer import Transfer, TransferStatus


class Job:
    """Slices that no way has taken yet, and how it went.  Thread-safe."""

    def __init__(self, direction: Direction, nbytes: int, slices: Iterable[Piece], runs: Sequence[Run]) -> None:
        self.direction = direction
        self.nbytes = nbytes
        self.runs = runs
        self.cancelled = False
        self.error: Exception | None = None
        self.event: Event | None = None
        self.shares: tuple[PathShare, ...] = ()
        self.finished = threading.Event()
        self._todo = deque(slices)
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """Slices that no way has taken."""
        return len(self._todo)

    def take(self) -> Piece | None:
        with self._lock:
            return self._todo.popleft() if self._todo else None

    def give_back(self, pieces: Sequence[Piece]) -> None:
        """Slices that have to go another way; after a cancellation they go none."""
        with self._lock:
            if not self.cancelled:
                self._todo.extendleft(reversed(pieces))

    def cancel(self) -> bool:
        """Leave out what no way has taken; whether that was anything."""
        with self._lock:
            if not self._todo:
                return False
            self._todo.clear()
            self.cancelled = True
            return True

    def abandon(self, error: Exception) -> None:
        with self._lock:
            self._todo.clear()
            self.error = self.error or error


class QueuedTransfer(Transfer):
    """A transfer that the engine's thread works on: `wait`, `synchronize` and `event` wait for that."""

    __slots__ = ("_job",)

    def __init__(self, job: Job) -> None:
        super().__init__(job.direction, job.nbytes, 0, None)
        self._job = job

    @property
    def event(self) -> Event:
        self._finish()
        assert self._job.event is not None
        return self._job.event

    @property
    def pieces(self) -> int:
        """Driver copies it has taken; 0 until it is terminal."""
        return sum(share.copies for share in self._job.shares)

    @property
    def ways(self) -> tuple[PathShare, ...]:
        return self._job.shares

    def wait(self, stream: Stream) -> None:
        """Wait in this thread until everything is submitted, then order what `stream` gets from now on behind it.

        Raises
        ------
        TransferCancelledError, DriverError, RaceError
            Not all of it was; `stream` comes after what was all the same.
        """
        self._job.finished.wait()
        if self._job.event is not None:
            stream.wait(self._job.event)
        self._finish()

    def synchronize(self) -> None:
        self.event.synchronize()

    @property
    def done(self) -> bool:
        return self.status is TransferStatus.DONE

    @property
    def status(self) -> TransferStatus:
        job = self._job
        if not job.finished.is_set():
            return TransferStatus.QUEUED if job.left else TransferStatus.UNDER_WAY
        if job.error is not None:
            return TransferStatus.FAILED
        return TransferStatus.CANCELLED if job.cancelled else TransferStatus.DONE

    def cancel(self) -> bool:
        return self._job.cancel()

    def explain(self) -> str:
        first = f"{self.nbytes} bytes {self._job.direction.value} from a queue: {self.status.value}"
        return "\n  ".join([first, *map(str, self.ways)])

    def _finish(self) -> None:
        """Wait for the engine's thread; raises if not all bytes are there."""
        job = self._job
        job.finished.wait()
        if job.error is not None:
            raise job.error
        if job.cancelled:
            there = sum(way.nbytes for way in job.shares)
            raise TransferCancelledError(
                f"{job.nbytes} bytes {job.direction.value}: cancelled, {there} of them were copied; copy once more"
            )
