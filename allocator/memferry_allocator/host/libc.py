"""The few calls of the C library that Python's own `mmap` does not reach."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import threading
from functools import cache
from typing import Any

PROT_READ_WRITE = 1 | 2
MAP_SHARED = 0x01
MAP_FIXED = 0x10
MAP_PRIVATE_ANONYMOUS = 0x02 | 0x20
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25
MS_ASYNC = 1
MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259}  # the C library has no function for it

_opening = threading.RLock()


@cache
def libc() -> Any:
    """The C library, opened at first use."""
    with _opening:
        return _open()[1]


@cache
def ffi() -> Any:
    """What the C library was opened with."""
    with _opening:
        return _open()[0]


@cache
def _open() -> tuple[Any, Any]:
    from cffi import FFI  # here: its import takes longer than that of all our modules

    made = FFI()
    made.cdef("""
        void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset);
        int munmap(void *addr, size_t length);
        int madvise(void *addr, size_t length, int advice);
        int msync(void *addr, size_t length, int flags);
        long syscall(long number, ...);
        void *memset(void *s, int c, size_t n);
    """)
    return made, made.dlopen(None)


def pointer(address: int) -> Any:
    return ffi().cast("void *", address)


def os_error(call: str) -> OSError:
    code = ffi().errno
    return OSError(code, f"{call}: {os.strerror(code)} ({errno.errorcode.get(code, code)})")


def map_anonymous(nbytes: int) -> int:
    """Reserve private zero pages and return their address; nothing is resident yet."""
    return _map(ffi().NULL, nbytes, MAP_PRIVATE_ANONYMOUS, -1)


def map_shared(fd: int, nbytes: int, address: int) -> int:
    """Map the start of a file so that every process which does sees the same pages.

    It takes the place of what is mapped at `address`, which must be the caller's own.
    """
    return _map(pointer(address), nbytes, MAP_SHARED | MAP_FIXED, fd)


def _map(place: Any, nbytes: int, flags: int, fd: int) -> int:
    address = int(ffi().cast("intptr_t", libc().mmap(place, nbytes, PROT_READ_WRITE, flags, fd, 0)))
    if address == -1:
        raise os_error(f"mmap of {nbytes} bytes")
    return address


def unmap(address: int, nbytes: int) -> None:
    if nbytes and libc().munmap(pointer(address), nbytes) != 0:
        raise os_error(f"munmap of {nbytes} bytes at {address:#x}")


def advise_huge(address: int, nbytes: int) -> bool:
    """Ask for huge pages; False where the kernel has none to give."""
    return bool(libc().madvise(pointer(address), nbytes, MADV_HUGEPAGE) == 0)


def collapse(address: int, nbytes: int) -> bool:
    """Exchange resident pages for huge ones, whatever the system does by itself; False where it cannot."""
    return bool(libc().madvise(pointer(address), nbytes, MADV_COLLAPSE) == 0)


def zero(address: int, nbytes: int) -> None:
    """Write zeros, without the interpreter lock."""
    libc().memset(pointer(address), 0, nbytes)


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether something is mapped behind every byte of a range."""
    start = address & -mmap.PAGESIZE
    # Asynchronous flushing has long been a check of the range and nothing else.
    return bool(libc().msync(pointer(start), address + nbytes - start, MS_ASYNC) == 0)


def bind(address: int, nbytes: int, node: int) -> None:
    """Take the pages of a range, once they are touched, from one NUMA node."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind: its number on {platform.machine()} is not known")
    words = ffi().new("unsigned long[]", node // 64 + 1)
    words[node // 64] = 1 << node % 64
    arguments = [
        pointer(address),
        ffi().cast("unsigned long", nbytes),
        ffi().cast("int", MPOL_BIND),
        words,
        ffi().cast("unsigned long", 64 * len(words) + 1),  # the kernel reads one bit less
        ffi().cast("unsigned int", 0),
    ]
    if libc().syscall(number, *arguments) != 0:
        raise os_error(f"mbind of {nbytes} bytes to node {node}")


def address_of(buffer: Any) -> int:
    """Where the bytes of a contiguous buffer begin."""
    return int(ffi().cast("uintptr_t", ffi().from_buffer(buffer)))
