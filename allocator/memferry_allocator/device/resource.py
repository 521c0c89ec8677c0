"""What every source of device memory is, and every layer put on top of one."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..driver import Driver, Stream


class MemoryResource(ABC):
    """Memory of one device, given and taken back in stream order; resources stack on one another.

    Attributes
    ----------
    driver : Driver
    device : int
        Whose memory it is.
    granularity : int
        Bytes of which this resource gives whole multiples without waste; what a pool on it grows by.
    joins : bool
        Whether two of its allocations that lie side by side may be used as one.
    host_ordered : bool
        Whether new memory may be used at once on every stream, not only on the one named.

    Thread-safe: memory may be given back by another thread than the one that asked for it.
    """

    driver: Driver
    device: int
    granularity: int = 256
    joins: bool = False
    host_ordered: bool = False

    @abstractmethod
    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """A device pointer to `nbytes` bytes, 256-byte aligned, usable in `stream`'s order from now on.

        Zero bytes are a valid request: the pointer is 0 and nothing is taken.

        Raises
        ------
        OutOfMemory
            There is no room; nothing was changed.
        InvalidRequestError
            `nbytes` is not an integer or negative, or `stream` is none of this device; nothing was changed.
        CaptureError
            `stream` is being captured into a graph; nothing was changed.
        """

    @abstractmethod
    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """Give memory back; its last use was enqueued on `stream`.

        Raises
        ------
        InvalidRequestError
            Not a live allocation of this size: freed twice, an interior pointer, or of another resource.
        CaptureError
            `stream` is being captured into a graph; nothing was changed.
        """

    def close(self) -> None:
        """Give back what the resource holds for itself, never what lies below it; a second call does nothing.

        Raises
        ------
        InvalidRequestError
            Memory that needs the resource is still allocated; nothing was changed.
        """
        return
