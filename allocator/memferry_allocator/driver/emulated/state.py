"""What the emulated driver keeps about streams, events, host threads and accesses."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..handles import Bracket
from ..types import CaptureMode
from .memory import Kind, Place
from .order import Clock
from .work import Queue, Work


@dataclass(eq=False)
class Capture:
    """A capture under way: who began it and where, the streams in it, and which call has broken it."""

    mode: CaptureMode
    thread: int
    origin: StreamState
    members: list[StreamState] = field(init=False)
    broken: str = ""

    def __post_init__(self) -> None:
        self.members = [self.origin]


@dataclass(eq=False)
class StreamState:
    """A stream: its work, and how much of every actor's history its next work comes after.

    Events keep its clock as it was: it is replaced, never changed.
    """

    device: int
    actor: int
    queue: Queue
    clock: Clock = field(default_factory=dict)
    closed: bool = False
    capture: Capture | None = None

    def __int__(self) -> int:
        return self.actor


@dataclass(eq=False)
class EventState:
    """An event: the work it was last recorded behind, and what that came after; or the capture it is in."""

    work: Work | None = None
    clock: Clock = field(default_factory=dict)
    capture: Capture | None = None


@dataclass(frozen=True)
class Touch:
    """An access to be checked and remembered."""

    place: Place
    write: bool

    @property
    def lasting(self) -> bool:
        """Whether others are checked against it later.

        Pageable memory is touched while the call lasts, like by any host function: what its owner does
        with it afterwards (it may be freed, and be anybody's) comes after.
        """
        return self.place.kind is not Kind.PAGEABLE


class HostThreads(threading.local):
    """What each host thread knows, and how deep it is in `beside_captures`; a thread is an actor of its own."""

    def __init__(self, actors: itertools.count[int]) -> None:
        self.actor = next(actors)
        self.clock: Clock = {}
        self.beside = 0


class EmulatedBracket(Bracket):
    """A bracket that is closed once; if that fails it is still open."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def end(self) -> None:
        if self._finish is not None:
            self._finish()
            self._finish = None
