"""Host pages for state that an accelerator reaches: huge, resident, registered once, of the exact size."""

from __future__ import annotations

import functools
import mmap
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..driver import Driver, Span
from ..errors import AllocatorError, ClosedError, InvalidRequestError, OutOfMemory
from ..sizes import align_up, format_size
from . import libc
from .registration import Registration, registrations

HUGE_PAGE = 2 << 20
SLICE_ALIGNMENT = 256


@dataclass(frozen=True)
class ArenaOptions:
    """How a host arena comes to be.

    Attributes
    ----------
    huge_pages : bool
        Ask for 2 MiB pages: they are touched and registered several times faster.
    touch : bool
        Make every page resident at once, in parallel, instead of one fault at a time later.
    register : bool
        Pin the pages and map them into every device.
    threads : int
        Threads that touch pages; 0 takes the processors this process may use.
    """

    huge_pages: bool = True
    touch: bool = True
    register: bool = True
    threads: int = 0


class HostArena:
    """One range of host pages, from which slices are cut in order.

    The arena owns its pages, and whoever holds a slice's array keeps the arena: pages are unmapped only
    when no array of them is left, and after the work of every device.  Sizes are rounded up to whole pages
    (4 KiB), never further.  Thread-safe.

    Parameters
    ----------
    driver : Driver
    nbytes : int
        Size in bytes.
    options : ArenaOptions, optional

    Raises
    ------
    OutOfMemory
        The operating system has no such range.
    DriverError
        The pages could not be registered; nothing is left mapped.
    """

    def __init__(self, driver: Driver, nbytes: int, options: ArenaOptions | None = None) -> None:
        if nbytes <= 0:
            raise InvalidRequestError(f"arena: {nbytes} is not more than zero bytes")
        self.driver = driver
        self.options = options or ArenaOptions()
        self.nbytes = align_up(nbytes, mmap.PAGESIZE)
        self.address = _map_aligned(self.nbytes)
        self.huge_pages = self.options.huge_pages and libc.advise_huge(self.address, self.nbytes)
        self.registration: Registration | None = None
        self._used = 0
        self._closed = False
        self._lock = threading.Lock()
        try:
            if self.options.touch:
                _touch(self.address, self.nbytes, self.options.threads)
            if self.options.register:
                self.registration = registrations(driver).register(self.address, self.nbytes)
        except BaseException:
            libc.unmap(self.address, self.nbytes)
            raise
        release = functools.partial(_release, self.registration, self.address, self.nbytes, os.getpid())
        self._finalizer = weakref.finalize(self, driver.finalise, release)
        self._finalizer.atexit = False  # the pages go with the process; the driver may be going down

    @property
    def used(self) -> int:
        """Bytes cut off so far, alignment included."""
        return self._used

    @property
    def closed(self) -> bool:
        return self._closed

    def cut(self, nbytes: int, *, alignment: int = SLICE_ALIGNMENT) -> Span:
        """The next `nbytes` bytes of the arena, aligned to a power of two; 0 is a valid empty slice.

        Raises
        ------
        OutOfMemory
            The rest of the arena is smaller.
        """
        self._require_open()
        if nbytes < 0 or alignment <= 0 or alignment & (alignment - 1):
            raise InvalidRequestError(f"arena: cannot cut {nbytes} bytes aligned to {alignment}")
        if nbytes == 0:
            return Span(self.address, 0)
        with self._lock:
            start = align_up(self.address + self._used, alignment) - self.address
            if start + nbytes > self.nbytes:
                raise OutOfMemory(
                    f"host arena: asked for {format_size(nbytes)} aligned to {alignment}, "
                    f"{format_size(self.nbytes - self._used)} of {format_size(self.nbytes)} left; "
                    "make the arena larger",
                    size=nbytes,
                    used=self._used,
                    limit=self.nbytes,
                    budget="host arena",
                )
            self._used = start + nbytes
            return Span(self.address + start, nbytes)

    def array(self, span: Span) -> npt.NDArray[np.uint8]:
        """The bytes of a slice as a NumPy array that keeps the arena mapped.

        Raises
        ------
        InvalidRequestError
            `span` is not inside the arena.
        """
        self._require_open()
        if span.nbytes < 0 or span.ptr < self.address or span.ptr + span.nbytes > self.address + self.nbytes:
            raise InvalidRequestError(
                f"arena: {span.nbytes} bytes at {span.ptr:#x} are not inside its {self.nbytes} bytes at "
                f"{self.address:#x}"
            )
        holder = _Pages(self, span)
        return np.asarray(holder)

    def close(self) -> None:
        """Unregister now: no device may use the pages any more.  A second call does nothing.

        Arrays of the pages stay valid for the host; the pages are unmapped with the last of them.

        Raises
        ------
        DriverError, RaceError
            Work on the pages is not over; they stay registered until a later call succeeds.
        """
        self._closed = True
        if self.registration is not None:
            self.registration.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("arena: it was closed; make a new HostArena")


class _Pages:
    """What NumPy holds on to: the arena's pages under the array interface."""

    def __init__(self, arena: HostArena, span: Span) -> None:
        self._arena = arena
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (span.nbytes,),
            "data": (span.ptr, False),
        }


def _map_aligned(nbytes: int) -> int:
    """Map `nbytes` at a huge-page boundary and nothing beside it."""
    try:
        start = libc.map_anonymous(nbytes + HUGE_PAGE)
    except (OSError, OverflowError) as error:
        raise OutOfMemory(
            f"host arena: {format_size(nbytes)} cannot be mapped ({error}); ask for less",
            size=nbytes,
            used=0,
            limit=0,
            budget="host memory",
        ) from None
    aligned = align_up(start, HUGE_PAGE)
    libc.unmap(start, aligned - start)
    libc.unmap(aligned + nbytes, start + HUGE_PAGE - aligned)
    return aligned


def _touch(address: int, nbytes: int, threads: int) -> None:
    """Make every page resident, each thread its own contiguous share."""
    workers = threads or len(os.sched_getaffinity(0))
    share = align_up(-(-nbytes // workers), HUGE_PAGE)
    starts = range(0, nbytes, share)
    with ThreadPoolExecutor(workers, thread_name_prefix="memferry-touch") as pool:
        list(pool.map(lambda start: libc.zero(address + start, min(share, nbytes - start)), starts))


def _release(registration: Registration | None, address: int, nbytes: int, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child owns neither the registration nor the right to undo it
    try:
        if registration is not None and not registration.closed:
            registration.map.driver.synchronize_all()
            registration.close()
    except AllocatorError:
        return  # a device may still use the pages: better lost than given to somebody else
    libc.unmap(address, nbytes)
