"""The lock of a shadow space."""

from __future__ import annotations

import threading
from typing import Any

from ..driver import Driver


class SpaceLock:
    """A re-entrant lock that hands on, through the driver, what it orders between host threads.

    A thread that enters comes after everything that the threads before it did and waited for; the emulated
    device, which checks the order of accesses, cannot see that by itself.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.RLock()
        self._depth = 0
        self._known: Any = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1 and self._known is not None:
            self._driver.observe(self._known)

    def __exit__(self, *_: object) -> None:
        if self._depth == 1:
            self._known = self._driver.publish()
        self._depth -= 1
        self._lock.release()
