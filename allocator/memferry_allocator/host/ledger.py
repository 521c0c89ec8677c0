"""The transactions of registered host memory: chunks taken and given up, all or nothing."""

from __future__ import annotations

import time
from enum import Enum

from ..driver import Driver, Span
from ..errors import AllocatorError, DriverError, InvalidRequestError, UnsupportedError
from .chunk import Chunk, ChunkTable, Hold
from .limits import explained
from .mapping import Witness

_TAKEN = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
_UNKNOWN = "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"


class Foreign(Enum):
    """What to do with a range that somebody else in this process has registered."""

    REFUSE = "refuse"
    BORROW = "borrow"  # use it as long as it is there, and never unregister it


class Ledger:
    """The chunks of one driver, and every change of them.  For `RegistrationMap`, which holds its lock."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.table = ChunkTable()

    @property
    def nbytes(self) -> int:
        """Bytes registered here; borrowed ones are their owner's."""
        return sum(chunk.nbytes for chunk in self.table if not chunk.borrowed)

    def take(self, hold: Hold, span: Span, read_only: bool, foreign: Foreign, largest: int) -> None:
        """Give `hold` all chunks of a range, those that are there and new ones for the gaps; or nothing."""
        self._require_writable(span, read_only)
        self._discard_stale(span)
        for chunk in self.table.overlapping(*span):
            _hold(hold, chunk)
        try:
            for gap in self.table.gaps(*span):
                for offset in range(0, gap.nbytes, largest):
                    piece = Span(gap.ptr + offset, min(largest, gap.nbytes - offset))
                    for chunk in self._obtain(piece, span, read_only, foreign, hold.owner):
                        self.table.insert(chunk)
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
        for chunk in () if read_only else self.table.overlapping(*span):
            if chunk.read_only and not self.why_stale(chunk):
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

    def drop(self, hold: Hold) -> None:
        """Take from `hold` all that it has, and unregister what nobody else holds; may be tried again."""
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
        self.table.remove(chunk)
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

    def why_stale(self, chunk: Chunk) -> str:
        """See `RegistrationMap.why_stale`."""
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
        for chunk in self.table.overlapping(*span):
            if self.why_stale(chunk):
                try:
                    self._discard(chunk)
                except DriverError as error:
                    if error.code != _UNKNOWN:
                        raise


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
