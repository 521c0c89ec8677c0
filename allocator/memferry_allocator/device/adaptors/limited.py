"""A limit on what somebody may take."""

from __future__ import annotations

import threading

from ...driver import Stream
from ...errors import InvalidRequestError, OutOfMemory
from ...sizes import format_size
from ..requests import block_size
from ..resource import MemoryResource
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
        if limit <= 0:
            raise InvalidRequestError(f"{name}: {limit} is not more than zero bytes")
        self.limit = limit
        self.name = name
        self._lock = threading.Lock()
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes taken through it now, alignment included."""
        return self._used

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
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
            return self.upstream.allocate(nbytes, stream=stream)
        except BaseException:
            with self._lock:
                self._used -= size
            raise

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        self.upstream.deallocate(ptr, nbytes, stream=stream)
        with self._lock:
            self._used -= block_size(nbytes, self.name)
