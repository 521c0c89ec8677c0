"""What the sources have in common: checked arguments and a book of what is live."""

from __future__ import annotations

import operator
from abc import abstractmethod
from typing import ClassVar

from ...driver import Driver, Stream
from ..book import Book
from ..requests import block_size, known_driver, usable_stream, whole_number
from ..resource import MemoryResource


class Source(MemoryResource):
    """Memory straight from the driver.  Derived classes say how one block is taken and given."""

    name: ClassVar[str]

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = known_driver(driver, self.name)
        self.device = whole_number(device, f"{self.name}: device")
        self._book: Book[None] = Book(self.name)

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver now."""
        return self._book.size

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        """See `MemoryResource.allocate`."""
        self.driver.require_usable()
        size = block_size(nbytes, self.name)
        usable_stream(stream, self.driver, self.device, self.name)
        if size == 0:
            return 0
        with self.driver.beside_captures():
            ptr = self._take(operator.index(nbytes), stream)
        self._book.enter(ptr, size, None)
        return ptr

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        """See `MemoryResource.deallocate`."""
        self.driver.require_usable()
        usable_stream(stream, self.driver, self.device, self.name)
        known = self._book.strike(ptr, nbytes)
        if known is None:
            return
        try:
            with self.driver.beside_captures():
                self._give(known[0], stream)
        except BaseException:
            self._book.enter(*known)
            raise

    @abstractmethod
    def _take(self, nbytes: int, stream: Stream) -> int:
        """A block of `nbytes` bytes, more than zero."""

    @abstractmethod
    def _give(self, ptr: int, stream: Stream) -> None:
        """Give a block back behind what `stream` holds; if it fails, the block is still there."""
