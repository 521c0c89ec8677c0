"""A log of every allocation, to be read by people or replayed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import threading
import time
import warnings

from ...driver import Stream
from ...errors import OutOfMemory
from ..book import Book
from ..log import Action, LogEntry, LogWriter
from ..requests import block_size
from ..resource import MemoryResource
from ..returns import ReturnsLock
from .base import Adaptor


class LoggedMemory(Adaptor):
    """Writes what goes through it to a file in the format of `memferry_allocator.device.log`.

    Allocations are numbered from 1, because pointers come back; so are streams, from 0 in the order in
    which they appear.  Requests for nothing are left out.  The file is complete after `close`.  What cannot
    be written (the disk is full) ends the log, not the allocations; a ResourceWarning at `close` says so.

    Parameters
    ----------
    upstream : MemoryResource
    path : str or path-like
        A file that is there already is replaced.
    """

    def __init__(self, upstream: MemoryResource, path: str | os.PathLike[str]) -> None:
        super().__init__(upstream)
        self._writer = LogWriter(path)
        self._lock = ReturnsLock()
        self._numbers = itertools.count(1)
        self._book: Book[int] = Book("logged memory")
        self._failure: OSError | None = None
        self._streams: dict[Stream, int] = {}
        self._start = time.perf_counter()

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        try:
            ptr = self.upstream.allocate(nbytes, stream=stream)
        except OutOfMemory:
            self._log(Action.REFUSE, 0, 0, operator.index(nbytes), stream)
            raise
        if ptr:
            exact, number = operator.index(nbytes), next(self._numbers)
            self._book.enter(ptr, block_size(exact, self._book.name), number)
            self._log(Action.ALLOCATE, number, ptr, exact, stream)
        return ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        known = self._book.give_back(self.upstream, ptr, nbytes, stream=stream)
        if known is not None:
            self._log(Action.FREE, known[2], known[0], operator.index(nbytes), stream)

    def close(self) -> None:
        """Close the file; nothing is logged any more.  A second call does nothing."""
        self.driver.require_usable()
        with self._lock:
            try:
                self._writer.close()
            except OSError as error:
                self._failure = error
            failure, self._failure = self._failure, None
        if failure is not None:
            warnings.warn(f"logged memory: the log is not complete: {failure}", ResourceWarning, stacklevel=2)

    def _log(self, action: Action, number: int, ptr: int, nbytes: int, stream: Stream) -> None:
        """Write an entry as soon as the file is nobody's."""
        thread = threading.get_ident()
        self._lock.finalise(functools.partial(self._write, action, thread, number, ptr, nbytes, stream))

    def _write(self, action: Action, thread: int, number: int, ptr: int, nbytes: int, stream: Stream) -> None:
        lane = self._streams.setdefault(stream, len(self._streams))
        seconds = time.perf_counter() - self._start
        try:
            self._writer.write(LogEntry(action, seconds, thread, number, ptr, nbytes, lane))
        except OSError as error:  # the memory is taken or given back by now: that must not be lost
            self._failure = error
            with contextlib.suppress(OSError):
                self._writer.close()
