"""Modes given by hand, checked against the model: what each layer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import UnsupportedError
from ...plan.modes import GradientMode, LayerModes, StateMode, WeightMode, parse_modes
from ...plan.plan import Plan
from .cut import Cut, Owner, find_owners
from .support import Support, support_of

GivenModes = str | Mapping[str, str | WeightMode | GradientMode | LayerModes]
GivenPlan = GivenModes | Plan

_READ_AT_HOME = (WeightMode.DHA, WeightMode.RING)


@dataclass(frozen=True)
class LayerPlan:
    """What a layer does.

    Attributes
    ----------
    weight : WeightMode
    gradient : GradientMode
    loaded : tuple of str
        Modules of the layer that cannot read in place: for these it is loaded.
    state : StateMode or None
        Where its optimizer state is at home and updated; None where the runtime chooses.
    """

    weight: WeightMode = WeightMode.STREAM
    gradient: GradientMode = GradientMode.BUFFER
    loaded: tuple[str, ...] = ()
    state: StateMode | None = None

    @property
    def in_pool(self) -> bool:
        """Whether its weights are ever in the device pool."""
        return self.weight not in _READ_AT_HOME or bool(self.loaded)

    @property
    def new_weights_stay(self) -> bool:
        """Whether new weights may stay in device memory alone: its forward reads them there."""
        return self.weight in (WeightMode.STREAM, WeightMode.RESIDENT)

    @property
    def state_in_pool(self) -> bool:
        """Whether optimizer state and sums of gradients may be at home in device memory."""
        return self.new_weights_stay and self.gradient is GradientMode.BUFFER

    def loads(self, *, backward: bool) -> bool:
        """Whether it is in device memory in forward, or in backward."""
        if self.weight is WeightMode.DHA_THEN_LOAD:
            return backward or bool(self.loaded)
        return self.in_pool

    def reads_at_home(self, support: Support, *, backward: bool) -> bool:
        """Whether a module reads its parameters of this layer in host memory."""
        if not support.in_place:
            return False
        return self.weight in _READ_AT_HOME or (self.weight is WeightMode.DHA_THEN_LOAD and not backward)


STREAMED = LayerPlan()


def resolve_plan(plan: GivenModes | None, model: nn.Module, cuts: Sequence[Cut]) -> list[LayerPlan]:
    """What each layer does; what nothing is said about is streamed.

    Raises
    ------
    PlanError
        Unknown layers or modes.
    UnsupportedError
        A mode that a layer cannot do; the message names the layer and what it can.
    """
    if plan is None:
        return [STREAMED] * len(cuts)
    modes = parse_modes(plan, [cut.name for cut in cuts])
    names = {module: name for name, module in model.named_modules()}
    owners = find_owners(model)
    result = []
    for cut in cuts:
        parameters = {parameter for _, parameter in cut.parameters}
        readers = [owner for owner in owners if parameters.intersection(owner.parameters)]
        result.append(_plan_of(cut.name, modes[cut.name], readers, names))
    return result


def _plan_of(layer: str, modes: LayerModes, readers: Sequence[Owner], names: Mapping[nn.Module, str]) -> LayerPlan:
    weight, gradient = modes.weight or WeightMode.STREAM, modes.gradient or GradientMode.BUFFER
    if modes.state is not None:
        raise UnsupportedError(
            f"plan: layer {layer!r} is given state mode {modes.state.value!r}; by hand, where state lives is "
            "chosen by optimizer_split; a plan of the planner says it layer by layer"
        )
    able = [owner for owner in readers if not owner.in_place]
    known = {mode for owner in able for mode in support_of(owner.module).weight}
    known |= {WeightMode.RESIDENT, WeightMode.STREAM}
    if not able:  # parameters of small containers alone, which are read at home in any mode
        known.add(WeightMode.DHA)
    if weight not in known:
        can = ", ".join(mode.value for mode in WeightMode if mode in known)
        raise UnsupportedError(
            f"plan: layer {layer!r} cannot do {weight.value!r}: {_types(able)} can do {can}; choose one of these"
        )
    loaded = tuple(
        names.get(owner.module, type(owner.module).__name__)
        for owner in able
        if weight not in (WeightMode.STREAM, WeightMode.RESIDENT) and not support_of(owner.module).in_place
    )
    return LayerPlan(weight, gradient, loaded)


def _types(owners: Sequence[Owner]) -> str:
    described = []
    for owner in owners:
        module: Any = owner.module
        name = type(module).__name__
        described.append(f"{name} with max_norm" if getattr(module, "max_norm", None) is not None else name)
    return ", ".join(dict.fromkeys(described))
