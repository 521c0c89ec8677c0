"""Real memory for emulated virtual memory: addresses of this process, filled with pages piece by piece."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from functools import cache
from typing import Any

_NO_ACCESS, _READ_WRITE = 0, 1 | 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NO_RESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class RealPages:
    """Pages of one file without a name; a place in it is used once, so that it also names the pages."""

    def __init__(self, granularity: int, stale: int) -> None:
        self.granularity = granularity
        self._end = 0
        self._file = os.memfd_create("memferry-pages", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file).atexit = False
        self._stale = self.take(granularity, stale)

    def take(self, nbytes: int, value: int) -> int:
        """The place of new pages, every byte `value`.

        Raises
        ------
        OSError
            The machine has not that much memory.
        """
        place = self._end
        os.posix_fallocate(self._file, place, nbytes)
        self._end += nbytes
        address = _map(0, nbytes, _SHARED, self._file, place)
        ctypes.memset(address, value, nbytes)
        _unmap(address, nbytes)
        return place

    def give_back(self, place: int, nbytes: int) -> None:
        """Let go of the memory behind pages that are mapped nowhere."""
        if _libc().fallocate(self._file, _KEEP_SIZE | _PUNCH_HOLE, place, nbytes) != 0:
            raise _os_error(f"fallocate of {nbytes} bytes")

    def map(self, address: int, place: int, nbytes: int) -> None:
        _map(address, nbytes, _SHARED | _FIXED, self._file, place)

    def map_stale(self, address: int, nbytes: int) -> None:
        """Leave poison where pages were: who kept a view of them sees it instead of crashing."""
        for start in range(address, address + nbytes, self.granularity):
            _map(start, self.granularity, _PRIVATE | _FIXED, self._file, self._stale)


class RealRange:
    """Reserved addresses of this process; given back when nobody holds this object any more."""

    def __init__(self, nbytes: int) -> None:
        self.address = _map(0, nbytes, _PRIVATE | _ANONYMOUS | _NO_RESERVE, -1, 0, rights=_NO_ACCESS)
        weakref.finalize(self, _unmap, self.address, nbytes).atexit = False


@cache
def _open() -> tuple[Any, Any]:
    from cffi import FFI  # here: its import takes longer than that of all our modules

    made = FFI()
    made.cdef("""
        void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset);
        int munmap(void *addr, size_t length);
        int fallocate(int fd, int mode, long offset, long len);
    """)
    return made, made.dlopen(None)


def _libc() -> Any:
    return _open()[1]


def _ffi() -> Any:
    return _open()[0]


def _map(address: int, nbytes: int, flags: int, file: int, offset: int, *, rights: int = _READ_WRITE) -> int:
    result = _libc().mmap(_ffi().cast("void *", address), nbytes, rights, flags, file, offset)
    real = int(_ffi().cast("intptr_t", result))
    if real == -1:
        raise _os_error(f"mmap of {nbytes} bytes")
    return real


def _unmap(address: int, nbytes: int) -> None:
    _libc().munmap(_ffi().cast("void *", address), nbytes)


def _os_error(call: str) -> OSError:
    code = _ffi().errno
    return OSError(code, f"{call}: {os.strerror(code)} ({errno.errorcode.get(code, code)})")
