"""A plan of the planner in the runtime: whether it is for this model, device and budget; who updates; notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memferry_allocator import format_size

from ...errors import BudgetError, PlanError, UnsupportedError
from ...layout import LayerLayout
from ...options import OffloadOptions
from ...plan.modes import GradientMode, StateMode
from ...plan.plan import Plan
from .layer import Geometry
from .modes import LayerPlan


@dataclass(frozen=True)
class Ability:
    """What a plan must fit.

    Attributes
    ----------
    device : str or None
        The device's name; None for the emulated one, where plans for any device can be tried.
    dtype : str
        The compute dtype of most parameters.
    layouts : sequence of LayerLayout
    options : OffloadOptions
    updates : bool
        Whether the device has a kernel for updates.
    ranks : int
        That train together; several share the optimizer state.
    """

    device: str | None
    dtype: str
    layouts: Sequence[LayerLayout]
    options: OffloadOptions
    updates: bool
    ranks: int = 1

    @property
    def sizes(self) -> dict[str, list[int]]:
        """For every layer, how many elements each of its parameters has."""
        return {layout.name: [slot.spec.numel for slot in layout.slots] for layout in self.layouts}


def dtype_of(geometries: Sequence[Sequence[Geometry]]) -> str:
    """The compute dtype that most elements have."""
    counts: Counter[str] = Counter()
    for layer in geometries:
        for form in layer:
            size = 1
            for length in form.shape:
                size *= length
            counts[str(form.dtype).removeprefix("torch.")] += size
    return counts.most_common(1)[0][0]


def refuse_plan(plan: Plan, ability: Ability) -> None:
    """Refuse a plan that is not for this model, device or budget, or that the runtime cannot follow.

    Raises
    ------
    PlanError
        It is for another model, device or number of ranks.
    BudgetError
        It is for more device memory.
    UnsupportedError
        It has something that cannot be done; the message names the layer.
    """
    plan.check_model(ability.dtype, ability.sizes, "this one")
    plan.check_ranks(ability.ranks)
    if ability.device is not None:
        plan.check(device=ability.device)
        if plan.device_memory > ability.options.device_memory:
            raise BudgetError(
                "device_memory", ability.options.device_memory, plan.device_memory, "the plan is made for more"
            )
    for layer in plan.layers:
        if layer.resident_nbytes:
            raise UnsupportedError(
                f"plan: of layer {layer.name!r} {format_size(layer.resident_nbytes)} of weights shall stay on the "
                "device; here a layer stays whole or not at all; plan without partial layers"
            )
        if layer.parameters:
            _refuse_state(layer.name, layer.state, layer.gradient, ability)


def _refuse_state(name: str, state: StateMode, gradient: GradientMode, ability: Ability) -> None:
    split = ability.options.optimizer_split
    if split != "auto" and (state is not StateMode.CPU or split != "cpu"):
        raise PlanError(
            f"plan: it says who updates layer {name!r} ({state.value}), and so does optimizer_split={split!r}; "
            "leave that out"
        )
    if state is StateMode.CPU:
        return
    if not ability.updates:
        raise UnsupportedError(
            f"plan: the state of layer {name!r} is {state.value}, and the device cannot make this optimizer's "
            "update; plan with state_modes={StateMode.CPU}"
        )
    if state is StateMode.RESIDENT and ability.ranks > 1:
        raise UnsupportedError(
            f"plan: the state of layer {name!r} is resident, and ranks share it in host memory; plan without "
            "StateMode.RESIDENT"
        )
    if state is StateMode.RESIDENT and gradient is GradientMode.INPLACE:
        raise UnsupportedError(
            f"plan: layer {name!r} has its state on the device and its gradient in place in host memory; make one "
            "of them stay with the other"
        )


def with_states(plans: Sequence[LayerPlan], layouts: Sequence[LayerLayout], plan: Plan) -> list[LayerPlan]:
    """Layers' plans, with who updates them."""
    return [
        replace(each, state=plan.layer(layout.name).state) for each, layout in zip(plans, layouts, strict=True)
    ]


def notes_of(plan: Plan, options: OffloadOptions, *, spares: int, streaming: bool) -> tuple[str, ...]:
    """What the runtime does otherwise than a plan has it, in words.

    Parameters
    ----------
    plan : Plan
    options : OffloadOptions
    spares : int
        Spare slabs that there are.
    streaming : bool
        Whether state can be streamed through the device now.
    """
    notes = []
    streamed = sum(layer.state is StateMode.STREAMED for layer in plan.layers if layer.parameters)
    if streamed and not streaming:
        notes.append(
            f"the state of {streamed} layers is to be streamed, and the pool has no room for that: the CPU updates"
        )
    if spares != plan.spare_slabs:
        notes.append(f"{plan.spare_slabs} spare slabs are planned, and there are {spares}, taken at offload()")
    if plan.numerics == "relaxed" and options.numerics == "exact":
        notes.append("the plan is for relaxed numerics: panels are used only where they are found exact")
    if options.accumulate > 1:
        notes.append(f"the plan is for steps of one backward, and these have {options.accumulate}")
    if any(layer.recompute for layer in plan.layers):
        notes.append("which blocks recompute in backward is the model's: what the plan says of it is not used")
    return tuple(notes)
