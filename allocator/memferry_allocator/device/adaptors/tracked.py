"""What is live, and who asked for it."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
import warnings
import weakref
from dataclasses import dataclass

from ...driver import Stream
from ...sizes import format_size
from ..requests import refuse_pointer
from ..resource import MemoryResource
from .base import Adaptor


@dataclass(frozen=True)
class Allocation:
    """A live allocation.

    Attributes
    ----------
    number : int
        From 1, in the order of the requests.
    ptr, nbytes : int
    thread : str
        Name of the thread that asked for it.
    stack : traceback.StackSummary
        Where it did, innermost last.
    """

    number: int
    ptr: int
    nbytes: int
    thread: str
    stack: traceback.StackSummary

    def __str__(self) -> str:
        head = f"#{self.number}: {format_size(self.nbytes)} at {self.ptr:#x}, allocated by thread {self.thread}"
        return f"{head}\n{''.join(self.stack.format())}".rstrip()


class TrackedMemory(Adaptor):
    """Remembers every live allocation and where it was asked for; a ResourceWarning at `close` tells of leaks.

    Parameters
    ----------
    upstream : MemoryResource
    depth : int
        Innermost calls to remember; 0 remembers none and is much faster.
    at_exit : bool
        Also print a report of what is live when the interpreter exits.
    """

    def __init__(self, upstream: MemoryResource, *, depth: int = 12, at_exit: bool = False) -> None:
        super().__init__(upstream)
        self.depth = depth
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._live: dict[int, Allocation] = {}
        self._closed = False
        self._at_exit = weakref.finalize(self, _print_report, self._live)
        self._at_exit.atexit = at_exit

    @property
    def live(self) -> tuple[Allocation, ...]:
        """What is allocated now, oldest first."""
        with self._lock:
            return tuple(self._live.values())

    def report(self) -> str:
        """The live allocations as text, with stacks; empty if there are none."""
        return _report(self.live)

    def close(self) -> None:
        """End the tracking, with a ResourceWarning if anything is live; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._at_exit.detach()
            if report := self.report():
                warnings.warn(report, ResourceWarning, stacklevel=2)

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        ptr = self.upstream.allocate(nbytes, stream=stream)
        if ptr:
            stack = self._stack()
            name = threading.current_thread().name
            with self._lock:
                self._live[ptr] = Allocation(next(self._numbers), ptr, nbytes, name, stack)
        return ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        if ptr == 0:
            self.upstream.deallocate(ptr, nbytes, stream=stream)
            return
        with self._lock:  # erased before the free, after which another thread may have the address
            known = self._live.pop(ptr, None)
        if known is None:
            refuse_pointer("tracked memory", ptr, nbytes)
        try:
            self.upstream.deallocate(ptr, nbytes, stream=stream)
        except BaseException:
            with self._lock:
                self._live[ptr] = known
            raise

    def _stack(self) -> traceback.StackSummary:
        if self.depth <= 0:
            return traceback.StackSummary()
        frame = sys._getframe(2)  # who called `allocate`
        calls = list(itertools.islice(traceback.walk_stack(frame), self.depth))
        return traceback.StackSummary.extract(iter(reversed(calls)), lookup_lines=False)


def _report(live: tuple[Allocation, ...]) -> str:
    if not live:
        return ""
    total = format_size(sum(allocation.nbytes for allocation in live))
    return "\n".join([f"{len(live)} allocation(s) are live, {total}:", *map(str, live)])


def _print_report(live: dict[int, Allocation]) -> None:
    """Say what nobody gave back; at the exit of the interpreter there is nobody left to raise to."""
    if live and sys.stderr is not None:
        print(_report(tuple(live.values())), file=sys.stderr)
