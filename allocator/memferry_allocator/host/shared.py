"""Host pages that several processes map and register, each for its own devices."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..driver import Driver, Span
from ..errors import ClosedError, InvalidRequestError, OutOfMemory
from ..sizes import align_up, format_size
from .checks import require_driver, require_int, require_span
from .limits import require_memory
from .pages import HostPages, as_array
from .registration import registrations

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedArena:
    """Registered host pages that other processes attach to by a file descriptor; they have no name.

    The pages live as long as some process has them mapped or keeps a descriptor of them.  Only processes that
    were handed one reach them, and none can shrink them.  Nothing orders what two processes do with the bytes:
    synchronise the stream before telling the other process, by a pipe, queue or barrier.

    Made by `create` and `attach`; send `handle()` to the other process.  Sizes are rounded up to whole pages.
    Dropping it unregisters its pages here, after the work of every device, and unmaps them.

    Attributes
    ----------
    driver : Driver
    address, nbytes : int
        Where this process has the pages, and their size in bytes.
    fd : int
        The descriptor, closed with the arena; duplicate it to keep it.
    huge_pages : bool
        Whether its creator has got huge pages for all that fills one; False where it was attached.
    parts : tuple of Span
        What of it has memory and is registered, as offsets; by default all is one part.
    """

    def __init__(
        self, driver: Driver, fd: int, nbytes: int, parts: Sequence[Span], *, collapse: bool = False
    ) -> None:
        """For `create` and `attach`; takes `fd` over."""
        self.driver = driver
        self.fd = fd
        self.nbytes = nbytes
        self.parts = tuple(parts)
        self._descriptor = weakref.finalize(self, _close, fd, os.getpid())
        self._descriptor.atexit = False
        try:
            self._pages = _map(fd, nbytes)
            self.address = self._pages.address
            collapsed = [self._pages.collapse(*part) for part in self.parts if collapse]
            self.huge_pages = collapse and all(collapsed)
            self._registered = [
                registrations(driver).register(
                    self.address + part.ptr, part.nbytes, owner=self._pages, name="SharedArena"
                )
                for part in self.parts
            ]
        except BaseException:
            self._descriptor()
            raise

    @classmethod
    def create(cls, driver: Driver, nbytes: int, *, parts: Sequence[Span] | None = None) -> SharedArena:
        """New pages, zero, resident and registered; huge ones where the system can make them.

        Parameters
        ----------
        driver : Driver
        nbytes : int
        parts : sequence of Span, optional
            Offsets and bytes of what is needed; whole pages of that alone get memory and are registered.  The rest
            has addresses, reads as zeros, and takes memory where it is touched.

        Raises
        ------
        OutOfMemory
            The operating system has not got the pages.
        RegistrationError, ForkedError
            See `RegistrationMap.register`; nothing is left.
        """
        require_driver(driver, "shared arena").require_usable()
        nbytes = require_int(nbytes, "shared arena")
        if nbytes <= 0:
            raise InvalidRequestError(f"shared arena: {format_size(nbytes)} is not more than zero bytes")
        nbytes = align_up(nbytes, mmap.PAGESIZE)
        pages = _whole_pages(parts, nbytes)
        require_memory(sum(part.nbytes for part in pages), "shared arena")
        fd = os.memfd_create("memferry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            _fill(fd, nbytes, pages)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(driver, fd, nbytes, pages, collapse=True)

    @classmethod
    def attach(cls, driver: Driver, fd: int, nbytes: int, *, parts: Sequence[Span] | None = None) -> SharedArena:
        """The pages that another process has created.

        Parameters
        ----------
        driver : Driver
            Of this process.
        fd : int
            A descriptor of them; it stays the caller's.
        nbytes : int
            Their size, as the creator's arena has it.
        parts : sequence of Span, optional
            What the creator has given.

        Raises
        ------
        InvalidRequestError
            `fd` is no such descriptor, its file is of another size or could still shrink; nothing was changed.
        """
        require_driver(driver, "shared arena").require_usable()
        own = _duplicate(fd)
        try:
            _require_pages(own, fd, require_int(nbytes, "shared arena"))
        except BaseException:
            os.close(own)
            raise
        return cls(driver, own, nbytes, _whole_pages(parts, nbytes))

    @property
    def span(self) -> Span:
        """The whole arena."""
        return Span(self.address, self.nbytes)

    @property
    def closed(self) -> bool:
        return not self._descriptor.alive

    def handle(self) -> SharedHandle:
        """What another process attaches with; see `SharedHandle`."""
        self._require_open()
        fd = _duplicate(self.fd)
        return SharedHandle(fd, self.nbytes, _identity(fd), _Descriptor(fd))

    def array(self, span: Span | None = None) -> npt.NDArray[np.uint8]:
        """The bytes of a part, or of all, as an array that keeps the arena mapped."""
        self._require_open()
        span = self.span if span is None else require_span(span, "shared arena")
        if span.nbytes < 0 or span.ptr < self.address or span.ptr + span.nbytes > self.address + self.nbytes:
            raise InvalidRequestError(
                f"shared arena: {span.nbytes} bytes at {span.ptr:#x} are not inside its {self.nbytes} bytes at "
                f"{self.address:#x}"
            )
        return as_array(span, self)

    def close(self) -> None:
        """Unregister here and close the descriptor; a second call does nothing.

        Arrays stay valid for the host.  Other processes keep what they have attached to.

        Raises
        ------
        DriverError, RaceError
            Work on a part is not over; it, the parts behind it and the descriptor are as before.
        """
        for registration in self._registered:
            registration.close()
        self._descriptor()

    def _require_open(self) -> None:
        self.driver.require_usable()
        if self.closed:
            raise ClosedError("shared arena: it was closed; attach to it again")


@dataclass(frozen=True)
class SharedHandle:
    """A shared arena on its way to another process, as an argument of a `multiprocessing` process or in a queue.

    It has a descriptor of its own, which travels by inheritance or over a socket, never by name, and is closed
    with it; the arena may be closed before.  It is only pickled by `multiprocessing`, and unpickled once.
    """

    fd: int
    nbytes: int
    identity: tuple[int, int]  # of the file: a descriptor's number may come to mean another one
    keeper: object = None

    def attach(self, driver: Driver) -> SharedArena:
        """`SharedArena.attach` in the process that has received it."""
        arena = SharedArena.attach(driver, self.fd, self.nbytes)
        if _identity(arena.fd) != self.identity:
            arena.close()
            raise InvalidRequestError(
                f"shared arena: the handle's descriptor {self.fd} was closed, and is another file's now; make a "
                "new handle(), and unpickle it once"
            )
        return arena

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd  # here: few need it, and its import takes milliseconds

        return _received, (DupFd(self.fd), self.nbytes, self.identity)


class _Descriptor:
    """A handle's own descriptor; closed with it."""

    def __init__(self, fd: int) -> None:
        weakref.finalize(self, _close, fd, os.getpid()).atexit = False


