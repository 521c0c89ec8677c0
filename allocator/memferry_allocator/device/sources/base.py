"""What the sources have in common: checked arguments and a book of what is live."""

from __future__ import annotations

import operator
import threading
from abc import abstractmethod
from typing import ClassVar

from ...driver import Driver, Stream
from ..requests import block_size, refuse_pointer, usable_stream
from ..resource import MemoryResource


class Source(MemoryResource):
    """Memory straight from the driver.  Derived classes say how one block is taken and given."""

    name: ClassVar[str]

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self._lock = threading.Lock()
        self._live: dict[int, int] = {}

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver now."""
        with self._lock:
            return sum(self._live.values())

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        self.driver.require_usable()
        size = block_size(nbytes, self.name)
        usable_stream(stream, self.driver, self.device, self.name)
        if size == 0:
            return 0
        with self.driver.beside_captures():
            ptr = self._take(operator.index(nbytes), stream)
        with self._lock:
            self._live[ptr] = size
        return ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        self.driver.require_usable()
        size = block_size(nbytes, self.name)
        usable_stream(stream, self.driver, self.device, self.name)
        if ptr == 0 and size == 0:
            return
        with self._lock:
            if size == 0 or self._live.get(ptr) != size:
                refuse_pointer(self.name, ptr, nbytes)
            del self._live[ptr]  # before the free: another thread may get the address the moment it is free
        try:
            with self.driver.beside_captures():
                self._give(ptr, stream)
        except BaseException:
            with self._lock:
                self._live[ptr] = size
            raise

    @abstractmethod
    def _take(self, nbytes: int, stream: Stream) -> int:
        """A block of `nbytes` bytes, more than zero."""

    @abstractmethod
    def _give(self, ptr: int, stream: Stream) -> None:
        """Give a block back behind what `stream` holds; if it fails, the block is still there."""
