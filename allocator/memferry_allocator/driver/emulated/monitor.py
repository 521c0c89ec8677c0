"""The emulated driver's lock."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable


class Monitor:
    """A re-entrant lock round every call, with finalisers kept out of a call that is under way.

    A garbage collection can start in the middle of a call, and what it finalises would find half-changed
    books; `finalise` then puts the action off until the thread has left.

    Parameters
    ----------
    guard : callable, optional
        Raises for who may not enter, before the lock is taken: in a forked child nobody would ever release it.
    """

    def __init__(self, guard: Callable[[], None] = lambda: None) -> None:
        self._guard = guard
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0
        self._late: deque[Callable[[], None]] = deque()
        self._draining: set[int] = set()  # threads that run what is late: what that leaves is theirs too

    def __enter__(self) -> None:
        self._guard()
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        outermost = self._depth == 0
        if outermost:
            self._owner = 0
        self._lock.release()
        if outermost and self._late:
            self._run_late()

    def _run_late(self) -> None:
        """Run what was put off, one after the other, not inside one another."""
        me = threading.get_ident()
        if me in self._draining:
            return
        self._draining.add(me)
        try:
            while self._late:
                try:
                    action = self._late.popleft()
                except IndexError:  # another thread was quicker
                    return
                try:
                    action()
                except Exception:  # told as `weakref.finalize` tells it; the others are run all the same
                    sys.excepthook(*sys.exc_info())
        finally:
            self._draining.discard(me)

    def finalise(self, action: Callable[[], None]) -> None:
        """Run `action` now, or at the end of the call that the calling thread is in."""
        if self._owner == threading.get_ident():
            self._late.append(action)
        else:
            action()
