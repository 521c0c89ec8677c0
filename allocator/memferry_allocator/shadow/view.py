"""A view: the right to touch a partition's bytes in one place, until it is released."""

from __future__ import annotations

import gc
import weakref
from enum import Enum
from typing import TYPE_CHECKING

from ..driver import Bracket, Span, Stream
from ..errors import ClosedError, InvalidRequestError

if TYPE_CHECKING:
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

    @property
    def writes(self) -> bool:
        return self is not Mode.READ

    @property
    def reads(self) -> bool:
        return self is not Mode.WRITE


class View:
    """Bytes that are valid in `stream`'s order (for HOST: for the calling thread) until `release`.

    A context manager.  `ptr` is a device pointer for DEVICE and MAPPED, a host address for HOST.
    """

    def __init__(self, partition: Partition, place: Place, mode: Mode, ptr: int, stream: Stream | None) -> None:
        self.partition = partition
        self.place = place
        self.mode = mode
        self.nbytes = partition.nbytes
        self._ptr = ptr
        self._streams: dict[Stream, Bracket] = {}
        self._host: Bracket | None = None
        self._released = False
        self.exports: weakref.WeakSet[object] = weakref.WeakSet()
        driver = partition.space.driver
        label = f"{place.value} view of {partition.name}"
        spans = [self._span()]
        if stream is None:
            reads, writes = self._directions(spans)
            self._host = driver.host_access(reads=reads, writes=writes, label=label)
        else:
            self._bracket(stream, label)

    @property
    def ptr(self) -> int:
        if self._released:
            raise ClosedError(f"view of {self.partition.name}: it was released; acquire it again")
        return self._ptr

    @property
    def span(self) -> Span:
        return Span(self.ptr, self.nbytes)

    @property
    def released(self) -> bool:
        return self._released

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that may use this view."""
        return tuple(self._streams)

    def record_stream(self, stream: Stream) -> None:
        """Let another stream read through the view too, from now on, in its own order.

        Raises
        ------
        ClosedError
            The view was released.
        InvalidRequestError
            It is a writing view, or one of HOST: those have one user.
        """
        with self.partition.space.lock:
            _ = self.ptr
            if stream not in self._streams:
                self.partition._admit(self, stream)
                self._bracket(stream, f"{self.place.value} view of {self.partition.name}")

    def release(self) -> None:
        """End the view: its last uses are those enqueued until now.  A second call does nothing.

        A view of HOST may be released by another thread than the one that acquired it, if that has been
        handed the bytes.
        """
        with self.partition.space.lock:
            if not self._released:
                self._forbid_exports()
                self.partition._release(self)
                self._released = True

    def _forbid_exports(self) -> None:
        if self.exports:
            gc.collect()  # a cycle may be all that holds them
        if self.exports:
            raise InvalidRequestError(
                f"release of a view of {self.partition.name}: {len(self.exports)} array(s) made from it are still "
                "in use, perhaps by a tensor of another library; drop them first"
            )

    def end_brackets(self) -> None:
        for bracket in self._streams.values():
            bracket.end()
        if self._host is not None:
            self._host.end()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _span(self) -> Span:
        return Span(self._ptr, self.nbytes)

    def _directions(self, spans: list[Span]) -> tuple[list[Span], list[Span]]:
        return (spans if self.mode.reads else [], spans if self.mode.writes else [])

    def _bracket(self, stream: Stream, label: str) -> None:
        reads, writes = self._directions([self._span()])
        driver = self.partition.space.driver
        self._streams[stream] = driver.launch(stream, reads=reads, writes=writes, label=label)
