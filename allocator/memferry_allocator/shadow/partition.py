"""A partition of a shadow buffer: one logical range with host pages and perhaps a device copy.

Which copies are valid, and who may write, follows StarPU's data handles: any number of readers, or one
writer; a write in one place makes the other copy invalid, and bytes move only if they must.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..driver import Span, Stream
from ..errors import ClosedError, DriverError, InvalidRequestError
from .copier import Direction
from .copies import Copies
from .gate import over
from .hazards import Hazards
from .view import Lease, Mode, Place, View

if TYPE_CHECKING:
    from ..host import HostArena
    from .space import ShadowSpace

_HOST, _DEVICE, _MAPPED = Place.HOST, Place.DEVICE, Place.MAPPED


class Pin:
    """Keeps a partition in device memory until the end of a ``with`` block."""

    __slots__ = ("_partition",)

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def __enter__(self) -> Partition:
        self._partition.pin()
        return self._partition

    def __exit__(self, *_: object) -> None:
        self._partition.unpin()


class Partition(Copies):
    """See the module.  Made by `ShadowSpace.allocate` and `ShadowSpace.buffer`.

    Thread-safe under the space's lock, which is held while a call waits for the device.
    """

    __slots__ = (
        "__weakref__",
        "_closed",
        "_device_views",
        "_mapped",
        "_writing",
    )

    def __init__(self, space: ShadowSpace, name: str, host: Span, pages: HostArena | None = None) -> None:
        super().__init__(space, name, host, pages)
        self._mapped: int | None = None
        self._device_views = 0
        self._writing = self._closed = False

    def __repr__(self) -> str:
        return f"<Partition {self.name} of {self.nbytes} bytes>"

    @property
    def in_use(self) -> bool:
        """Whether a view of it is not released yet."""
        return self._views > 0

    @property
    def pins(self) -> int:
        """How often it is pinned."""
        return self._pins

    @property
    def closed(self) -> bool:
        """Whether its buffer or its space was closed."""
        return self._closed

    # -- what may be asked ----------------------------------------------------------------------------
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
            Another open view forbids it, or `stream` does not suit `place`; nothing was changed.
        CaptureError
            `stream` is being captured into a graph, where nobody can wait for the view's end; nothing was
            changed.  Acquire before the capture, and keep the view as long as the graph is run.
        ClosedError
            The buffer or the space was closed.
        OutOfMemory
            The device budget has no room and nothing can be evicted.
        DriverError, RaceError
            The driver refused; like after every error here, no byte was lost.
        """
        space = self.space
        if space.driver._forked:
            space.driver.require_usable()
        with space.lock:
            self._admit(place, mode)
            if place is _DEVICE:
                view = self._acquire_device(mode, space.gate.admit(stream))
                self._device_views += 1
            elif place is _MAPPED:
                view = self._acquire_mapped(mode, space.gate.admit(stream))
            elif stream is None:
                view = self._acquire_host(mode)
            else:
                raise InvalidRequestError(f"acquire of {self.name}: HOST takes no stream, it blocks; leave it out")
            self._views += 1
            self._writing = mode.writes
            space.leases.add(view._lease)
            space.room.wake(self)
            if place is _DEVICE and space.room.used is not None:
                self._tell_policy(view)
            return view

    def prefetch(self, *, stream: Stream | None = None) -> None:
        """Start bringing a device copy in, if there is none; the copy may be under way on return.

        Parameters
        ----------
        stream : Stream, optional
            Start after what it holds now, so that an early load takes no bandwidth from that.

        Raises
        ------
        OutOfMemory
            The device budget has no room and nothing can be evicted.
        InvalidRequestError
            A writing view is open, or `stream` is none of this device.
        CaptureError
            `stream` is being captured into a graph.
        """
        space = self.space
        space.driver.require_usable()
        with space.lock:
            self._forbid("prefetch", readers=True)
            if stream is not None:
                stream = space.gate.admit(stream)
            if not self.resident:
                if stream is not None:
                    space.copier.lane(Direction.HOST_TO_DEVICE).wait(stream.record())
                self._load()
            self._rest()

    def evict(self) -> None:
        """Give the device copy's memory back, after writing it home if it is newer.

        Raises
        ------
        InvalidRequestError
            A DEVICE view is open, or the partition is pinned.
        """
        space = self.space
        space.driver.require_usable()
        with space.lock:
            self._require_open()
            if self._device_views:
                space.reap()
            if self._device_views or self._pins:
                raise InvalidRequestError(
                    f"evict of {self.name}: {self._device_views} DEVICE view(s) are open and {self._pins} pin(s) "
                    "hold it; release and unpin them first"
                )
            self._give_up()

    def write_back(self) -> None:
        """Bring the host pages up to date and keep the device copy."""
        space = self.space
        space.driver.require_usable()
        with space.lock:
            self._forbid("write_back", readers=True)
            self._bring_home()

    def settle(self) -> None:
        """Block until no stream reads or writes the host pages any more; no view may be open."""
        space = self.space
        space.driver.require_usable()
        with space.lock:
            self._forbid("settle", readers=False)
            self._home.host_before_write()

    def pin(self) -> None:
        """Keep a copy in device memory until `unpin` was called as often; it is loaded if it is not there.

        A pinned copy is never evicted and keeps its address.  A write at home makes it out of date; the next
        DEVICE view then brings it up to date in its place.

        Raises
        ------
        OutOfMemory
            The device budget has no room for it; it is not pinned.
        InvalidRequestError
            A writing view in HOST or MAPPED is open.
        """
        space = self.space
        space.driver.require_usable()
        with space.lock:
            self._require_open()
            if not self._device_views:
                self._forbid("pin", readers=True)
            self._load()
            self._pins += 1
            space.room.wake(self)

    def unpin(self) -> None:
        """Undo one `pin`.

        Raises
        ------
        InvalidRequestError
            It is not pinned.
        """
        space = self.space
        space.driver.require_usable()
        with space.lock:
            self._require_open()
            if not self._pins:
                raise InvalidRequestError(f"unpin of {self.name}: it is not pinned; call it once for every pin")
            if self._pins == 1 and not self.resident:
                self._drop()
            self._pins -= 1
            self._rest()

    def pinned(self) -> Pin:
        """A context manager: `pin` at its beginning, `unpin` at its end."""
        return Pin(self)

    # -- acquiring and releasing ----------------------------------------------------------------------
    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name}: its buffer or space was closed; make a new one")

    def _forbid(self, what: str, *, readers: bool) -> None:
        """Refuse under open views; with `readers`, under a writing one only."""
        self._require_open()
        if self._views and (self._writing or not readers):
            self.space.reap()
        if self._views and (self._writing or not readers):
            found = "a writing view is" if self._writing else f"{self._views} view(s) are"
            raise InvalidRequestError(f"{what} of {self.name}: {found} open; release what is open first")

    def _admit(self, place: Place, mode: Mode) -> None:
        if place.__class__ is not Place or mode.__class__ is not Mode:
            raise InvalidRequestError(f"acquire of {self.name}: {place!r}, {mode!r} are not a Place and a Mode")
        if self._closed or (self._views and (self._writing or mode.writes)):
            self._forbid("acquire", readers=not mode.writes)

    def _acquire_host(self, mode: Mode) -> View:
        if mode.reads:
            self._bring_home()
        if mode.writes:
            self._home.host_before_write()
        else:
            self._home.host_before_read()
        return self._open_at_home(View(self, _HOST, mode, self.host.ptr, None))

    def _acquire_mapped(self, mode: Mode, stream: Stream) -> View:
        ptr = self._mapped
        if ptr is None:
            ptr = self.space.driver.host_device_pointer(self.host.ptr, self.space.device)
            if self.pages is not None:  # pages of somebody else may be unregistered at any time
                self._mapped = ptr
        if mode.reads:
            self._bring_home()
        self._home.before(stream, writes=mode.writes)
        return self._open_at_home(View(self, _MAPPED, mode, ptr, stream))

    def _open_at_home(self, view: View) -> View:
        """The device copy is out of date from now on, if the view writes."""
        if view.mode.writes:
            try:
                self._invalidate()
            except BaseException:
                view._lease.end_brackets()
                raise
        return view

    def _acquire_device(self, mode: Mode, stream: Stream) -> View:
        copy = self._copy
        if copy is None or not copy.valid:
            if not mode.reads:
                return self._acquire_anew(stream)
            copy = self._load()
        copy.hazards.before(stream, writes=mode.writes)
        return View(self, _DEVICE, mode, copy.span.ptr, stream)

    def _acquire_anew(self, stream: Stream) -> View:
        """A WRITE view where no valid copy is: nothing is fetched."""
        copy = self._copy or self.space.room.allocate(self, stream)
        try:
            copy.hazards.before(stream, writes=True)
            view = View(self, _DEVICE, Mode.WRITE, copy.span.ptr, stream)
        except BaseException:
            if copy is not self._copy:  # nobody has written it: it must not pass for a valid copy
                self.space.room.abandon(copy, self, stream)
            raise
        copy.valid, self._copy = True, copy
        return view

    def _admit_reader(self, lease: Lease, stream: Stream) -> None:
        """Let one more stream read through an open view."""
        if lease.place is _HOST or lease.mode.writes:
            raise InvalidRequestError(
                f"record_stream of {self.name}: a {lease.mode.value} view in {lease.place.value} has one user; "
                "release it and acquire another"
            )
        self._hazards_of(lease).before(self.space.gate.admit(stream), writes=False)

    def _release(self, lease: Lease) -> None:
        """End a view.  On a device that is gone all work is over, and only the books are left to do."""
        streams = self.space.gate.ending(lease.streams)
        if lease.brackets:
            lease.end_brackets()
        writes = lease.mode.writes
        if lease.place is not _HOST:
            hazards = self._hazards_of(lease)
            try:
                for stream in streams:
                    if writes:
                        hazards.written_by(stream)
                    else:
                        hazards.read_by(stream)
            except DriverError as error:
                if not over(error):
                    raise
            if writes and not streams:  # it was closed, and its work is over
                hazards.over()
            if lease.place is _DEVICE:
                self._device_views -= 1
                if writes and self._copy is not None:
                    self._copy.dirty = True
        self._views -= 1
        self.space.leases.discard(lease)
        self._writing = False
        if not self._views:
            self._rest()

    def _hazards_of(self, lease: Lease) -> Hazards:
        if lease.place is _DEVICE:
            assert self._copy is not None, "an open device view keeps its copy"
            return self._copy.hazards
        return self._home

    def _tell_policy(self, view: View) -> None:
        used = self.space.room.used
        try:
            if used is not None:
                used(self)
        except BaseException:  # the caller gets no view, so nobody could release it
            view.release()
            raise

    def _finish(self) -> None:
        """Wait until no stream uses the host pages; those of the caller have the newest bytes then."""
        try:
            if self.pages is None:
                self._bring_home()
            self._home.host_before_write()
        except DriverError as error:  # what a device had that is gone cannot come home any more
            if not over(error):
                raise
            self._home.over()

    def _retire(self) -> None:
        """Give the copy up as it is, and refuse every use from now on."""
        self._drop()
        self._closed = True
