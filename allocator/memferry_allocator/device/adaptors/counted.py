"""Counts of what is allocated: now, at most, and in all."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

from ...driver import Stream
from ...errors import InvalidRequestError
from ..book import Book
from ..requests import block_size
from ..resource import MemoryResource
from ..returns import ReturnsLock
from .base import Adaptor


@dataclass(frozen=True)
class Counts:
    """Bytes as they were asked for, and numbers of allocations; those of nothing do not count.

    Attributes
    ----------
    current_bytes, current_count : int
        Live now.  In an inner scope that gave back what was taken before it, less than zero.
    peak_bytes, peak_count : int
        Most that was live at once.
    total_bytes, total_count : int
        Allocated in all, given back or not.
    """

    current_bytes: int = 0
    current_count: int = 0
    peak_bytes: int = 0
    peak_count: int = 0
    total_bytes: int = 0
    total_count: int = 0

    def changed(self, nbytes: int, count: int) -> Counts:
        """The counts after `count` (1 or -1) allocations of `nbytes` bytes more."""
        taken = count > 0
        now_bytes, now_count = self.current_bytes + nbytes * count, self.current_count + count
        return Counts(
            now_bytes,
            now_count,
            max(self.peak_bytes, now_bytes),
            max(self.peak_count, now_count),
            self.total_bytes + nbytes * taken,
            self.total_count + taken,
        )

    def within(self, outer: Counts) -> Counts:
        """The counts of a scope and of one inside it, which began when the outer one had `outer`."""
        return Counts(
            outer.current_bytes + self.current_bytes,
            outer.current_count + self.current_count,
            max(outer.peak_bytes, outer.current_bytes + self.peak_bytes),
            max(outer.peak_count, outer.current_count + self.peak_count),
            outer.total_bytes + self.total_bytes,
            outer.total_count + self.total_count,
        )


class CountedMemory(Adaptor):
    """Counts what goes through it, in scopes that may lie inside one another.

    Parameters
    ----------
    upstream : MemoryResource
    """

    def __init__(self, upstream: MemoryResource) -> None:
        super().__init__(upstream)
        self._lock = ReturnsLock()
        self._book: Book[int] = Book("counted memory")
        self._scopes = [Counts()]

    @property
    def counts(self) -> Counts:
        """The counts since the innermost `push`, or since the beginning."""
        return self._scopes[-1]

    def push(self) -> None:
        """Begin a scope: its counts start at zero."""
        self.driver.require_usable()
        with self._lock:
            self._scopes.append(Counts())

    def pop(self) -> Counts:
        """End the innermost scope and return its counts; the scope around it includes them.

        Raises
        ------
        InvalidRequestError
            No scope was begun.
        """
        self.driver.require_usable()
        with self._lock:
            if len(self._scopes) == 1:
                raise InvalidRequestError("counted memory: pop without a push")
            inner = self._scopes.pop()
            self._scopes[-1] = inner.within(self._scopes[-1])
            return inner

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        ptr = self.upstream.allocate(nbytes, stream=stream)
        if ptr:
            exact = operator.index(nbytes)
            self._book.enter(ptr, block_size(exact, self._book.name), exact)
            self._lock.finalise(functools.partial(self._count, exact, 1))
        return ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        known = self._book.give_back(self.upstream, ptr, nbytes, stream=stream)
        if known is not None:
            self._lock.finalise(functools.partial(self._count, known[2], -1))

    def _count(self, nbytes: int, count: int) -> None:
        self._scopes[-1] = self._scopes[-1].changed(nbytes, count)
