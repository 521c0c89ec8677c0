"""A partition of a shadow buffer: one logical range with host pages and perhaps a device copy.

Which copies are valid, and who may write, follows StarPU's data handles: any number of readers, or one
writer; a write in one place makes the other copy invalid, and bytes move only if they must.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..driver import Span, Stream, require_stream
from ..errors import InvalidRequestError
from .copier import Direction
from .hazards import Hazards
from .view import Mode, Place, View

if TYPE_CHECKING:
    from .space import ShadowSpace


@dataclass(eq=False)
class _DeviceCopy:
    ptr: int
    dirty: bool = False
    hazards: Hazards = field(default_factory=Hazards)


class Partition:
    """See the module.  Made by `ShadowSpace.buffer`; thread-safe under the space's lock."""

    def __init__(self, space: ShadowSpace, name: str, host: Span) -> None:
        self.space = space
        self.name = name
        self.host = host
        self.nbytes = host.nbytes
        self.last_use = 0
        self._hazards = Hazards()
        self._copy: _DeviceCopy | None = None
        self._views: list[View] = []

    @property
    def resident(self) -> bool:
        """Whether a valid copy is in device memory, or on its way there."""
        return self._copy is not None

    @property
    def dirty(self) -> bool:
        """Whether the device copy is newer than the host pages."""
        return self._copy is not None and self._copy.dirty

    @property
    def in_use(self) -> bool:
        """Whether a view of it is not released yet."""
        return bool(self._views)

    def acquire(self, place: Place, mode: Mode, *, stream: Stream | None = None) -> View:
        """A view of the bytes in `place`, valid in `stream`'s order until it is released.

        Parameters
        ----------
        place : Place
        mode : Mode
            Any number of READ views may be open at once; a writing view must be the only one.
        stream : Stream
            Where the device touches the bytes.  Left out for HOST, which means the calling thread and
            blocks until the bytes are its own; never left out otherwise.

        Raises
        ------
        InvalidRequestError
            Another open view forbids it, or `stream` does not suit `place`.
        OutOfMemory
            The device budget has no room and nothing can be evicted.
        DriverError, RaceError
            The driver refused; like after every error here, no byte was lost.
        """
        with self.space.lock:
            self._admissible(place, mode)
            if place is Place.HOST:
                if stream is not None:
                    raise InvalidRequestError(f"acquire of {self.name}: HOST takes no stream, it blocks")
            else:
                stream = require_stream(stream, self.space.device)
            self.last_use = self.space.tick()
            if place is Place.DEVICE:
                assert stream is not None
                view = self._acquire_device(mode, stream)
            else:
                view = self._acquire_home(place, mode, stream)
            self._views.append(view)
            return view

    def prefetch(self) -> None:
        """Start bringing a device copy in, if there is none; the copy may be under way on return.

        Raises
        ------
        OutOfMemory
            The device budget has no room and nothing can be evicted.
        """
        with self.space.lock:
            if any(view.mode.writes for view in self._views):
                raise InvalidRequestError(f"prefetch of {self.name}: a writing view is open; release it first")
            self.last_use = self.space.tick()
            self._load()

    def evict(self) -> None:
        """Give the device copy's memory back, after writing it home if it is newer."""
        with self.space.lock:
            self._forbid_views("evict", place=Place.DEVICE)
            self._write_back()
            self._drop()

    def write_back(self) -> None:
        """Bring the host pages up to date and keep the device copy."""
        with self.space.lock:
            if any(view.mode.writes for view in self._views):
                raise InvalidRequestError(f"write back {self.name}: a writing view is open; release it first")
            self._write_back()

    def settle(self) -> None:
        """Block until no stream reads or writes the host pages any more; no view may be open."""
        with self.space.lock:
            self._forbid_views("settle", place=None)
            self._hazards.host_before_write()

    # -- acquiring ------------------------------------------------------------------------------------
    def _admissible(self, place: Place, mode: Mode) -> None:
        if not isinstance(place, Place) or not isinstance(mode, Mode):
            raise InvalidRequestError(f"acquire of {self.name}: {place!r}, {mode!r} are not a Place and a Mode")
        if mode.writes:
            self._forbid_views("acquire for writing", place=None)
        elif any(view.mode.writes for view in self._views):
            raise InvalidRequestError(f"acquire of {self.name}: a writing view is open; release it first")

    def _forbid_views(self, what: str, *, place: Place | None) -> None:
        open_views = [view for view in self._views if place in (None, view.place)]
        if open_views:
            raise InvalidRequestError(
                f"{what} of {self.name}: {len(open_views)} view(s) are open; release them first"
            )

    def _acquire_home(self, place: Place, mode: Mode, stream: Stream | None) -> View:
        ptr = self.host.ptr
        if stream is not None:
            ptr = self.space.driver.host_device_pointer(ptr, self.space.device)
        if mode.reads:
            self._write_back()
        if stream is None:
            wait = self._hazards.host_before_write if mode.writes else self._hazards.host_before_read
            wait()
        else:
            self._hazards.before(stream, writes=mode.writes)
        view = View(self, place, mode, ptr, stream)
        if mode.writes:
            self._drop()  # only now that the view is there: it may hold the newest bytes
        return view

    def _acquire_device(self, mode: Mode, stream: Stream) -> View:
        fresh = self._copy is None and not mode.reads
        if fresh:
            self._copy = _DeviceCopy(self.space.allocate(self.nbytes, stream))
        copy = self._load()
        try:
            copy.hazards.before(stream, writes=mode.writes)
            return View(self, Place.DEVICE, mode, copy.ptr, stream)
        except BaseException:
            if fresh:  # nobody has written it: it must not pass for a valid copy
                self._copy = None
                self.space.abandon(copy.ptr, self.nbytes, stream)
            raise

    def _admit(self, view: View, stream: Stream) -> None:
        if view.place is Place.HOST or view.mode.writes:
            raise InvalidRequestError(
                f"record_stream of {self.name}: a {view.mode.value} view in {view.place.value} has one user; "
                "release it and acquire another"
            )
        self._hazards_of(view).before(require_stream(stream, self.space.device), writes=False)

    def _release(self, view: View) -> None:
        view.end_brackets()
        events = {stream: stream.record() for stream in view.streams}
        self._views.remove(view)
        hazards = self._hazards_of(view)
        for stream, event in events.items():
            if view.mode.writes:
                hazards.wrote(stream, event)
            else:
                hazards.has_read(stream, event)
        if view.place is Place.DEVICE and view.mode.writes and self._copy is not None:
            self._copy.dirty = True

    def _hazards_of(self, view: View) -> Hazards:
        if view.place is Place.DEVICE:
            assert self._copy is not None, "an open device view keeps its copy"
            return self._copy.hazards
        return self._hazards

    # -- moving ---------------------------------------------------------------------------------------
    def _load(self) -> _DeviceCopy:
        if self._copy is None:
            lane = self.space.copier.lane(Direction.HOST_TO_DEVICE)
            self._hazards.before(lane, writes=False)
            ptr = self.space.allocate(self.nbytes, lane)
            try:
                device = Span(ptr, self.nbytes)
                done = self.space.copier.copy(device, self.host, Direction.HOST_TO_DEVICE, stream=lane)
            except BaseException:
                for stream, event in self.space.abandon(ptr, self.nbytes, lane).items():
                    self._hazards.has_read(stream, event)  # a part of the copy may be under way
                raise
            self._hazards.has_read(lane, done.event)
            self._copy = _DeviceCopy(ptr)
            self._copy.hazards.wrote(lane, done.event)
        return self._copy

    def _write_back(self) -> None:
        copy = self._copy
        if copy is None or not copy.dirty:
            return
        lane = self.space.copier.lane(Direction.DEVICE_TO_HOST)
        copy.hazards.before(lane, writes=False)
        self._hazards.before(lane, writes=True)
        done = self.space.copier.copy(
            self.host, Span(copy.ptr, self.nbytes), Direction.DEVICE_TO_HOST, stream=lane
        )
        copy.hazards.has_read(lane, done.event)
        self._hazards.wrote(lane, done.event)
        copy.dirty = False

    def _drop(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            self.space.deallocate(copy.ptr, self.nbytes, copy.hazards.last_uses)
