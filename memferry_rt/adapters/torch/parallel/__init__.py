"""Data parallelism whose ranks share the host state."""

from .consent import agree_on_step, refused_by_all
from .gradients import RankGradients
from .ranks import Ranks
from .terms import facts, options_of_rank, refuse_unshared
from .updates import RankUpdates
from .whole_state import WholeState

__all__ = [
    "RankGradients",
    "RankUpdates",
    "Ranks",
    "WholeState",
    "agree_on_step",
    "facts",
    "options_of_rank",
    "refuse_unshared",
    "refused_by_all",
]
