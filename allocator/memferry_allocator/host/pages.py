"""Host pages of our own, and arrays over ranges that something else keeps."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..driver import Span
from ..errors import OutOfMemory
from ..sizes import align_up, format_size
from . import libc

HUGE_PAGE = 2 << 20

T = TypeVar("T")


class HostPages:
    """A mapped range, unmapped when nothing refers to this object any more.

    Registering them with ``owner=pages`` keeps them mapped until they are unregistered.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._finalizer = weakref.finalize(self, _unmap, address, nbytes, os.getpid())
        self._finalizer.atexit = False  # the pages go with the process

    @classmethod
    def anonymous(cls, nbytes: int) -> HostPages:
        """Private zero pages at a huge-page boundary, and nothing mapped beside them; none is resident yet.

        Raises
        ------
        OutOfMemory
            There are not so many addresses.
        """
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
        return cls(aligned, nbytes)

    @classmethod
    def shared(cls, fd: int, nbytes: int) -> HostPages:
        """The pages of a file, at a huge-page boundary.

        Raises
        ------
        OutOfMemory
            There are not so many addresses.
        OSError
            The file cannot be mapped.
        """
        pages = cls.anonymous(nbytes)
        libc.map_shared(fd, nbytes, pages.address)
        return pages

    def collapse(self, offset: int, nbytes: int) -> bool:
        """Exchange resident pages of a part for huge ones, by all processors.

        Returns whether the system has done so wherever a huge page fits.
        """
        first = align_up(offset, HUGE_PAGE)
        whole = (offset + nbytes - first) // HUGE_PAGE * HUGE_PAGE
        return all(self._by_threads(0, first, max(whole, 0), libc.collapse))

    def touch(self, threads: int = 0) -> None:
        """Make every page resident and zero, each thread its own contiguous share; 0 takes all processors."""
        self._by_threads(threads, 0, self.nbytes, libc.zero)

    def _by_threads(self, threads: int, first: int, nbytes: int, work: Callable[[int, int], T]) -> list[T]:
        from concurrent.futures import ThreadPoolExecutor  # here: its import takes milliseconds

        workers = threads or len(os.sched_getaffinity(0))
        share = max(HUGE_PAGE, align_up(-(-nbytes // workers), HUGE_PAGE))

        def part(start: int) -> T:
            return work(self.address + first + start, min(share, nbytes - start))

        with ThreadPoolExecutor(workers, thread_name_prefix="memferry-touch") as pool:
            return list(pool.map(part, range(0, nbytes, share)))

    def unmap(self) -> None:
        """Unmap now: nothing may use them any more."""
        self._finalizer()


class _Bytes:
    """What NumPy holds on to: a range under the array interface, and its keeper."""

    def __init__(self, span: Span, keeper: object, read_only: bool) -> None:
        self._keeper = keeper
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (span.nbytes,),
            "data": (span.ptr, read_only),
        }


def as_array(span: Span, keeper: object, *, read_only: bool = False) -> npt.NDArray[np.uint8]:
    """The bytes of a host range as an array that keeps `keeper` alive."""
    return np.asarray(_Bytes(span, keeper, read_only))


def _unmap(address: int, nbytes: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child may still read its own copy
        libc.unmap(address, nbytes)
