"""A ring in device memory through which gradients leave for host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from memferry_allocator import DevicePool, Event, Span, Stream


class Piece(NamedTuple):
    """Part of a gradient in the ring: where it lies, and which bytes of the gradient it holds."""

    span: Span
    offset: int


class StagingRing:
    """Segments of one device block, taken in turn and reused once their copy home is done.

    A gradient is cut in pieces of at most half the ring, so that one piece is filled while another leaves.

    Parameters
    ----------
    pool : DevicePool
    nbytes : int
        Size of the ring, a multiple of 512.
    stream : Stream
        The stream of its first use.
    wait : callable, optional
        Lets a stream wait for an event; `Stream.wait` by default.
    """

    def __init__(
        self,
        pool: DevicePool,
        nbytes: int,
        stream: Stream,
        *,
        wait: Callable[[Stream, Event], None] | None = None,
    ) -> None:
        self._pool = pool
        self._wait = wait or (lambda stream, event: stream.wait(event))
        self.base = pool.allocate(nbytes, stream=stream)
        self.nbytes = nbytes
        self._head = 0
        self._leaving: deque[tuple[int, int, Event]] = deque()

    def pieces(self, nbytes: int, stream: Stream) -> Iterator[Piece]:
        """Segments for `nbytes` bytes, each safe to write on `stream` when it is yielded.

        The caller must call `leaving` for a piece before it takes the next.
        """
        largest = self.nbytes // 2
        for offset in range(0, nbytes, largest):
            size = min(largest, nbytes - offset)
            start = self._head if self._head + size <= self.nbytes else 0
            self._claim(start, start + size, stream)
            self._head = start + -(-size // 256) * 256
            yield Piece(Span(self.base + start, size), offset)

    def leaving(self, piece: Piece, event: Event) -> None:
        """A piece is being copied home; its segment is free again after `event`."""
        start = piece.span.ptr - self.base
        self._leaving.append((start, start + piece.span.nbytes, event))

    def close(self, stream: Stream) -> None:
        """Give the block back to the pool; its last copy was waited for."""
        self._pool.deallocate(self.base, self.nbytes, stream=stream)
        self._leaving.clear()

    def _claim(self, start: int, end: int, stream: Stream) -> None:
        """Wait for the copies of older pieces that lie here: they leave in the order they came."""
        overlapping = [index for index, (low, high, _) in enumerate(self._leaving) if low < end and start < high]
        if overlapping:
            self._wait(stream, self._leaving[overlapping[-1]][2])
            for _ in range(overlapping[-1] + 1):
                self._leaving.popleft()
