"""A lock that whoever gives memory back never waits for."""

from __future__ import annotations

from ..host.lock import FinaliserLock


class ReturnsLock(FinaliserLock):
    """What was given back while somebody held it is back before the next one looks.

    Otherwise a request could run out of memory that was given back before it was made.
    """

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            while self._late:
                self._late.popleft()()
