"""A view: the right to touch a partition's bytes in one place, until it is released."""

from __future__ import annotations

import contextlib
import gc
import weakref
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..driver import Bracket, Span, Stream
from ..errors import AllocatorError, ClosedError, InvalidRequestError
from . import typed

if TYPE_CHECKING:
    import numpy.typing as npt

    from .partition import Partition


class Place(Enum):
    """Where a view's bytes are touched."""

    HOST = "host"  # by the calling thread
    DEVICE = "device"  # by kernels, in device memory
    MAPPED = "mapped"  # by kernels, in the host pages: Direct Host Access


class Mode(Enum):
    """What a view may do.  WRITE replaces every byte, so that nothing is fetched for it."""

    READ = "read"
    WRITE = "write"
    READ_WRITE = "read-write"

    reads: bool
    writes: bool

    def __init__(self, text: str) -> None:
        self.reads = text != "write"
        self.writes = text != "read"


class Lease(weakref.ref["View"]):
    """What an open view holds of its partition: it outlives the view, so that one that was dropped can be ended.

    Attributes
    ----------
    abandoned : bool
        Whoever would release the view has tried, and is gone.
    """

    __slots__ = ("abandoned", "brackets", "mode", "partition", "place", "streams")

    partition: Partition
    place: Place
    mode: Mode
    streams: tuple[Stream, ...]
    brackets: tuple[Bracket, ...]
    abandoned: bool

    def end_brackets(self) -> None:
        for bracket in self.brackets:
            bracket.end()


class View:
    """Bytes that are valid in a stream's order (for HOST: for the calling thread) until `release`.

    A context manager.  Made by `Partition.acquire`; its calls may come from any thread.  A view that is dropped
    without a release, and whose arrays are dropped too, ends when something needs that: its last uses are those
    enqueued until then.
    """

    __slots__ = ("__weakref__", "_exports", "_lease", "_ptr", "_released", "mode", "partition", "place")

    def __init__(self, partition: Partition, place: Place, mode: Mode, ptr: int, stream: Stream | None) -> None:
        self.partition = partition
        self.place = place
        self.mode = mode
        self._ptr = ptr
        self._released = False
        self._exports: set[weakref.ref[object]] | None = None
        self._lease = lease = Lease(self)
        lease.partition = partition
        lease.place = place
        lease.mode = mode
        lease.streams = () if stream is None else (stream,)
        lease.brackets = (self._bracket(stream),) if partition.space.bracketed else ()
        lease.abandoned = False

    @property
    def ptr(self) -> int:
        """A device pointer for DEVICE and MAPPED, a host address for HOST."""
        if self._released:
            raise self._gone()
        return self._ptr

    @property
    def nbytes(self) -> int:
        return self.partition.nbytes

    @property
    def span(self) -> Span:
        return Span(self.ptr, self.partition.nbytes)

    @property
    def released(self) -> bool:
        return self._released

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that may use this view, the one that acquired it first; none for HOST."""
        return self._lease.streams

    def array(self, dtype: Any = "uint8", shape: Any = None, *, offset: int = 0) -> npt.NDArray[Any]:
        """The bytes of a HOST view as a NumPy array; it is read-only if the view is.

        The array may be used until the view is released.  It cannot be revoked: later it shows bytes that
        others may be changing, and writes to it are lost or race.  Where the space took the pages itself the
        array keeps them mapped; elsewhere their owner must.

        Parameters
        ----------
        dtype : numpy dtype or its name
        shape : int or sequence of int, optional
            All elements from `offset` to the end by default.
        offset : int
            Where the array begins, in bytes; a multiple of the element's alignment.

        Raises
        ------
        ClosedError
            The view was released.
        InvalidRequestError
            Not a HOST view, no NumPy dtype, or the array does not fit the bytes.
        """
        return typed.host_array(self, dtype, shape, offset)

    def typed(self, dtype: Any, shape: Any = None, *, offset: int = 0) -> typed.TypedView:
        """The bytes of a DEVICE or MAPPED view as an array description for kernels and frameworks.

        Parameters
        ----------
        dtype : numpy dtype or name
            Also ``"bfloat16"``, ``"float8_e4m3fn"`` and ``"float8_e5m2"``.
        shape : int or sequence of int, optional
            All elements from `offset` to the end by default.
        offset : int
            Where the array begins, in bytes; a multiple of the element's alignment.

        Raises
        ------
        ClosedError
            The view was released.
        InvalidRequestError
            A HOST view, an unknown dtype, or the array does not fit the bytes.
        """
        return typed.TypedView(self, dtype, shape, offset)

    def record_stream(self, stream: Stream) -> None:
        """Let another stream read through the view too, from now on, in its own order.

        Raises
        ------
        ClosedError
            The view was released.
        InvalidRequestError
            It is a writing view, or one of HOST: those have one user; or a stream of another device.
        CaptureError
            `stream` is being captured into a graph.
        """
        space = self.partition.space
        space.driver.require_usable()
        with space.lock:
            if self._released:
                raise self._gone()
            lease = self._lease
            if stream not in lease.streams:
                self.partition._admit_reader(lease, stream)
                if space.bracketed:
                    lease.brackets += (self._bracket(stream),)
                lease.streams += (stream,)

    def release(self) -> None:
        """End the view: its last uses are those enqueued until now.  A second call does nothing.

        A view of HOST may be released by another thread than the one that acquired it, if that has been
        handed the bytes.

        Raises
        ------
        CaptureError
            A stream of the view is being captured into a graph; the view stays open.
        InvalidRequestError
            Other libraries still use arrays made from it (`memferry_allocator.interop`); it stays open.
        """
        if self._released:
            return
        space = self.partition.space
        space.driver.require_usable()
        with space.lock:
            if not self._released:
                if self._exports is not None:
                    self._forbid_exports(self._exports)
                self.partition._release(self._lease)
                self._released = True

    def export(self, user: object) -> None:
        """Refuse to be released as long as `user`, through whom others use the bytes, is alive."""
        space = self.partition.space
        if space.driver._forked:
            space.driver.require_usable()
        with space.lock:
            if self._released:
                raise self._gone()
            exports = self._exports
            if exports is None:
                exports = self._exports = set()
            exports.add(weakref.ref(user, exports.discard))  # in C: many arrays live for one call only

    def _forbid_exports(self, exports: set[weakref.ref[object]]) -> None:
        if exports:
            gc.collect()  # a cycle may be all that holds them
        if exports:
            raise InvalidRequestError(
                f"release of a view of {self.partition.name}: {len(exports)} array(s) made from it are still "
                "in use, perhaps by a tensor of another library; drop them first"
            )

    def __enter__(self) -> View:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.release()
            return
        # The arrays of a block that raises are still in its frames; the view ends once they are gone.
        self._lease.abandoned = True
        with contextlib.suppress(AllocatorError):
            self.release()

    def _gone(self) -> ClosedError:
        return ClosedError(f"view of {self.partition.name}: it was released; acquire it again")

    def _bracket(self, stream: Stream | None) -> Bracket:
        """Tell a driver that checks accesses which bytes are touched from now on."""
        driver, spans = self.partition.space.driver, [Span(self._ptr, self.partition.nbytes)]
        reads, writes = (spans if self.mode.reads else []), (spans if self.mode.writes else [])
        label = f"{self.place.value} view of {self.partition.name}"
        if stream is None:
            return driver.host_access(reads=reads, writes=writes, label=label)
        return driver.launch(stream, reads=reads, writes=writes, label=label)
