"""Several processes that share one model's host state: who owns what, and how they keep step."""

from .arena import ArenaAddress, RankArena
from .board import Board, BoardLayout
from .held import held_nbytes, held_spans
from .hosts import ProcessIdentity, host_key
from .meetings import Gather, Meetings, Outcome
from .places import count_hosts
from .share import Part, Share, parts_between
from .words import SharedWords

__all__ = [
    "ArenaAddress",
    "Board",
    "BoardLayout",
    "Gather",
    "Meetings",
    "Outcome",
    "Part",
    "ProcessIdentity",
    "RankArena",
    "Share",
    "SharedWords",
    "count_hosts",
    "held_nbytes",
    "held_spans",
    "host_key",
    "parts_between",
]
