"""The few calls of the C library that Python's own `mmap` does not reach."""

from __future__ import annotations

import errno
import os
import threading
from functools import cache
from typing import Any

from cffi import FFI

PROT_READ_WRITE = 1 | 2
MAP_PRIVATE_ANONYMOUS = 0x02 | 0x20
MADV_HUGEPAGE = 14

ffi = FFI()


_opening = threading.RLock()


@cache
def libc() -> Any:
    """The C library, opened at first use."""
    with _opening:
        return _open()


@cache
def _open() -> Any:
    ffi.cdef("""
        void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset);
        int munmap(void *addr, size_t length);
        int madvise(void *addr, size_t length, int advice);
        void *memset(void *s, int c, size_t n);
    """)
    return ffi.dlopen(None)


def pointer(address: int) -> Any:
    return ffi.cast("void *", address)


def os_error(call: str) -> OSError:
    code = ffi.errno
    return OSError(code, f"{call}: {os.strerror(code)} ({errno.errorcode.get(code, code)})")


def map_anonymous(nbytes: int) -> int:
    """Reserve private zero pages and return their address; nothing is resident yet."""
    address = int(
        ffi.cast("intptr_t", libc().mmap(ffi.NULL, nbytes, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, -1, 0))
    )
    if address == -1:
        raise os_error(f"mmap of {nbytes} bytes")
    return address


def unmap(address: int, nbytes: int) -> None:
    if nbytes and libc().munmap(pointer(address), nbytes) != 0:
        raise os_error(f"munmap of {nbytes} bytes at {address:#x}")


def advise_huge(address: int, nbytes: int) -> bool:
    """Ask for huge pages; False where the kernel has none to give."""
    return bool(libc().madvise(pointer(address), nbytes, MADV_HUGEPAGE) == 0)


def zero(address: int, nbytes: int) -> None:
    """Write zeros, without the interpreter lock."""
    libc().memset(pointer(address), 0, nbytes)
