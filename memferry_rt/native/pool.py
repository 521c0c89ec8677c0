"""Threads that run native calls without the interpreter's lock.

A worker that needs the lock to fetch its next piece waits for whoever holds it, and the thread that launches the
model's kernels holds it nearly always.  These workers never need it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from ..errors import OffloadError
from .module import kernels


@dataclass(frozen=True)
class NativeCalls:
    """Calls of one kernel, and what they point to.

    Attributes
    ----------
    kind : str
        ``"ADAM"``, ``"SGD"``, ``"ADAGRAD"``, ``"LION"``, ``"TRAFFIC"``, ``"SQUARES"``, ``"ADD"`` or
        ``"CONVERT"``.
    array : cffi array
    count : int
    kept : object
        What must live until they have run.
    """

    kind: str
    array: Any
    count: int
    kept: object


class NativeBatch:
    """Calls that a pool was given; done when each has run.  It may be waited for by several threads."""

    def __init__(self, lib: Any, handle: Any, calls: NativeCalls) -> None:
        self._lib = lib
        self._handle = handle
        self._calls = calls

    def done(self) -> bool:
        """Whether every call has run, without blocking."""
        return bool(self._lib.memferry_batch_done(self._handle))

    def wait(self) -> None:
        """Block until every call has run; the interpreter's lock is free meanwhile."""
        self._lib.memferry_batch_wait(self._handle)


class NativePool:
    """Threads for native calls; batches begin in the order of submission, and calls of a batch in theirs.

    Parameters
    ----------
    threads : int
        At least 1.

    Raises
    ------
    OffloadError
        The package was installed without a C compiler, or the system gives no more threads.
    """

    def __init__(self, threads: int) -> None:
        module = kernels()
        if module is None:
            raise OffloadError("native threads need the native kernels; install the package again with gcc")
        pool = module.lib.memferry_pool_open(threads) if threads > 0 else None
        if not pool:
            raise OffloadError(f"the system did not start {threads} threads; ask for at least 1, or for fewer")
        self.threads = threads
        self._module = module
        self._pool = pool
        self._lock = threading.Lock()
        self._pending: deque[NativeBatch] = deque()  # what runs must live, even if nobody waits for it
        self._close = weakref.finalize(self, _close, module.lib, pool, self._pending, os.getpid())

    def submit(self, calls: NativeCalls) -> NativeBatch:
        """Queue calls and return at once; what they touch must stay as it is until the batch is done."""
        if not self._close.alive:
            raise OffloadError("the pool of native threads is closed")
        lib = self._module.lib
        handle = lib.memferry_pool_submit(
            self._pool, getattr(lib, f"MEMFERRY_{calls.kind}"), calls.array, calls.count
        )
        if not handle:
            raise MemoryError("no memory for a batch of native calls")
        batch = NativeBatch(lib, self._module.ffi.gc(handle, lib.memferry_batch_free), calls)
        with self._lock:
            self._pending.append(batch)
            while self._pending[0].done() and len(self._pending) > 1:
                self._pending.popleft()
        return batch

    def close(self) -> None:
        """Finish what is queued and end the threads; a second call does nothing."""
        self._close()


def _close(lib: Any, pool: Any, pending: deque[NativeBatch], process: int) -> None:
    if os.getpid() == process:  # a fork has no threads to join
        lib.memferry_pool_close(pool)
        pending.clear()
