"""Registered host ranges: pinned, mapped into every device, counted, and known by their boundaries."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from enum import Enum
from weakref import WeakSet

from ..driver import Driver, Span
from ..errors import AllocatorError, DriverError, InvalidRequestError, UnsupportedError
from .chunk import Chunk, ChunkTable, Hold
from .handle import Registration
from .limits import explained
from .lock import FinaliserLock
from .mapping import Witness

MAX_CHUNK = 64 << 30  # one driver call for 512 GiB or more fails on current drivers
_END = 1 << 64
_TAKEN = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
_UNKNOWN = "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"


class Foreign(Enum):
    """What to do with a range that somebody else in this process has registered."""

    REFUSE = "refuse"
    BORROW = "borrow"  # use it as long as it is there, and never unregister it


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
        self.driver = driver
        self.max_chunk = _chunk_size(max_chunk)
        self._lock = FinaliserLock()
        self._table = ChunkTable()
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
            Not a range of addresses, or registered read-only and now to be written.
        RegistrationError
            The driver refused a part; it says why.  The parts before it are unregistered again.
        UnsupportedError
            `read_only` on a device that cannot.
        ForkedError
            This process is a child of the one that opened the driver.
        """
        span = _as_range(address, nbytes)
        largest = self.max_chunk if max_chunk is None else _chunk_size(max_chunk)
        self.driver.require_usable()
        hold = Hold(name, owner)
        if span.nbytes:
            with self._lock, self.driver.beside_captures():
                self._require_writable(span, read_only)
                self._discard_stale(span)
                self._fill(hold, span, read_only, foreign, largest)
        return Registration(self, span, read_only, hold)

    def _fill(self, hold: Hold, span: Span, read_only: bool, foreign: Foreign, largest: int) -> None:
        """Count what is registered already, and register the gaps: all of it or nothing."""
        for chunk in self._table.overlapping(*span):
            _hold(hold, chunk)
        try:
            for gap in self._table.gaps(*span):
                for offset in range(0, gap.nbytes, largest):
                    piece = Span(gap.ptr + offset, min(largest, gap.nbytes - offset))
                    for chunk in self._obtain(piece, span, read_only, foreign, hold.owner):
                        self._table.insert(chunk)
                        _hold(hold, chunk)
        except BaseException as error:
            self._roll_back(hold, error)
            raise
        hold.chunks.sort(key=lambda chunk: chunk.start)

    def _obtain(
        self, piece: Span, asked: Span, read_only: bool, foreign: Foreign, owner: object | None
    ) -> list[Chunk]:
        if read_only:
            self._require_read_only()
        try:
            self.driver.host_register(piece.ptr, piece.nbytes, read_only=read_only)
        except DriverError as error:
            found = self._foreign(piece) if error.code == _TAKEN else []
            if foreign is Foreign.BORROW and _are_all(found, piece):
                return [_chunk(_within(span, piece), read_only, True, owner) for span in found]
            raise explained(error, asked, piece, self.nbytes, found[0] if found else None) from error
        return [_chunk(piece, read_only, False, owner)]

    def _foreign(self, piece: Span) -> list[Span]:
        """Registrations that the driver knows from the start of `piece` on, without a gap, or at its end."""
        found = []
        position, end = piece.ptr, piece.ptr + piece.nbytes
        while position < end and (span := self.driver.host_registration(position)) is not None:
            found.append(span)
            position = span.ptr + span.nbytes
        if not found and (last := self.driver.host_registration(end - 1)) is not None:
            found.append(last)
        return found

    def _require_writable(self, span: Span, read_only: bool) -> None:
        for chunk in () if read_only else self._table.overlapping(*span):
            if chunk.read_only and not self._why_stale(chunk):
                raise InvalidRequestError(
                    f"registration: {span.nbytes} bytes at {span.ptr:#x} are to be written by devices, but "
                    f"{chunk.nbytes} bytes at {chunk.start:#x} of them are registered read-only by "
                    f"{_names(chunk)}; close that first, or ask for read_only=True"
                )

    def _require_read_only(self) -> None:
        for device in range(self.driver.device_count):
            info = self.driver.device_info(device)
            if not info.capabilities.get("READ_ONLY_HOST_REGISTER_SUPPORTED"):
                raise UnsupportedError(
                    f"registration: device {device} ({info.name}) cannot map host memory read-only; register a "
                    "writable mapping or a copy of it"
                )

    # -- unregistering --------------------------------------------------------------------------------
    def _close(self, hold: Hold) -> None:
        with self._lock, self.driver.beside_captures():
            self._drop(hold)

    def _abandon(self, hold: Hold) -> None:
        """For the finaliser of a handle: a device may still use the pages, and nobody hears of an error."""

        def end() -> None:
            # Pages that a device may still use stay registered: better lost than given to somebody else.
            with contextlib.suppress(AllocatorError), self.driver.beside_captures():
                if any(chunk.holders == [hold] and not chunk.gone for chunk in hold.chunks):
                    self.driver.synchronize_all()
                self._drop(hold)

        self._lock.finalise(end)

    def _drop(self, hold: Hold) -> None:
        while hold.chunks:
            chunk = hold.chunks[-1]
            if chunk.holders == [hold] and not chunk.gone:
                self._discard(chunk)
            chunk.holders.remove(hold)
            hold.chunks.pop()
        hold.owner = None

    def _discard(self, chunk: Chunk) -> None:
        """Unregister a chunk, whoever holds it."""
        try:
            if not chunk.borrowed:
                self.driver.host_unregister(chunk.start)
        except DriverError as error:
            if error.code == _UNKNOWN:  # somebody else has unregistered it: there is nothing left to undo
                self._forget(chunk)
            raise
        self._forget(chunk)

    def _forget(self, chunk: Chunk) -> None:
        self._table.remove(chunk)
        chunk.gone, chunk.owner = True, None

    def _roll_back(self, hold: Hold, error: BaseException) -> None:
        """Undo what was done for `hold`; a chunk that cannot be undone stays known, and is used again."""
        while hold.chunks:
            chunk = hold.chunks.pop()
            chunk.holders.remove(hold)
            try:
                if not chunk.holders:
                    self._discard(chunk)
            except AllocatorError as second:
                error.args = (f"{error}; and undoing it failed: {second}", *error.args[1:])
        hold.owner = None

    # -- stale ranges ---------------------------------------------------------------------------------
    def why_stale(self, registration: Registration) -> str:
        """Why devices may see other pages than the host does at this range; empty if nothing says so.

        Pages that were unmapped, given up, or replaced by those of another file are found; so is a borrowed
        range that its owner has unregistered.  Private anonymous pages that were replaced by others of that
        kind are found as long as the new ones were not touched.
        """
        with self._lock:
            found = (self._why_stale(chunk) for chunk in registration._hold.chunks)
            return next((why for why in found if why), "")

    def _why_stale(self, chunk: Chunk) -> str:
        if chunk.gone:
            return "it was unregistered, since its pages or its owner had gone"
        if chunk.borrowed:
            try:
                found = self.driver.host_registration(chunk.start)
            except AllocatorError as error:
                return f"the driver cannot be asked any more: {error}"
            if found is None or not _are_all([found], chunk.span):
                return "who had registered it has unregistered it"
        return chunk.witness.contradiction()

    def _discard_stale(self, span: Span) -> None:
        """Give up what is registered in a range whose pages are others by now; their holders are told so."""
        for chunk in self._table.overlapping(*span):
            if self._why_stale(chunk):
                try:
                    self._discard(chunk)
                except DriverError as error:
                    if error.code != _UNKNOWN:
                        raise

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
        with self._lock:
            return self._table.split(address, nbytes)

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether every byte of a host range is registered through this map."""
        with self._lock:
            return not self._table.gaps(address, nbytes)

    def is_registered(self, address: int, nbytes: int = 1) -> bool:
        """`covers`, for one byte unless more are asked for."""
        return self.covers(address, nbytes)

    def is_clear(self, address: int, nbytes: int) -> bool:
        """Whether no byte of a host range is registered through this map."""
        with self._lock:
            return not self._table.overlapping(address, nbytes)

    def snapshot(self) -> list[tuple[Chunk, str]]:
        """Every chunk, in order of address, and why it is stale; for `describe`."""
        with self._lock:
            return [(chunk, self._why_stale(chunk)) for chunk in self._table]

    @property
    def nbytes(self) -> int:
        """Bytes registered through this map now; borrowed ones are their owner's."""
        with self._lock:
            return sum(chunk.nbytes for chunk in self._table if not chunk.borrowed)


