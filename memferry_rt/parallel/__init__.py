"""Several processes that share one model's host state: who owns what, and how they keep step."""

from .arena import ArenaAddress, RankArena
from .board import Board, BoardLayout
from .hosts import ProcessIdentity, host_key
from .meetings import Meetings, Outcome
from .share import Part, Share
from .words import SharedWords

__all__ = [
    "ArenaAddress",
    "Board",
    "BoardLayout",
    "Meetings",
    "Outcome",
    "Part",
    "ProcessIdentity",
    "RankArena",
    "Share",
    "SharedWords",
    "host_key",
]
