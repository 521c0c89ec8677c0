"""rmm both ways: any resource of ours as rmm's, and a resource of rmm's as a source of ours."""

from __future__ import annotations

from typing import Any

from ..device.resource import MemoryResource
from ..driver import Driver, Stream
from ..errors import InvalidRequestError, OutOfMemory
from .streams import BorrowedStreams


def rmm_resource(resource: MemoryResource) -> Any:
    """A ``rmm.mr.CallbackMemoryResource`` over `resource`; the caller keeps it as long as its memory is in use."""
    import rmm

    streams = BorrowedStreams(resource.driver, resource.device)

    def allocate(nbytes: int, stream: Any) -> int:
        return resource.allocate(nbytes, stream=streams[stream])

    def deallocate(ptr: int, nbytes: int, stream: Any) -> None:
        resource.deallocate(ptr, nbytes, stream=streams[stream])

    return rmm.mr.CallbackMemoryResource(allocate, deallocate)


class RmmMemory(MemoryResource):
    """Device memory of a resource of rmm's.

    Parameters
    ----------
    driver : Driver
    device : int
    upstream
        An ``rmm.mr.DeviceMemoryResource`` of that device.
    """

    def __init__(self, driver: Driver, device: int, upstream: Any) -> None:
        self.driver = driver
        self.device = device
        self.upstream = upstream
        self._live: dict[int, int] = {}

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        self.driver.require_usable()
        if nbytes == 0:
            return 0
        try:
            ptr = int(self.upstream.allocate(nbytes, _as_rmm(stream)))
        except MemoryError as error:
            free, total = self.driver.memory_info(self.device)
            raise OutOfMemory(
                f"rmm: asked for {nbytes} bytes ({error}); {free} of the device's {total} are free",
                size=nbytes,
                used=total - free,
                limit=total,
                budget="rmm",
            ) from error
        self._live[ptr] = nbytes
        return ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        self.driver.require_usable()
        if nbytes == 0:
            return
        if self._live.get(ptr) != nbytes:
            raise InvalidRequestError(f"rmm: {ptr:#x} with {nbytes} bytes is not a live allocation here")
        del self._live[ptr]  # before the memory can be somebody else's
        self.upstream.deallocate(ptr, nbytes, _as_rmm(stream))


def _as_rmm(stream: Stream) -> Any:
    from rmm.pylibrmm.stream import Stream as RmmStream

    return RmmStream(obj=stream)
