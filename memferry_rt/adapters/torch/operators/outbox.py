"""How a panel of a gradient gets home: who has the memory that it is made in, and who carries it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from memferry_allocator import Direction, Driver, Event, Span, Stream
from memferry_transport import TransferEngine

from ....device_kernels import DeviceMoves
from ....staging import Piece, StagingRing


class Outbox(Protocol):
    """Lends memory for panels, and sends them home."""

    def panel(self, offset: int, like: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Memory for what belongs `offset` bytes behind the start of the home, of the form of `like`.

        It is sent home when the context ends; without an error, and in the order of the current stream.
        """


class DirectOutbox:
    """Kernels of the current stream carry panels: for memory that needs no link, and for a few bytes.

    Parameters
    ----------
    home : Tensor
        Contiguous.
    """

    def __init__(self, home: torch.Tensor) -> None:
        self._home = home.view(-1)

    @contextlib.contextmanager
    def panel(self, offset: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
        made = torch.empty_like(like, memory_format=torch.contiguous_format)
        yield made
        first = offset // like.element_size()
        self._home[first : first + like.numel()].copy_(made.view(-1))


class LaneOutbox:
    """A ring in device memory, and a lane that carries: one panel leaves while the next is made.

    Parameters
    ----------
    driver : Driver
    engine : TransferEngine
    ring : StagingRing
        A panel takes at most half of it.
    tensor : callable
        A flat tensor of bytes over device memory.
    stream : Stream
        The current stream, where panels are made.
    home : Span
        By its host address.
    left : callable, optional
        Told of every copy home: its part of the home, and the event of its end.
    moves : DeviceMoves, optional
        A kernel of few blocks carries, instead of the copy engine.

    Attributes
    ----------
    last : Event or None
        When the last panel is home, and all before it.
    """

    def __init__(
        self,
        driver: Driver,
        engine: TransferEngine,
        ring: StagingRing,
        tensor: Callable[[Span], torch.Tensor],
        *,
        stream: Stream,
        home: Span,
        left: Callable[[Span, Event], None] | None = None,
        moves: DeviceMoves | None = None,
    ) -> None:
        self._driver = driver
        self._engine = engine
        self._ring = ring
        self._tensor = tensor
        self._stream = stream
        self._lane = engine.lane(Direction.DEVICE_TO_HOST)
        self._home = home
        self._left = left or (lambda home, event: None)
        self._moves = moves
        self.last: Event | None = None

    @contextlib.contextmanager
    def panel(self, offset: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
        nbytes = like.numel() * like.element_size()
        if nbytes > self._ring.nbytes // 2:
            raise ValueError(f"a panel of {nbytes} bytes is more than half of a ring of {self._ring.nbytes}")
        piece = next(self._ring.pieces(nbytes, self._stream))
        try:
            with self._driver.launch(self._stream, reads=[piece.span], writes=[piece.span], label="panel"):
                yield self._tensor(piece.span).view(like.dtype).view(like.shape)
        except BaseException:
            self._ring.leaving(piece, self._stream.record())
            raise
        self._lane.wait(self._stream.record())
        self._carry(piece, Span(self._home.ptr + offset, nbytes))

    def _carry(self, piece: Piece, home: Span) -> None:
        try:
            if self._moves is not None:
                target = self._driver.host_device_pointer(home.ptr, self._engine.device)
                self._moves.copy(target, piece.span.ptr, home.nbytes, stream=self._lane)
            else:
                self._engine.copy(home, piece.span, Direction.DEVICE_TO_HOST, stream=self._lane)
        finally:  # of a copy that fails a part may be under way
            self.last = self._lane.record()
            self._ring.leaving(piece, self.last)
            self._left(home, self.last)
