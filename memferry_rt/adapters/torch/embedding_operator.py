"""`nn.Embedding` whose gradient is made where it belongs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .contributions import EmbeddingRows
from .gradient_slot import GradientSlot
from .gradients import GradientFlow


class EmbeddingOperator:
    """An embedding's forward while its gradient is in place."""

    def __init__(self, module: nn.Embedding, slot: GradientSlot, gradients: GradientFlow) -> None:
        self.module = module
        self.slot = slot
        self.gradients = gradients

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.module.weight
        gradients = torch.is_grad_enabled() and weight.requires_grad
        if type(input) is not torch.Tensor or not gradients:
            self.slot.mixed |= gradients
            return nn.Embedding.forward(self.module, input)
        apply: Any = _Embedding.apply
        result: torch.Tensor = apply(weight, input, self)
        return result


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, operator: EmbeddingOperator) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.operator = operator
        return nn.Embedding.forward(operator.module, ids)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = gradients
        (ids,) = ctx.saved_tensors
        operator: EmbeddingOperator = ctx.operator
        module = operator.module
        made = EmbeddingRows(ids, dy, module.num_embeddings, module.padding_idx, module.scale_grad_by_freq)
        return operator.gradients.offer(operator.slot, made), None, None
