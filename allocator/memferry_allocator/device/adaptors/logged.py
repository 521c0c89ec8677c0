"""A log of every allocation, to be read by people or replayed."""

from __future__ import annotations

import itertools
import os
import threading
import time

from ...driver import Stream
from ...errors import OutOfMemory
from ..log import Action, LogEntry, LogWriter
from ..requests import refuse_pointer
from ..resource import MemoryResource
from .base import Adaptor


class LoggedMemory(Adaptor):
    """Writes what goes through it to a file in the format of `memferry_allocator.device.log`.

    Allocations are numbered from 1, because pointers come back; so are streams, from 0 in the order in
    which they appear.  Requests for nothing are left out.  The file is complete after `close`.

    Parameters
    ----------
    upstream : MemoryResource
    path : str or path-like
        A file that is there already is replaced.
    """

    def __init__(self, upstream: MemoryResource, path: str | os.PathLike[str]) -> None:
        super().__init__(upstream)
        self._writer = LogWriter(path)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._live: dict[int, int] = {}
        self._streams: dict[Stream, int] = {}
        self._start = time.perf_counter()

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        try:
            ptr = self.upstream.allocate(nbytes, stream=stream)
        except OutOfMemory:
            with self._lock:
                self._write(Action.REFUSE, 0, 0, nbytes, stream)
            raise
        if ptr:
            with self._lock:
                number = self._live[ptr] = next(self._numbers)
                self._write(Action.ALLOCATE, number, ptr, nbytes, stream)
        return ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        if ptr == 0:
            self.upstream.deallocate(ptr, nbytes, stream=stream)
            return
        with self._lock:  # erased before the free, after which another thread may have the address
            number = self._live.pop(ptr, None)
            if number is None:
                refuse_pointer("logged memory", ptr, nbytes)
        try:
            self.upstream.deallocate(ptr, nbytes, stream=stream)
        except BaseException:
            with self._lock:
                self._live[ptr] = number
            raise
        with self._lock:
            self._write(Action.FREE, number, ptr, nbytes, stream)

    def close(self) -> None:
        """Close the file; nothing is logged any more.  A second call does nothing."""
        with self._lock:
            self._writer.close()

    def _write(self, action: Action, number: int, ptr: int, nbytes: int, stream: Stream) -> None:
        lane = self._streams.setdefault(stream, len(self._streams))
        seconds = time.perf_counter() - self._start
        self._writer.write(LogEntry(action, seconds, threading.get_ident(), number, ptr, nbytes, lane))
