"""One arena of host pages for all ranks of a host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memferry_allocator import Driver, SharedArena, Span
from memferry_allocator.sizes import align_up

from ..errors import RankError
from ..layout import ALIGNMENT


@dataclass(frozen=True)
class ArenaAddress:
    """Where another process of the same user finds an arena: a descriptor of the process that made it."""

    pid: int
    fd: int
    nbytes: int
    parts: tuple[Span, ...]


class RankArena:
    """Slabs cut from shared pages: at the same offsets on every rank, if all cut alike.

    The pages have no name, and are gone with the last process that has them mapped, however it ends.

    Parameters
    ----------
    arena : SharedArena
    """

    def __init__(self, arena: SharedArena) -> None:
        self._arena = arena
        self._used = 0

    @classmethod
    def create(cls, driver: Driver, nbytes: int, parts: Sequence[Span] | None = None) -> RankArena:
        """New pages, zero; see `SharedArena.create`."""
        return cls(SharedArena.create(driver, nbytes, parts=parts))

    @classmethod
    def attach(cls, driver: Driver, address: ArenaAddress) -> RankArena:
        """The pages that another rank has made and still holds open.

        Raises
        ------
        RankError
            This process may not open them.
        """
        try:
            fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RankError(
                f"the host state that process {address.pid} shares cannot be opened ({error}); run all ranks of a "
                "host as one user, and in one container"
            ) from None
        try:
            return cls(SharedArena.attach(driver, fd, address.nbytes, parts=address.parts))
        finally:
            os.close(fd)

    @property
    def address(self) -> ArenaAddress:
        return ArenaAddress(os.getpid(), self._arena.fd, self._arena.nbytes, self._arena.parts)

    @property
    def nbytes(self) -> int:
        """Bytes that have memory."""
        return sum(part.nbytes for part in self._arena.parts)

    def cut(self, nbytes: int) -> Span:
        """The next bytes, aligned to 256."""
        span = Span(self._arena.address + self._used, nbytes)
        self.array(span)  # refuses what is not there
        self._used += align_up(nbytes, ALIGNMENT)
        return span

    def array(self, span: Span) -> npt.NDArray[np.uint8]:
        """The bytes of a part, as an array that keeps them mapped."""
        return self._arena.array(span)

    def close(self) -> None:
        """Unregister here; the others keep what they have."""
        self._arena.close()
