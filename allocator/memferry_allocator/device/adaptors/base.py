"""What adaptors have in common: they pass on to another resource."""

from __future__ import annotations

from ...driver import Stream
from ...errors import InvalidRequestError
from ..resource import MemoryResource


class Adaptor(MemoryResource):
    """A resource on top of another, which it does not close.

    Parameters
    ----------
    upstream : MemoryResource
        Where the memory comes from and goes back to.
    """

    def __init__(self, upstream: MemoryResource) -> None:
        if not isinstance(upstream, MemoryResource):
            raise InvalidRequestError(f"{type(self).__name__}: {upstream!r} is no MemoryResource to be put on")
        self.upstream = upstream
        self.driver = upstream.driver
        self.device = upstream.device
        self.granularity = upstream.granularity
        self.joins = upstream.joins
        self.host_ordered = upstream.host_ordered

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        return self.upstream.allocate(nbytes, stream=stream)

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        self.upstream.deallocate(ptr, nbytes, stream=stream)
