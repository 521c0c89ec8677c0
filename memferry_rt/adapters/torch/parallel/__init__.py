"""Data parallelism whose ranks share the host state."""

from .gradients import RankGradients
from .ranks import Ranks
from .terms import facts, options_of_rank, refuse_unshared
from .updates import RankUpdates

__all__ = ["RankGradients", "RankUpdates", "Ranks", "facts", "options_of_rank", "refuse_unshared"]