def _received(duplicate: Any, nbytes: int, identity: tuple[int, int]) -> SharedHandle:
    fd = duplicate.detach()
    os.set_inheritable(fd, False)
    return SharedHandle(fd, nbytes, identity, _Descriptor(fd))


def _duplicate(fd: int) -> int:
    try:
        return os.dup(fd)
    except (OSError, OverflowError, TypeError) as error:
        raise InvalidRequestError(
            f"shared arena: {fd!r} is not the descriptor of a SharedArena ({error}); send its handle()"
        ) from None


def _require_pages(own: int, fd: int, nbytes: int) -> None:
    """Refuse what are not `nbytes` bytes that cannot shrink; `fd` is what the caller calls it."""
    try:
        seals, found = fcntl.fcntl(own, fcntl.F_GET_SEALS), os.fstat(own).st_size
    except OSError as error:
        raise InvalidRequestError(
            f"shared arena: descriptor {fd} is not that of a SharedArena ({error}); send its handle()"
        ) from None
    if not seals & fcntl.F_SEAL_SHRINK or found != nbytes or nbytes <= 0:
        raise InvalidRequestError(
            f"shared arena: descriptor {fd} has {found} bytes and seals {seals:#x}, asked for "
            f"{format_size(nbytes)} that cannot shrink; attach with the creator's own handle()"
        )


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _map(fd: int, nbytes: int) -> HostPages:
    try:
        return HostPages.shared(fd, nbytes)
    except (OSError, OverflowError) as error:
        raise _out_of_memory(nbytes, error) from None


def _whole_pages(parts: Sequence[Span] | None, nbytes: int) -> list[Span]:
    """The pages that hold these bytes, in order; those that follow one another are one part."""
    if parts is None:
        return [Span(0, nbytes)]
    found: list[Span] = []
    for part in sorted(part for part in parts if part.nbytes):
        first, end = part.ptr // mmap.PAGESIZE * mmap.PAGESIZE, align_up(part.ptr + part.nbytes, mmap.PAGESIZE)
        if first < 0 or end > nbytes:
            raise InvalidRequestError(
                f"shared arena: a part of {part.nbytes} bytes at offset {part.ptr} is not inside its {nbytes} "
                "bytes; give offsets from its beginning"
            )
        if found and first <= found[-1].ptr + found[-1].nbytes:
            last = found.pop()
            first, end = last.ptr, max(end, last.ptr + last.nbytes)
        found.append(Span(first, end - first))
    return found


def _fill(fd: int, nbytes: int, parts: Sequence[Span]) -> None:
    """Give the file its pages now: one that is short of them later kills whoever touches it."""
    try:
        os.ftruncate(fd, nbytes)
        for part in parts:
            os.posix_fallocate(fd, *part)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise _out_of_memory(nbytes, error) from None


def _out_of_memory(nbytes: int, error: Exception) -> OutOfMemory:
    return OutOfMemory(
        f"shared arena: {format_size(nbytes)} cannot be had ({error}); ask for less, or raise the container's "
        "memory limit",
        size=nbytes,
        used=0,
        limit=0,
        budget="host memory",
    )


def _close(fd: int, pid: int) -> None:
    if os.getpid() == pid:
        os.close(fd)