def _hold(hold: Hold, chunk: Chunk) -> None:
    chunk.holders.append(hold)
    hold.chunks.append(chunk)


def _chunk(span: Span, read_only: bool, borrowed: bool, owner: object | None) -> Chunk:
    return Chunk(*span, read_only, borrowed, time.time(), Witness.of(*span), owner)


def _within(span: Span, piece: Span) -> Span:
    start = max(span.ptr, piece.ptr)
    return Span(start, min(span.ptr + span.nbytes, piece.ptr + piece.nbytes) - start)


def _are_all(found: list[Span], piece: Span) -> bool:
    """Whether ranges that follow one another hold all of `piece`."""
    return bool(
        found and found[0].ptr <= piece.ptr and found[-1].ptr + found[-1].nbytes >= piece.ptr + piece.nbytes
    )


def _names(chunk: Chunk) -> str:
    return ", ".join(sorted({holder.name or "somebody unnamed" for holder in chunk.holders})) or "nobody any more"


def _as_range(address: int, nbytes: int) -> Span:
    try:
        span = Span(operator.index(address), operator.index(nbytes))
    except TypeError:
        raise InvalidRequestError(
            f"registration: {nbytes!r} bytes at {address!r} is no range; give address and size as integers"
        ) from None
    if span.ptr < 0 or span.nbytes < 0 or span.ptr + span.nbytes > _END:
        raise InvalidRequestError(
            f"registration: {span.nbytes} bytes at {span.ptr:#x} is no range of 64-bit addresses"
        )
    return span


def _chunk_size(nbytes: int) -> int:
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
    found = getattr(driver, "_registration_map", None)
    if found is None:
        made = RegistrationMap(driver)
        with _maps_lock:
            found = getattr(driver, "_registration_map", None) or made
            driver._registration_map = found  # type: ignore[attr-defined]  # lives and dies with it
    return found
