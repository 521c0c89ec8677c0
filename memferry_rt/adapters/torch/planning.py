"""What a plan of modes needs of the device budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from memferry_allocator import Driver
from memferry_allocator.sizes import align_up

from ...cuts import ring_nbytes
from ...layout import LayerLayout
from ...options import OffloadOptions
from ...plan.modes import GradientMode, StateMode, WeightMode
from ...plan.plan import Plan
from .budget import RING_UNIT, SMALLEST_STREAM, Budget, UpdateRoom, plan_budget
from .cut import Cut, find_owners
from .modes import GivenPlan, LayerPlan, resolve_plan
from .norm import piece_rows
from .planned import Ability, refuse_plan, with_states
from .support import support_of, with_operators
from .tensors import torch_device_of
from .update import room_for_updates


class Planning:
    """Checks plans of one model, and shares its device budget by them.

    Parameters
    ----------
    model : nn.Module
    cuts : sequence of Cut
    layouts : sequence of LayerLayout
    options : OffloadOptions
    driver : Driver
    device : int
    updates : bool
        Whether the device has a kernel for updates.
    ranks : int
        That train together; several share the optimizer state, which stays where all find it.
    dtype : str
        The compute dtype of most parameters.

    Attributes
    ----------
    operators : list of Module
        Those whose forward may be exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Sequence[Cut],
        layouts: Sequence[LayerLayout],
        options: OffloadOptions,
        driver: Driver,
        device: int,
        *,
        updates: bool,
        ranks: int = 1,
        dtype: str,
    ) -> None:
        self._model = model
        self.cuts = cuts
        self.operators = with_operators(model)
        members = [
            (parameter, layer, index)
            for layer, cut in enumerate(cuts)
            for index, (_, parameter) in enumerate(cut.parameters)
        ]
        self._layer_of: dict[torch.Tensor, int] = {parameter: layer for parameter, layer, _ in members}
        self._index_of: dict[torch.Tensor, int] = {parameter: index for parameter, _, index in members}
        self.layouts = layouts
        self._options = options
        emulated = torch_device_of(driver, device).type == "cpu"
        self._device = None if emulated else device
        self._updates = updates
        self._shared = ranks > 1
        name = None if emulated else driver.device_info(device).name
        self.ability = Ability(name, dtype, layouts, options, updates=updates, ranks=ranks)

    def resolve(self, plan: GivenPlan | None) -> list[LayerPlan]:
        """What each layer does.

        Raises
        ------
        PlanError, UnsupportedError, BudgetError
            As for `resolve_plan` and `refuse_plan`.
        """
        if not isinstance(plan, Plan):
            return resolve_plan(plan, self._model, self.cuts)
        refuse_plan(plan, self.ability)
        modes = {name: replace(modes, state=None) for name, modes in plan.modes.items()}
        return with_states(resolve_plan(modes, self._model, self.cuts), self.layouts, plan)

    def budget(self, plans: Sequence[LayerPlan]) -> Budget:
        """How the device memory is shared by plans.

        Raises
        ------
        BudgetError
            It is too little.
        """
        return plan_budget(
            self._options.device_memory,
            self.layouts,
            self._used_together(plans),
            pool=self._options.pool_memory,
            device=self._device,
            room=self._room(plans),
            plans=plans,
            panels=self._panels(plans),
            outgoing=self._outgoing(plans),
        )

    def _outgoing(self, plans: Sequence[LayerPlan]) -> int:
        """Two panels of the largest gradient that is made so; 0 where none is."""
        panel = 0
        for module in self.operators:
            layer, index = self._layer_of[module.weight], self._index_of[module.weight]
            spec = self.layouts[layer].slots[index].spec
            if isinstance(module, nn.Linear) and spec.trainable and plans[layer].gradient is GradientMode.INPLACE:
                rows, columns = module.weight.shape
                panel = max(panel, piece_rows(rows, columns) * columns * spec.itemsize)
        return 2 * align_up(panel, RING_UNIT)

    def _panels(self, plans: Sequence[LayerPlan]) -> int:
        """The ring for panels of all matrices that come that way; 0 for none."""
        matrices = []
        for module in self.operators:
            layer, index = self._layer_of[module.weight], self._index_of[module.weight]
            if isinstance(module, nn.Linear) and plans[layer].weight is WeightMode.RING:
                rows, columns = module.weight.shape
                matrices.append((rows, columns, self.layouts[layer].slots[index].spec.itemsize))
        return ring_nbytes(matrices)

    def _room(self, plans: Sequence[LayerPlan]) -> UpdateRoom:
        """What updates and sums could use, without the layers whose state or gradients must be at home."""
        split = self._options.optimizer_split
        share = split if isinstance(split, float) else None
        room = room_for_updates(self.layouts, share) if self._updates else UpdateRoom()
        may = [plan.state_in_pool and not self._shared for plan in plans]
        free = [m and plan.state is None for m, plan in zip(may, plans, strict=True)]
        room = replace(room, resident=tuple(n if m else 0 for n, m in zip(room.resident, free, strict=False)))
        if any(plan.state is StateMode.STREAMED for plan in plans):
            room = replace(room, least=min(room.least, SMALLEST_STREAM))
        elif all(plan.state is not None for plan in plans):
            room = replace(room, streaming=0, least=0)
        if self._options.accumulate > 1:
            sizes = [align_up(layout.gradient_nbytes, RING_UNIT) for layout in self.layouts]
            room = replace(room, summed=tuple(n if m else 0 for n, m in zip(sizes, may, strict=True)))
        return room

    def _used_together(self, plans: Sequence[LayerPlan]) -> set[tuple[int, ...]]:
        """Layers in the pool at once, in the order in which they come: of the modules around one, then its own."""
        layer_of = self._layer_of
        owners = {id(owner.module): owner for owner in find_owners(self._model) if not owner.in_place}
        found: set[tuple[int, ...]] = set()

        def loaded(module: nn.Module, layer: int) -> bool:
            plan = plans[layer]
            kept = plan.weight is WeightMode.RESIDENT
            return not kept and not plan.reads_at_home(support_of(module), backward=True)

        def visit(module: nn.Module, outer: tuple[int, ...]) -> None:
            owner = owners.get(id(module))
            inner = outer
            if owner is not None:
                own = {layer_of[p] for p in owner.parameters if loaded(module, layer_of[p])}
                inner = (*outer, *sorted(own.difference(outer)))
                found.add(inner)
            for child in module.children():
                visit(child, inner)

        visit(self._model, ())
        return found
