"""Everything but the choice that decides how long an iteration takes."""

from __future__ import annotations

from dataclasses import dataclass

from .cost import LayerCost
from .machine import Machine
from .model import Workload


@dataclass(frozen=True)
class Setting:
    """Everything but the choice that decides how long an iteration takes.

    Attributes
    ----------
    early : bool
        Whether updates made during backward, into spare slabs, are used: clipping does not bite.
    overlap : bool
        Whether a forward begins as soon as its first layers are updated; else when all are.
    gathered : bool
        Whether each of several ranks loads its part of a layer and gathers the others'; else all of it.
    """

    workload: Workload
    costs: tuple[LayerCost, ...]
    machine: Machine
    early: bool = False
    overlap: bool = True
    gathered: bool = False
