"""A lock that finalisers never wait for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class FinaliserLock:
    """A re-entrant lock; what a finaliser wants done under it is done by whoever holds it, on leaving.

    A garbage collection can start anywhere: in the middle of a change that this very thread makes, where the
    books are half written, or in a thread that holds another lock, where waiting here could be for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._late: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()
        if self._late:
            self._run_late()

    def finalise(self, action: Callable[[], None]) -> None:
        """Run `action` under the lock: now if it is free, else when it becomes free."""
        self._late.append(action)
        self._run_late()

    def settle(self) -> bool:
        """For who has just entered: do now what is late; False if this thread was inside, amid a change."""
        if self._depth > 1:
            return False
        while self._late:
            self._late.popleft()()
        return True

    def _run_late(self) -> None:
        # Looked at again after every release: what was added while somebody held the lock is not left lying.
        while self._late and self._lock.acquire(blocking=False):
            try:
                if self._depth:  # this thread is inside
                    return
                self._depth += 1
                try:
                    while self._late:
                        self._late.popleft()()
                finally:
                    self._depth -= 1
            finally:
                self._lock.release()
