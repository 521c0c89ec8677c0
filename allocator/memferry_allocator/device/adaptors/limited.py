"""A limit on what somebody may take."""

from __future__ import annotations

import functools

from ...driver import Stream
from ...errors import InvalidRequestError, OutOfMemory
from ...sizes import format_size
from ..book import Book
from ..requests import block_size, whole_number
from ..resource import MemoryResource
from ..returns import ReturnsLock
from .base import Adaptor


class LimitedMemory(Adaptor):
    """Refuses what would bring the bytes taken through it above a limit.

    Parameters
    ----------
    upstream : MemoryResource
    limit : int
        Bytes; every allocation counts as a multiple of 256.
    name : str
        The `OutOfMemory.budget` of its refusals.
    """

    def __init__(self, upstream: MemoryResource, limit: int, *, name: str = "memory limit") -> None:
        super().__init__(upstream)
        limit = whole_number(limit, name)
        if limit <= 0:
            raise InvalidRequestError(f"{name}: {limit} is not more than zero bytes")
        self.limit = limit
        self.name = name
        self._lock = ReturnsLock()
        self._book: Book[None] = Book(name)
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes taken through it now, alignment included."""
        return self._used

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        self.driver.require_usable()
        size = block_size(nbytes, self.name)
        with self._lock:  # counted first: two threads must not both take the last bytes
            if self._used + size > self.limit:
                raise OutOfMemory(
                    f"{self.name}: asked for {format_size(size)}, {format_size(self._used)} of "
                    f"{format_size(self.limit)} in use; release something, or raise the limit",
                    size=size,
                    used=self._used,
                    limit=self.limit,
                    budget=self.name,
                )
            self._used += size
        try:
            ptr = self.upstream.allocate(nbytes, stream=stream)
        except BaseException:
            self._uncount(size)
            raise
        if ptr:
            self._book.enter(ptr, size, None)
        return ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        known = self._book.give_back(self.upstream, ptr, nbytes, stream=stream)
        if known is not None:
            self._uncount(known[1])

    def _uncount(self, size: int) -> None:
        self._lock.finalise(functools.partial(self._change, -size))

    def _change(self, size: int) -> None:
        self._used += size
