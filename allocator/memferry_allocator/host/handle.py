"""The handle of a registered range."""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING

from ..driver import Span
from .chunk import Hold

if TYPE_CHECKING:
    from .registration import RegistrationMap


class Registration:
    """A host range that stays registered until `close`, or until this handle is dropped.

    Made by `RegistrationMap.register`, whole or not at all.  A handle that is dropped waits for the work of
    every device, unregisters, and only then lets go of the owner of the pages.

    Attributes
    ----------
    map : RegistrationMap
    address, nbytes : int
        The range that was asked for.
    read_only : bool
        Devices only read it.
    """

    def __init__(self, known: RegistrationMap, span: Span, read_only: bool, hold: Hold) -> None:
        self.map = known
        self.address, self.nbytes = span
        self.read_only = read_only
        self._hold = hold
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(
            self, known.driver.finalise, functools.partial(_abandon, known, hold, self._pid)
        )
        self._finalizer.atexit = False  # the driver may be going down

    def __repr__(self) -> str:
        # `stale` takes a lock, which another thread may have held at a fork.
        gone = any(chunk.gone or chunk.witness.contradiction() for chunk in tuple(self._hold.chunks))
        state = "closed" if self.closed else "stale" if gone else "open"
        return f"<Registration {self.name or 'unnamed'}: {self.nbytes} bytes at {self.address:#x}, {state}>"

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """Who registered it, for people."""
        return self._hold.name

    @property
    def chunks(self) -> tuple[Span, ...]:
        """What the driver has registered for it, in order; a shared chunk may reach beyond the range."""
        return tuple(chunk.span for chunk in self._hold.chunks if not chunk.gone)

    @property
    def closed(self) -> bool:
        """Whether nothing of the range is registered any more; so from the start, if it is empty."""
        return not self.chunks

    @property
    def stale(self) -> bool:
        """Whether devices may see other pages than the host; see `RegistrationMap.why_stale`."""
        return bool(self.map.why_stale(self))

    def close(self) -> None:
        """Unregister what nobody else has registered too.  Work on it must be over; a second call does nothing.

        Raises
        ------
        DriverError, RaceError
            The driver refused a part; call again once the reason is gone.
        ForkedError
            This process is a child of the one that registered it.
        """
        if self._hold.chunks:
            self.map.driver.require_usable()
            self.map._close(self._hold)
        self._finalizer.detach()


def _abandon(known: RegistrationMap, hold: Hold, pid: int) -> None:
    if os.getpid() == pid:  # a forked child owns neither the registration nor the right to undo it
        known._abandon(hold)
