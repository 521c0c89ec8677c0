"""Where the bytes of a partition are: host pages, perhaps a device copy, which is valid, and how they move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device import ALIGNMENT
from ..driver import Span, Stream
from ..sizes import align_up
from .copier import Direction
from .hazards import Hazards

if TYPE_CHECKING:
    from ..host import HostArena
    from .space import ShadowSpace


_INWARD, _OUTWARD = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


class DeviceCopy:
    """Memory for a copy, and who uses it; where one partition takes the room of another, it takes this over.

    Only that of a pinned partition outlives a write at home, and is not valid then.
    """

    __slots__ = ("dirty", "hazards", "span", "valid")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.valid = True
        self.dirty = False
        self.hazards = Hazards()


class Copies:
    """What a `Partition` keeps about its bytes.  Everything here is called under the space's lock.

    Attributes
    ----------
    host : Span
        The host pages; touch them through views.
    nbytes : int
    reserved : int
        Bytes that a device copy takes of the budget: `nbytes`, rounded up to the pool's alignment.
    pages : HostArena or None
        Whose pages they are, if the space took them itself.
    """

    __slots__ = ("_copy", "_home", "_pins", "_views", "host", "name", "nbytes", "pages", "reserved", "space")

    def __init__(self, space: ShadowSpace, name: str, host: Span, pages: HostArena | None) -> None:
        self.space = space
        self.name = name
        self.host = host
        self.nbytes = host.nbytes
        self.reserved = align_up(host.nbytes, ALIGNMENT)
        self.pages = pages
        self._home = Hazards()
        self._copy: DeviceCopy | None = None
        self._views = self._pins = 0

    @property
    def resident(self) -> bool:
        """Whether a valid copy is in device memory, or on its way there."""
        return self._copy is not None and self._copy.valid

    @property
    def dirty(self) -> bool:
        """Whether the device copy is newer than the host pages."""
        return self._copy is not None and self._copy.dirty

    @property
    def copy_address(self) -> int:
        """Where the copy lies in device memory; 0 without one."""
        return 0 if self._copy is None else self._copy.span.ptr

    def _load(self) -> DeviceCopy:
        """The device copy, brought in or up to date if it is not valid."""
        copy = self._copy
        if copy is not None and copy.valid:
            return copy
        space = self.space
        lane = space.copier.lane(_INWARD)
        self._home.before(lane, writes=False)
        if copy is None:
            copy = space.room.allocate(self, lane)
        else:
            copy.hazards.before(lane, writes=True)
        try:
            done = space.copier.copy(copy.span, self.host, _INWARD, stream=lane)
        except BaseException:
            self._load_failed(copy)
            raise
        # The bytes are moving: from here on the books take no time that anybody waits for.
        self._home.has_read(lane, done.event)
        copy.hazards.wrote(lane, done.event)
        copy.valid, self._copy = True, copy
        self._rest()
        return copy

    def _load_failed(self, loaded: DeviceCopy) -> None:
        """A part of the copy may be under way."""
        lane = self.space.copier.lane(_INWARD)
        if loaded is self._copy:
            event = lane.record()
            loaded.hazards.wrote(lane, event)
            self._home.has_read(lane, event)
            return
        for stream, event in self.space.room.abandon(loaded, self, lane).items():
            self._home.has_read(stream, event)

    def _bring_home(self) -> None:
        """Make the host pages valid."""
        copy = self._copy
        if copy is None or not copy.dirty:
            return
        lane = self.space.copier.lane(_OUTWARD)
        copy.hazards.before(lane, writes=False)
        self._home.before(lane, writes=True)
        try:
            done = self.space.copier.copy(self.host, copy.span, _OUTWARD, stream=lane)
        except BaseException:
            event = lane.record()  # a part of the copy may be under way
            copy.hazards.has_read(lane, event)
            self._home.wrote(lane, event)
            raise
        copy.hazards.has_read(lane, done.event)
        self._home.wrote(lane, done.event)
        copy.dirty = False

    def _drop(self) -> None:
        """Give the copy's memory back, valid or not."""
        copy = self._copy
        if copy is not None:
            self.space.room.wake(self)
            lane = self.space.copier.lane(_OUTWARD)
            self.space.room.deallocate(copy, self, stream=lane, uses=copy.hazards.last_uses)
            self._copy = None

    def _give_up(self) -> None:
        """Evict: home first, if the copy is newer."""
        self._bring_home()
        self._drop()

    def _hand_over(self, stream: Stream) -> DeviceCopy:
        """Evict, but let `stream` use the memory instead of giving it back."""
        self._bring_home()
        copy = self._copy
        assert copy is not None, "only a copy that is idle is handed over"
        copy.hazards.before(stream, writes=True)
        self.space.room.wake(self)
        self._copy = None
        return copy

    def _invalidate(self) -> None:
        """The host pages are about to be written, by a view that is there already: they are the newest then."""
        if self._pins and self._copy is not None:
            self._copy.valid = self._copy.dirty = False
        else:
            self._drop()

    def _rest(self) -> None:
        """Let the copy be evicted from now on, as the one used last, if there is one and nothing holds it."""
        room = self.space.room
        room.wake(self)
        copy = self._copy
        if copy is not None and copy.valid and not self._views and not self._pins:
            room.rest(self)
