"""What the planner can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError
from .modes import GradientMode, StateMode, WeightMode
from .profile import LayerKind


@dataclass(frozen=True)
class PlanOptions:
    """Budgets and wishes.

    Attributes
    ----------
    device_memory : int
        Bytes for everything on the device, torch's part too.
    host_memory : int or None
        Bytes that may be registered; None is no limit, and takes no more than it must.
    numerics : {"exact", "relaxed"}
        Whether modes may be used whose results differ from the plain run's in the last bit.
    early : bool
        Updates made during backward are used: gradients are not clipped, or clipping seldom bites.
    spares : int or None
        Spare slabs for them; None is as many as are useful and `host_memory` has room for.
    modes : str or mapping
        Modes by hand, as `parse_modes` takes them.
    reserve : float or None
        The share of gradient bytes that may be made on the device, 0 to 1; the planner's choice if None.
    gradient_memory : int or None
        The same in bytes.
    weight_modes : frozenset of WeightMode
        What whoever runs the plan can do.
    gradient_modes : frozenset of GradientMode
    state_modes : frozenset of StateMode
    host_kinds : frozenset of LayerKind
        Layers whose kernels can be made to read and write host memory, or a ring.
    partial : bool
        Whether the first partitions of streamed weights may stay on the device.
    overlap : bool
        Whether the next forward begins beside the update (``async_step``).
    loads : {"whole", "gathered"}
        How several ranks load a layer: each all of it over its own link, as the runtime does; or each its part,
        gathering the others' from the ranks that have them.
    evaluations : int
        Simulated choices, at the most.

    Raises
    ------
    PlanError
        A setting makes no sense.
    """

    device_memory: int
    host_memory: int | None = None
    numerics: str = "exact"
    early: bool = False
    spares: int | None = None
    modes: str | Mapping[str, Any] = field(default_factory=dict)
    reserve: float | None = None
    gradient_memory: int | None = None
    weight_modes: frozenset[WeightMode] = frozenset(WeightMode)
    gradient_modes: frozenset[GradientMode] = frozenset(GradientMode)
    state_modes: frozenset[StateMode] = frozenset(StateMode)
    host_kinds: frozenset[LayerKind] = frozenset(LayerKind)
    partial: bool = False
    overlap: bool = True
    loads: str = "whole"
    evaluations: int = 120

    def __post_init__(self) -> None:
        if self.numerics not in ("exact", "relaxed"):
            raise PlanError(f"numerics: {self.numerics!r} is neither 'exact' nor 'relaxed'")
        if self.loads not in ("whole", "gathered"):
            raise PlanError(f"loads: {self.loads!r} is neither 'whole' nor 'gathered'")
        if self.reserve is not None and not 0 <= self.reserve <= 1:
            raise PlanError(f"reserve: {self.reserve} is not a share from 0 to 1")
        if self.gradient_memory is not None and (self.reserve is not None or self.gradient_memory < 0):
            raise PlanError(f"gradient_memory: {self.gradient_memory} is no limit beside reserve, or less than 0")
        if self.spares is not None and self.spares < 0:
            raise PlanError(f"spares: {self.spares} is not a number of slabs")
        always = (WeightMode.STREAM in self.weight_modes, StateMode.CPU in self.state_modes)
        if not all(always) or GradientMode.BUFFER not in self.gradient_modes:
            raise PlanError(
                "a plan can always stream weights, buffer gradients and update on the CPU; allow all three"
            )
