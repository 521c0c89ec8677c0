"""Devices that do not train, and lend their links to those that do."""

from .choice import NO_HELP, Help, reach, require_able
from .costs import Costs, find_costs
from .sharing import share_out
from .trainings import Training, begin_training, require_no_helper, training_on

__all__ = [
    "NO_HELP",
    "Costs",
    "Help",
    "Training",
    "begin_training",
    "find_costs",
    "reach",
    "require_able",
    "require_no_helper",
    "share_out",
    "training_on",
]
