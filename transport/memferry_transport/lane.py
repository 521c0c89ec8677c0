"""What a transfer engine has for each direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memferry_allocator import Direction, Stream

from .shared_queue import SharedQueue


@dataclass(eq=False)
class Lane:
    """A stream of the engine's own, and the queue of those who share in its transfers.

    Attributes
    ----------
    threshold : float
        From how many bytes on several ways are thought of.
    moved : int
        Bytes submitted so far.
    used : float
        When it was asked to carry something last.
    """

    direction: Direction
    stream: Stream
    threshold: float
    queue: SharedQueue
    moved: int = 0
    used: float = -math.inf
