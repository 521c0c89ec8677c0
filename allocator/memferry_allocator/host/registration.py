"""Registered host ranges: pinned, mapped into every device, counted, and known by their boundaries."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from weakref import WeakSet

from ..driver import Driver, Span
from ..errors import AllocatorError, ForkedError, InvalidRequestError
from .checks import require_driver, require_int
from .chunk import Chunk, Hold
from .handle import Registration
from .ledger import Foreign, Ledger
from .lock import FinaliserLock

MAX_CHUNK = 64 << 30  # one driver call for 512 GiB or more fails on current drivers
_END = 1 << 64


class RegistrationMap:
    """What is registered with one driver, through this map.

    Ranges are counted: what is registered already never reaches the driver again, only the gaps do.

    Parameters
    ----------
    driver : Driver
    max_chunk : int
        Largest range given to one driver call, in bytes.

    Thread-safe.  An empty range is valid and takes no driver call.
    """

    def __init__(self, driver: Driver, *, max_chunk: int = MAX_CHUNK) -> None:
        self.driver = require_driver(driver, "registration")
        self.max_chunk = _chunk_size(max_chunk)
        self._lock = FinaliserLock()
        self._ledger = Ledger(driver)
        self._put_off: list[Hold] = []
        with _maps_lock:
            _maps.add(self)

    # -- registering ----------------------------------------------------------------------------------
    def register(
        self,
        address: int,
        nbytes: int,
        *,
        read_only: bool = False,
        owner: object | None = None,
        name: str = "",
        foreign: Foreign = Foreign.REFUSE,
        max_chunk: int | None = None,
    ) -> Registration:
        """Pin and map ``nbytes`` bytes at ``address``, in as many driver calls as it takes.

        Parameters
        ----------
        address, nbytes : int
            Any range of mapped host memory; it need not begin or end at a page.
        read_only : bool
            Devices only read it; needed where the mapping itself is read-only.
        owner : object, optional
            What the pages depend on: kept alive until they are unregistered.  (Watching it instead would
            come too late: CPython's `mmap` unmaps before it tells.)  Without it the caller answers for the pages.
        name : str
            Shown by `describe`.
        foreign : Foreign
            Whether a range that somebody else has registered is an error or borrowed.
        max_chunk : int, optional
            Largest range given to one driver call here, instead of the map's.

        Returns
        -------
        Registration
            Keep it: the range stays registered as long as it.

        Raises
        ------
        InvalidRequestError
            Not a range of addresses, or registered read-only and now to be written; or `name` is no text, or
            `foreign` no `Foreign`.
        RegistrationError
            The driver refused a part; it says why.  The parts before it are unregistered again.
        UnsupportedError
            `read_only` on a device that cannot.
        ForkedError
            This process is a child of the one that opened the driver.
        """
        span = _as_range(address, nbytes)
        if not isinstance(name, str):
            raise InvalidRequestError(f"registration: name={name!r} is not text; give a str")
        if not isinstance(foreign, Foreign):
            raise InvalidRequestError(f"registration: foreign={foreign!r} is not Foreign.REFUSE or Foreign.BORROW")
        largest = self.max_chunk if max_chunk is None else _chunk_size(max_chunk)
        self.driver.require_usable()
        hold = Hold(name, owner)
        if span.nbytes:
            with self._lock, self.driver.beside_captures():
                self._end_abandoned()
                self._ledger.take(hold, span, read_only, foreign, largest)
        return Registration(self, span, read_only, hold)

    # -- unregistering --------------------------------------------------------------------------------
    def _close(self, hold: Hold) -> None:
        with self._lock, self.driver.beside_captures():
            self._end_abandoned()
            self._ledger.drop(hold)

    def _abandon(self, hold: Hold) -> None:
        """For the finaliser of a handle: a device may still use the pages, and nobody hears of an error."""

        def end() -> None:
            self._put_off.append(hold)
            self._end_abandoned()

        self._lock.finalise(end)

    def _end_abandoned(self) -> None:
        """Give up what was put off, now that it may be waited for; during a capture that would break it."""
        while self._put_off and not self.driver.capture_under_way():
            hold = self._put_off.pop()
            # Pages that a device may still use stay registered: better lost than given to somebody else.
            with contextlib.suppress(AllocatorError), self.driver.beside_captures():
                if any(chunk.holders == [hold] and not chunk.gone for chunk in hold.chunks):
                    self.driver.synchronize_all()
                self._ledger.drop(hold)

    # -- stale ranges ---------------------------------------------------------------------------------
    def why_stale(self, registration: Registration) -> str:
        """Why devices may see other pages than the host does at this range; empty if nothing says so.

        Pages that were unmapped, given up, or replaced by those of another file are found; so is a borrowed
        range that its owner has unregistered.  Private anonymous pages that were replaced by others of that
        kind are found as long as the new ones were not touched.
        """
        self.driver.require_usable()
        with self._lock:
            found = (self._ledger.why_stale(chunk) for chunk in registration._hold.chunks)
            return next((why for why in found if why), "")

    # -- looking --------------------------------------------------------------------------------------
    def device_ptr(self, address: int, device: int, nbytes: int = 1) -> int:
        """The pointer under which kernels of `device` reach ``nbytes`` registered bytes at ``address``.

        The driver is asked every time: it need not be the host's pointer.  0 bytes have the pointer 0.

        Raises
        ------
        InvalidRequestError
            Not all of the range is registered, or it is not one range for the device.
        """
        span = _as_range(address, nbytes)
        self.driver.require_usable()
        if span.nbytes == 0:
            return 0
        if not self.covers(*span):
            raise InvalidRequestError(
                f"device pointer: the {span.nbytes} host bytes at {span.ptr:#x} are not all registered; register "
                "them and keep the registration, or take them from a HostArena"
            )
        first, *others = (
            (piece.ptr, self.driver.host_device_pointer(piece.ptr, device)) for piece in self.split(*span)
        )
        for where, ptr in others:
            if ptr - first[1] != where - first[0]:
                raise InvalidRequestError(
                    f"device pointer: the {span.nbytes} host bytes at {span.ptr:#x} are registered in several "
                    f"ranges, which device {device} does not see one after another (break at {where:#x}); ask "
                    "for each piece of `split`"
                )
        return first[1]

    def split(self, address: int, nbytes: int) -> list[Span]:
        """Cut a host range where registrations end: no driver copy may cross such an edge.

        The pieces follow one another and are together the range; an empty range has none.
        """
        span = _as_range(address, nbytes)
        self.driver.require_usable()
        return self._ledger.table.split(*span)

    def pieces(self, span: Span) -> Sequence[Span]:
        """`split` of a range that is known to be one; itself if no edge is in it, as nearly always."""
        ptr, nbytes = span
        return (span,) if self._ledger.table.holds(ptr, nbytes) else self.split(ptr, nbytes)

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether every byte of a host range is registered through this map."""
        span = _as_range(address, nbytes)
        self.driver.require_usable()
        with self._lock:
            return not self._ledger.table.gaps(*span)

    def is_whole(self, address: int, nbytes: int) -> bool:
        """Whether one registration has all of a range, which is not empty: a driver copy takes it as it is.

        For the path of every small copy: one look instead of `covers` and `split`.
        """
        if self.driver._forked:
            self.driver.require_usable()
        return self._ledger.table.holds(address, nbytes)

    def is_registered(self, address: int, nbytes: int = 1) -> bool:
        """`covers`, for one byte unless more are asked for."""
        return self.covers(address, nbytes)

    def is_clear(self, address: int, nbytes: int) -> bool:
        """Whether no byte of a host range is registered through this map."""
        span = _as_range(address, nbytes)
        self.driver.require_usable()
        with self._lock:
            return not self._ledger.table.overlapping(*span)

    def snapshot(self) -> list[tuple[Chunk, str]]:
        """Every chunk, in order of address, and why it is stale; none in a forked child."""
        try:
            self.driver.require_usable()
        except ForkedError:
            return []
        with self._lock:
            return [(chunk, self._ledger.why_stale(chunk)) for chunk in self._ledger.table]

    @property
    def nbytes(self) -> int:
        """Bytes registered through this map now; borrowed ones are their owner's."""
        self.driver.require_usable()
        with self._lock:
            return self._ledger.nbytes


def _as_range(address: int, nbytes: int) -> Span:
    span = Span(
        require_int(address, "registration: start of the range"),
        require_int(nbytes, "registration: bytes of the range"),
    )
    if span.ptr < 0 or span.nbytes < 0 or span.ptr + span.nbytes > _END:
        raise InvalidRequestError(
            f"registration: {span.nbytes} bytes at {span.ptr:#x} is no range of 64-bit addresses"
        )
    return span


def _chunk_size(nbytes: int) -> int:
    nbytes = require_int(nbytes, "registration: max_chunk")
    if nbytes <= 0:
        raise InvalidRequestError(f"registration: max_chunk {nbytes} is not more than zero bytes")
    return nbytes


_maps_lock = threading.Lock()
_maps: WeakSet[RegistrationMap] = WeakSet()


def all_maps() -> list[RegistrationMap]:
    """Every map of this process."""
    with _maps_lock:
        return list(_maps)


def registrations(driver: Driver) -> RegistrationMap:
    """The map of `driver`: one for the whole process, since registrations are."""
    found: RegistrationMap | None = getattr(require_driver(driver, "registrations"), "_registration_map", None)
    if found is None:
        made = RegistrationMap(driver)
        with _maps_lock:
            found = getattr(driver, "_registration_map", None) or made
            driver._registration_map = found  # type: ignore[attr-defined]  # lives and dies with it
    return found
