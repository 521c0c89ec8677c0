"""The lock of a shadow space.

Order of locks, outermost first: a space's lock, its memory resource's, its copier's, the map of registrations,
the driver's.  Nothing inside calls back into a space, except a user's eviction policy, whose calls re-enter.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

from ..driver import Driver


class HandingLock:
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


def space_lock(driver: Driver) -> AbstractContextManager[Any]:
    """A re-entrant lock, which hands on what threads know where the driver keeps account of that."""
    return HandingLock(driver) if overrides(driver, "publish") else threading.RLock()


def overrides(driver: Driver, method: str) -> bool:
    """Whether a driver does anything in a method that does nothing by default, and so need not be called."""
    return getattr(type(driver), method) is not getattr(Driver, method)
