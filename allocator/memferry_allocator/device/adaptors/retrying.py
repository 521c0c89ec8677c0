"""Another chance when memory runs out."""

from __future__ import annotations

from collections.abc import Callable

from ...driver import Stream
from ...errors import OutOfMemory
from ..resource import MemoryResource
from .base import Adaptor


class RetryingMemory(Adaptor):
    """Asks a callback when memory runs out, and tries again as long as it says so.

    Parameters
    ----------
    upstream : MemoryResource
    on_out_of_memory : callable
        Called as ``on_out_of_memory(nbytes, attempt)``, `attempt` counting from 1, with no lock held; it may
        give memory back.  True asks for another attempt, False lets the error through.  What it raises goes
        to the caller.
    """

    def __init__(self, upstream: MemoryResource, on_out_of_memory: Callable[[int, int], bool]) -> None:
        super().__init__(upstream)
        self._on_out_of_memory = on_out_of_memory

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        attempt = 1
        while True:
            try:
                return self.upstream.allocate(nbytes, stream=stream)
            except OutOfMemory:
                if not self._on_out_of_memory(nbytes, attempt):
                    raise
            attempt += 1
