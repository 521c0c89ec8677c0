"""Registered host ranges: pinned, mapped into every device, and known by their boundaries."""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass

from ..driver import Driver, Span
from ..errors import AllocatorError, InvalidRequestError

MAX_CHUNK = 64 << 30  # one driver call for 512 GiB or more fails on current drivers


@dataclass(eq=False)
class Registration:
    """A range that stays registered until `close`; it was registered whole or not at all."""

    map: RegistrationMap
    address: int
    nbytes: int
    chunks: tuple[Span, ...]

    @property
    def closed(self) -> bool:
        """Whether nothing of the range is registered any more; so from the start, if it is empty."""
        return not self.chunks

    def close(self) -> None:
        """Unregister.  Work on the range must be over; a second call does nothing.

        Raises
        ------
        DriverError, RaceError
            The driver refused a part; call again once the reason is gone.
        """
        self.map._unregister(self)


class RegistrationMap:
    """What is registered with one driver, through this map.

    Parameters
    ----------
    driver : Driver
    max_chunk : int
        Largest range given to one driver call, in bytes.

    Thread-safe.  An empty range is valid and takes no driver call.
    """

    def __init__(self, driver: Driver, *, max_chunk: int = MAX_CHUNK) -> None:
        if max_chunk <= 0:
            raise InvalidRequestError(f"registration: max_chunk {max_chunk} is not more than zero bytes")
        self.driver = driver
        self.max_chunk = max_chunk
        self._lock = threading.RLock()  # a garbage collection in here may close a registration
        self._chunks: list[Span] = []

    def register(self, address: int, nbytes: int, *, read_only: bool = False) -> Registration:
        """Pin and map ``nbytes`` bytes at ``address``, in as many driver calls as it takes.

        Raises
        ------
        InvalidRequestError
            `nbytes` is negative.
        DriverError
            The driver refused a part; the parts before it are unregistered again.
        """
        if nbytes < 0:
            raise InvalidRequestError(f"registration: {nbytes} bytes at {address:#x} is no range")
        done: list[Span] = []
        with self._lock:
            try:
                for offset in range(0, nbytes, self.max_chunk):
                    chunk = Span(address + offset, min(self.max_chunk, nbytes - offset))
                    self.driver.host_register(chunk.ptr, chunk.nbytes, read_only=read_only)
                    done.append(chunk)
            except BaseException as error:
                self._roll_back(done, error)
                raise
            for chunk in done:
                bisect.insort(self._chunks, chunk)
            return Registration(self, address, nbytes, tuple(done))

    def split(self, address: int, nbytes: int) -> list[Span]:
        """Cut a host range where registrations end: no driver copy may cross such an edge.

        The pieces follow one another and are together the range; an empty range has none.
        """
        pieces = []
        position, end = address, address + nbytes
        with self._lock:
            index = max(bisect.bisect_right(self._chunks, Span(address, 1 << 63)) - 1, 0)
            for chunk in self._chunks[index:]:
                if chunk.ptr >= end:
                    break
                for edge in (chunk.ptr, chunk.ptr + chunk.nbytes):
                    if position < edge < end:
                        pieces.append(Span(position, edge - position))
                        position = edge
        if position < end:
            pieces.append(Span(position, end - position))
        return pieces

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether every byte of a host range is registered through this map."""
        with self._lock:
            index = max(bisect.bisect_right(self._chunks, Span(address, 1 << 63)) - 1, 0)
            position = address
            for chunk in self._chunks[index:]:
                if chunk.ptr > position:
                    break
                position = max(position, chunk.ptr + chunk.nbytes)
            return position >= address + nbytes

    @property
    def nbytes(self) -> int:
        """Bytes registered through this map now."""
        with self._lock:
            return sum(chunk.nbytes for chunk in self._chunks)

    def _unregister(self, registration: Registration) -> None:
        with self._lock:
            while registration.chunks:
                chunk = registration.chunks[-1]
                self.driver.host_unregister(chunk.ptr)
                registration.chunks = registration.chunks[:-1]
                self._chunks.remove(chunk)

    def _roll_back(self, done: list[Span], error: BaseException) -> None:
        for chunk in reversed(done):
            try:
                self.driver.host_unregister(chunk.ptr)
            except AllocatorError as second:
                error.args = (f"{error}; and undoing it failed: {second}", *error.args[1:])


_maps_lock = threading.Lock()


def registrations(driver: Driver) -> RegistrationMap:
    """The map of `driver`: one for the whole process, since registrations are."""
    with _maps_lock:
        found = getattr(driver, "_registration_map", None)
        if found is None:
            found = RegistrationMap(driver)
            driver._registration_map = found  # type: ignore[attr-defined]  # lives and dies with it
        return found
