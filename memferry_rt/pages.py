"""Host memory that a model's slabs are cut from, whoever else may map it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from memferry_allocator import Span


class SlabPages(Protocol):
    """Registered host pages; a `HostArena`, or ones that several processes share."""

    @property
    def nbytes(self) -> int: ...

    def cut(self, nbytes: int) -> Span:
        """The next bytes, aligned to 256, for good."""
        ...

    def array(self, span: Span) -> npt.NDArray[np.uint8]:
        """The bytes of a part, as an array that keeps them mapped."""
        ...

    def close(self) -> None:
        """Unregister."""
        ...
