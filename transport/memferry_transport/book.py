"""Which devices load or unload something themselves now: their links are not to be borrowed meanwhile."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from memferry_allocator import Direction, Driver, DriverError, Stream


class HasLanes(Protocol):
    """An engine, as the book knows it."""

    device: int

    def lane(self, direction: Direction) -> Stream: ...

    def idle_for(self, direction: Direction) -> float: ...


_lock = threading.Lock()
_engines: WeakKeyDictionary[Driver, WeakSet[HasLanes]] = WeakKeyDictionary()


def enter(driver: Driver, engine: HasLanes) -> None:
    """Let others ask what `engine` is doing, until `leave`."""
    with _lock:
        _engines.setdefault(driver, WeakSet()).add(engine)


def leave(driver: Driver, engine: HasLanes) -> None:
    with _lock:
        _engines.get(driver, WeakSet()).discard(engine)


def is_busy(driver: Driver, device: int, direction: Direction, idle_s: float) -> bool:
    """Whether an engine of this process copies in `direction` on `device`, or has in the last `idle_s` seconds."""
    with _lock:
        asked = [engine for engine in _engines.get(driver, ()) if engine.device == device]
    for engine in asked:
        try:
            if engine.idle_for(direction) < idle_s or not engine.lane(direction).query():
                return True
        except DriverError:  # captured, lost, or closed a moment ago
            return True
    return False
