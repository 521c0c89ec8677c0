"""`nn.Linear` whose weight comes panel by panel, or whose weight's gradient is made where it belongs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...plan.modes import WeightMode
from .contributions import LinearWeight
from .exactness import Exactness
from .gradient_slot import GradientSlot
from .gradients import GradientFlow
from .layer import LayerState
from .norm import piece_rows
from .operators import LinearShape, bias_gradient, linear_forward, linear_input_gradient
from .operators.linear import WeightPanel
from .saved import require_version
from .weight_panels import WeightPanels


class LinearOperator:
    """A linear layer's forward under RING, or while its gradient is in place.

    Parameters
    ----------
    module : nn.Linear
    layer, index
        Where its weight is at home.
    slot : GradientSlot or None
        Of its weight; None where that is frozen.
    gradients : GradientFlow
    panels : WeightPanels
    exactness : Exactness
    """

    def __init__(
        self,
        module: nn.Linear,
        layer: LayerState,
        index: int,
        slot: GradientSlot | None,
        gradients: GradientFlow,
        panels: WeightPanels,
        exactness: Exactness,
    ) -> None:
        self.module = module
        self.layer = layer
        self._index = index
        self._slot = slot
        self._gradients = gradients
        self._panels = panels
        self._exactness = exactness

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        module = self.module
        usual = self._is_usual(input)
        by_panels = usual and self._goes_by_panels(input)
        if not by_panels:
            self._count_whole()
        gradients = torch.is_grad_enabled() and (input.requires_grad or module.weight.requires_grad)
        if not usual or not (gradients or by_panels):
            if gradients and self._slot is not None:
                self._slot.mixed = True
            return nn.Linear.forward(module, input)
        apply: Any = _Linear.apply
        result: torch.Tensor = apply(input, module.weight, module.bias, self, by_panels)
        return result

    def rows(self) -> Iterable[WeightPanel]:
        return self._panels.pieces(self.layer, self._index, by_columns=False)

    def columns(self) -> Iterable[WeightPanel]:
        return self._panels.pieces(self.layer, self._index, by_columns=True)

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """What autograd is given for the weight."""
        made = LinearWeight((dy, x))
        if self._slot is None:
            return made.dense()
        out_features, in_features = self.module.weight.shape
        if not self._exactness.weight_gradient(self._shape(x), piece_rows(out_features, in_features)):
            return made.dense()
        return self._gradients.offer(self._slot, made)

    def _shape(self, x: torch.Tensor) -> LinearShape:
        module = self.module
        tokens = x.numel() // module.in_features
        return LinearShape(tokens, module.in_features, module.out_features, x.dtype, module.bias is not None)

    def _is_usual(self, x: torch.Tensor) -> bool:
        """Whether the operator computes what the class would."""
        weight = self.module.weight
        return (
            type(x) is torch.Tensor
            and x.dtype == weight.dtype
            and x.device == weight.device
            and x.numel() > 0
            and x.dim() > 1
            and x.is_contiguous()
            and not torch.is_autocast_enabled(x.device.type)
        )

    def _goes_by_panels(self, x: torch.Tensor) -> bool:
        if self.layer.plan.weight is not WeightMode.RING or not self._panels.holds(self.layer, self._index):
            return False
        return self._exactness.ring(self._shape(x), *self._panels.steps(self.layer, self._index))

    def _count_whole(self) -> None:
        """Under RING whoever opened the module's scope has left the count of its weight to the operator."""
        if self.layer.plan.weight is WeightMode.RING:
            self.layer.traffic.read_in_place += self.layer.layout.slots[self._index].spec.nbytes


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        operator: LinearOperator,
        by_panels: bool,
    ) -> torch.Tensor:
        for_x, for_weight = ctx.needs_input_grad[:2]
        ctx.operator, ctx.by_panels = operator, by_panels
        ctx.version, ctx.shape = weight._version, x.shape
        ctx.save_for_backward(x if for_weight else None, weight if for_x and not by_panels else None)
        return linear_forward(x, weight, bias, operator.rows() if by_panels else None)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        operator: LinearOperator = ctx.operator
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        panels = None
        if ctx.by_panels and for_x:
            weight = operator.module.weight
            require_version(operator.layer, weight, ctx.version)
            panels = operator.columns()
        if torch.is_grad_enabled():  # create_graph
            return _differentiably(x, weight, dy, ctx)
        dx = linear_input_gradient(dy, weight, panels) if for_x else None
        dw = operator.weight_gradient(dy, x) if for_weight else None
        db = None
        if for_bias:
            db = dy.new_empty(dy.shape[-1])
            bias_gradient(dy, db)
        return dx, dw, db, None, None


def _differentiably(
    x: torch.Tensor | None, weight: torch.Tensor | None, dy: torch.Tensor, ctx: Any
) -> tuple[torch.Tensor | None, ...]:
    """By operations of which autograd knows the gradients."""
    for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
    rows = dy.reshape(-1, dy.shape[-1])
    dx = (rows @ weight).view(ctx.shape) if for_x and weight is not None else None
    dw = rows.t() @ x.reshape(-1, x.shape[-1]) if for_weight and x is not None else None
    return dx, dw, rows.sum(0) if for_bias else None, None, None
