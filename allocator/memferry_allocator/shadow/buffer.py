"""Shadow buffers, and the host ranges that they are made of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..driver import Span
from ..errors import AllocatorError, DriverError, InvalidRequestError
from ..host import HostArena
from .gate import over
from .partition import Partition

if TYPE_CHECKING:
    from .space import ShadowSpace


class ShadowBuffer(Sequence[Partition]):
    """One logical range cut in partitions; a sequence of them, and a context manager that closes it.

    Made by `ShadowSpace.allocate` and `ShadowSpace.buffer`; it lives until it or its space is closed.

    Attributes
    ----------
    name : str
    nbytes : int
        Bytes of all partitions.
    host_nbytes : int
        What it takes of the host budget; 0 over pages of the caller.
    """

    def __init__(
        self, space: ShadowSpace, name: str, spans: Iterable[Span], pages: HostArena | None, host_nbytes: int
    ) -> None:
        self.space = space
        self.name = name
        self.host_nbytes = host_nbytes
        self._pages = pages
        self._partitions = tuple(
            Partition(space, f"{name}[{index}]", span, pages) for index, span in enumerate(spans)
        )
        self.nbytes = sum(partition.nbytes for partition in self._partitions)

    def __len__(self) -> int:
        return len(self._partitions)

    def __getitem__(self, index: int) -> Partition:  # type: ignore[override]  # no slices of partitions
        return self._partitions[index]

    def __repr__(self) -> str:
        return f"<ShadowBuffer {self.name} of {self.nbytes} bytes in {len(self)} partitions>"

    @property
    def closed(self) -> bool:
        """Whether it, or its space, was closed."""
        return not self.space.owns(self)

    def close(self) -> None:
        """End the buffer once no stream uses its pages any more; a second call does nothing.

        Pages of the caller get the newest bytes.  Pages that the space took are given back, and with them what
        they hold; arrays of them keep them mapped.

        Raises
        ------
        InvalidRequestError
            A view is open or a partition is pinned; nothing was changed.
        DriverError
            Bytes could not be brought home; no byte was lost, and a later call tries again.
        """
        self.space._close_buffer(self)

    def __enter__(self) -> ShadowBuffer:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with contextlib.suppress(*(() if error is None else (AllocatorError,))):
            self.close()

    def _forbid(self, what: str) -> None:
        if any(partition.in_use for partition in self._partitions):
            self.space.reap()
        used = [partition.name for partition in self._partitions if partition.in_use]
        if used:
            raise InvalidRequestError(f"{what}: views of {', '.join(used)} are open; release them first")
        pinned = [partition.name for partition in self._partitions if partition.pins]
        if pinned:
            raise InvalidRequestError(f"{what}: {', '.join(pinned)} are pinned; unpin them first")

    def _retire(self) -> None:
        """What can fail comes first: the bytes are somewhere until nothing can."""
        for partition in self._partitions:
            partition._finish()
        if self._pages is not None:
            try:
                self._pages.close()
            except DriverError as error:
                if not over(error):
                    raise
        for partition in self._partitions:
            partition._retire()
