"""Host pages of our own, and arrays over ranges that something else keeps."""

from __future__ import annotations

import os
import weakref

import numpy as np
import numpy.typing as npt

from ..driver import Span
from . import libc


class HostPages:
    """A mapped range, unmapped when nothing refers to this object any more.

    Registering them with ``owner=pages`` keeps them mapped until they are unregistered.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._finalizer = weakref.finalize(self, _unmap, address, nbytes, os.getpid())
        self._finalizer.atexit = False  # the pages go with the process

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
