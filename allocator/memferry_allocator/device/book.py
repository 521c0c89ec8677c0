"""What is live, in a book that nobody waits for."""

from __future__ import annotations

from typing import Generic, TypeVar

from ..driver import Stream
from .requests import block_size, refuse_pointer, whole_number
from .resource import MemoryResource

T = TypeVar("T")


class Book(Generic[T]):
    """Live allocations by pointer: their size, and a note.

    Every change is one step of a dictionary, so there is no lock that a finaliser could find taken, be it by
    the thread in which it runs.

    Parameters
    ----------
    name : str
        Whose book it is, for what it refuses.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._live: dict[int, tuple[int, T]] = {}

    @property
    def size(self) -> int:
        """Bytes of all that is live, alignment included."""
        return sum(size for size, _ in self._live.copy().values())

    @property
    def notes(self) -> list[T]:
        """The notes, in the order in which they were entered."""
        return [note for _, note in self._live.copy().values()]

    def enter(self, ptr: int, size: int, note: T) -> None:
        self._live[ptr] = (size, note)

    def strike(self, ptr: object, nbytes: object) -> tuple[int, int, T] | None:
        """Take an allocation out and return its pointer, size and note; None for the one of nothing.

        To be done before the memory goes back: another thread may get the address the moment it is free.

        Raises
        ------
        InvalidRequestError
            Not a live allocation of this size.
        """
        size, address = block_size(nbytes, self.name), whole_number(ptr, f"{self.name}: pointer")
        if address == 0 and size == 0:
            return None
        found = self._live.pop(address, None)
        if found is None or found[0] != size:
            if found is not None:
                self._live[address] = found
            refuse_pointer(self.name, address, nbytes)
        return address, *found

    def give_back(
        self, upstream: MemoryResource, ptr: int, nbytes: int, *, stream: Stream
    ) -> tuple[int, int, T] | None:
        """Strike an allocation and give it back to `upstream`; it stays in the book if that refuses.

        Returns and raises what `strike` does, and raises what `upstream` does.
        """
        known = self.strike(ptr, nbytes)
        try:
            upstream.deallocate(ptr, nbytes, stream=stream)
        except BaseException:
            if known is not None:
                self.enter(*known)
            raise
        return known
