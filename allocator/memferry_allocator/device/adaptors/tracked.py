"""What is live, and who asked for it."""

from __future__ import annotations

import itertools
import operator
import sys
import threading
import traceback
import warnings
import weakref
from dataclasses import dataclass

from ...driver import Stream
from ...sizes import format_size
from ..book import Book
from ..requests import block_size
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
        Print a report of what is live when the interpreter exits, or when the tracker is collected unclosed.
    """

    def __init__(self, upstream: MemoryResource, *, depth: int = 12, at_exit: bool = False) -> None:
        super().__init__(upstream)
        self.depth = depth
        self._numbers = itertools.count(1)
        self._book: Book[Allocation] = Book("tracked memory")
        self._closed = False
        self._at_exit = weakref.finalize(self, _print_report, self._book) if at_exit else None

    @property
    def live(self) -> tuple[Allocation, ...]:
        """What is allocated now, oldest first."""
        return _oldest_first(self._book)

    def report(self) -> str:
        """The live allocations as text, with stacks; empty if there are none."""
        return _report(self.live)

    def close(self) -> None:
        """End the tracking, with a ResourceWarning if anything is live; a second call does nothing."""
        if not self._closed:
            self._closed = True
            if self._at_exit is not None:
                self._at_exit.detach()
            if report := self.report():
                warnings.warn(report, ResourceWarning, stacklevel=2)

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        ptr = self.upstream.allocate(nbytes, stream=stream)
        if ptr:
            stack = self._stack()
            name, exact = threading.current_thread().name, operator.index(nbytes)
            known = Allocation(next(self._numbers), ptr, exact, name, stack)
            self._book.enter(ptr, block_size(exact, self._book.name), known)
        return ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        self._book.give_back(self.upstream, ptr, nbytes, stream=stream)

    def _stack(self) -> traceback.StackSummary:
        if self.depth <= 0:
            return traceback.StackSummary()
        frame = sys._getframe(2)  # who called `allocate`
        calls = list(itertools.islice(traceback.walk_stack(frame), self.depth))
        return traceback.StackSummary.extract(iter(reversed(calls)), lookup_lines=False)


def _oldest_first(book: Book[Allocation]) -> tuple[Allocation, ...]:
    return tuple(sorted(book.notes, key=lambda allocation: allocation.number))


def _report(live: tuple[Allocation, ...]) -> str:
    if not live:
        return ""
    total = format_size(sum(allocation.nbytes for allocation in live))
    return "\n".join([f"{len(live)} allocation(s) are live, {total}:", *map(str, live)])


def _print_report(book: Book[Allocation]) -> None:
    """Say what nobody gave back; at the exit of the interpreter there is nobody left to raise to."""
    live = _oldest_first(book)
    if live and sys.stderr is not None:
        print(_report(live), file=sys.stderr)
