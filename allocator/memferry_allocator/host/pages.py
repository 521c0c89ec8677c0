"""Host pages of our own, and arrays over ranges that something else keeps."""

from __future__ import annotations

import os
import weakref

import numpy as np
import numpy.typing as npt

from ..driver import Span
from ..errors import OutOfMemory
from ..sizes import align_up, format_size
from . import libc

HUGE_PAGE = 2 << 20


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

    def touch(self, threads: int = 0) -> None:
        """Make every page resident and zero, each thread its own contiguous share; 0 takes all processors."""
        from concurrent.futures import ThreadPoolExecutor  # here: its import takes milliseconds

        workers = threads or len(os.sched_getaffinity(0))
        share = align_up(-(-self.nbytes // workers), HUGE_PAGE)

        def zero(start: int) -> None:
            libc.zero(self.address + start, min(share, self.nbytes - start))

        with ThreadPoolExecutor(workers, thread_name_prefix="memferry-touch") as pool:
            list(pool.map(zero, range(0, self.nbytes, share)))

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
