"""Which operator a module's forward calls: PyTorch's own, or one that works on host memory.

A module whose layer wants panels or gradients in place gets a forward of its own for the time.  That falls back to
the module's class wherever the operator is not the very same computation: under autocast, for other dtypes, for
inputs that are no plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from ...plan.modes import GradientMode, WeightMode
from .embedding_operator import EmbeddingOperator
from .exactness import Exactness
from .forward import not_compiled
from .gradients import GradientFlow
from .layer import LayerState
from .linear_operator import LinearOperator
from .support import mark_own
from .weight_panels import WeightPanels


class Dispatch:
    """Gives modules the forwards that their layers' modes want, and takes them away again.

    Parameters
    ----------
    modules : sequence of Module
        Those that there are operators for.
    home : mapping of Parameter to (LayerState, index)
    gradients : GradientFlow
    panels : WeightPanels
    exactness : Exactness
    """

    def __init__(
        self,
        modules: Sequence[nn.Embedding | nn.Linear],
        home: Mapping[nn.Parameter, tuple[LayerState, int]],
        gradients: GradientFlow,
        panels: WeightPanels,
        exactness: Exactness,
    ) -> None:
        places = {id(parameter): place for parameter, place in home.items()}
        self._modules = [(module, *places[id(module.weight)]) for module in modules]
        self._slots = {id(slot.parameter): slot for slot in gradients.slots}
        self._gradients = gradients
        self._panels = panels
        self._exactness = exactness
        self._given: list[nn.Module] = []

    def apply(self) -> None:
        """Every module has the forward that its layer's present plan wants."""
        self.restore()
        for module, layer, index in self._modules:
            forward = self._forward(module, layer, index)
            if forward is not None:
                module.__dict__["forward"] = mark_own(not_compiled(forward))
                self._given.append(module)

    def restore(self) -> None:
        """Modules have their classes' forwards again."""
        for module in self._given:
            module.__dict__.pop("forward", None)
        self._given.clear()

    def _forward(
        self, module: nn.Embedding | nn.Linear, layer: LayerState, index: int
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        slot = self._slots.get(id(module.weight))
        in_place = slot is not None and layer.plan.gradient is GradientMode.INPLACE
        if isinstance(module, nn.Embedding):
            return EmbeddingOperator(module, slot, self._gradients).forward if in_place and slot else None
        if not in_place and layer.plan.weight is not WeightMode.RING:
            return None
        return LinearOperator(module, layer, index, slot, self._gradients, self._panels, self._exactness).forward
