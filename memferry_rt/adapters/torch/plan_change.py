"""The plan in force, and its exchange for another: wholly, or back to the one before."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from memferry_allocator import DriverOutOfMemory, OutOfMemory

from ...errors import OffloadError
from ...plan.plan import Plan
from .budget import Budget
from .modes import GivenPlan, LayerPlan

if TYPE_CHECKING:
    from .runtime import Runtime

NO_ROOM = (OutOfMemory, DriverOutOfMemory, torch.OutOfMemoryError)


@dataclass(frozen=True)
class InForce:
    """What layers do, within which budget, and who has said so.

    Attributes
    ----------
    plans : sequence of LayerPlan
        In forward order.
    budget : Budget
    plan : Plan or None
        The planner's, if it is one of those.
    source : str
        Who has planned, and from what.
    """

    plans: Sequence[LayerPlan]
    budget: Budget
    plan: Plan | None
    source: str


def source_of(plan: GivenPlan | None) -> str:
    """Who has planned, where nobody says otherwise."""
    if plan is None:
        return "default"
    return "given plan" if isinstance(plan, Plan) else "by hand"


class PlanChange:
    """Exchanges a runtime's plan between steps.

    An error on the way ends with the plan before it in force again; if that fails as well, with every layer
    streamed in the smallest pool that does.

    Parameters
    ----------
    runtime : Runtime
    first : InForce
        What the runtime is set up by.

    Attributes
    ----------
    in_force : InForce
    failure : str
        Why no plan at all is in force any more; empty as long as one is.
    """

    def __init__(self, runtime: Runtime, first: InForce) -> None:
        self._runtime = runtime
        self.in_force = first
        self.failure = ""

    def to(self, plan: GivenPlan | None, source: str | None = None) -> None:
        """Let the next steps be by `plan`, which `source` has made.

        Raises
        ------
        PlanError, UnsupportedError, BudgetError
            It cannot be followed; nothing was changed.
        OffloadError
            A tensor aliases the device copy of a layer; nothing was changed.  Or neither this plan nor the one
            before it could be put into force: every layer is streamed now, or, if the message says so, training
            cannot go on.
        Exception
            Whatever has failed on the way; the plan before is in force.
        """
        planning = self._runtime.planning
        plans = planning.resolve(plan)
        budget = planning.budget(plans).replacing(self.in_force.budget)
        given = plan if isinstance(plan, Plan) else None
        self._runtime.rest()
        self._exchange(InForce(plans, budget, given, source or source_of(plan)))

    def grow(self, budget: Budget) -> None:
        """Let the plan in force have a larger pool, unless there is no memory for it after all."""
        self._runtime.rest()
        before = self.in_force
        try:
            self._exchange(replace(before, budget=budget))
        except (*NO_ROOM, OffloadError) as error:
            if self.failure:
                raise
            if self.in_force is not before:  # neither the larger pool nor the one before
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)

    def _exchange(self, wanted: InForce) -> None:
        before = self.in_force
        try:
            self._enforce(wanted)
        except BaseException as error:
            self._go_back(before, error)
            raise

    def _enforce(self, wanted: InForce) -> None:
        """Bring everything home and begin anew, from whatever a failure has left."""
        runtime = self._runtime
        runtime.drain()
        runtime.drop_device_copies()
        for layer, plan in zip(runtime.layers, wanted.plans, strict=True):
            layer.plan = plan
        runtime.dispatch.apply()
        runtime.memory.resize(wanted.budget)
        runtime.use_rings()
        self.in_force = wanted

    def _go_back(self, before: InForce, error: BaseException) -> None:
        try:
            self._enforce(before)
            return
        except Exception as second:
            told = f"a change of plans failed ({_words(error)}), and so did going back ({_words(second)})"
        try:
            self._enforce(self._least())
        except Exception as third:
            self.failure = f"{told}, and so did streaming everything ({_words(third)})"
            raise OffloadError(
                f"{self.failure}; training cannot go on: call memferry_rt.restore(model), or begin at a checkpoint"
            ) from error
        raise OffloadError(f"{told}; every layer is streamed now, and training can go on") from error

    def _least(self) -> InForce:
        planning = self._runtime.planning
        plans = planning.resolve(None)
        budget = planning.budget(plans).least_of(self.in_force.budget)
        return InForce(plans, budget, None, "default, after a plan has failed")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
