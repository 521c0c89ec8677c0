"""Which operator a module's forward calls: PyTorch's own, or one that works on host memory.

A module whose layer wants panels or gradients in place gets a forward of its own for the time.  That falls back to
the module's class wherever the operator is not the very same computation: under autocast, for other dtypes, for
inputs that are no plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ...plan.modes import GradientMode
from .contributions import EmbeddingRows, LinearWeight
from .cut import find_owners
from .forward import not_compiled
from .gradient_slot import GradientSlot
from .gradients import GradientFlow
from .layer import LayerState
from .operators import bias_gradient, linear_forward, linear_input_gradient
from .support import support_of

Home = Mapping[nn.Parameter, tuple[LayerState, int]]


class Dispatch:
    """Gives modules the forwards that their layers' modes want, and takes them away again.

    Parameters
    ----------
    model : nn.Module
    home : mapping of Parameter to (LayerState, index)
    gradients : GradientFlow
    """

    def __init__(self, model: nn.Module, home: Home, gradients: GradientFlow) -> None:
        self._home = home
        self._gradients = gradients
        self._slots = {slot.parameter: slot for slot in gradients.slots}
        readers: dict[torch.Tensor | None, int] = {}
        owners = find_owners(model)
        for owner in owners:
            for parameter in owner.parameters:
                readers[parameter] = readers.get(parameter, 0) + 1
        self._modules = [
            owner.module
            for owner in owners
            if isinstance(owner.module, (nn.Embedding, nn.Linear))
            and support_of(owner.module).operator
            and "forward" not in owner.module.__dict__  # somebody else's stays
            and readers.get(owner.module._parameters["weight"]) == 1  # else autograd alone knows the sum's order
        ]
        self._given: list[nn.Module] = []

    def apply(self) -> None:
        """Every module has the forward that its layer's present plan wants."""
        self.restore()
        for module in self._modules:
            weight: Any = module.weight
            layer, _ = self._home[weight]
            slot = self._slots.get(weight)
            if layer.plan.gradient is GradientMode.INPLACE and slot is not None:
                module.__dict__["forward"] = not_compiled(self._forward(module, slot))
                self._given.append(module)

    def restore(self) -> None:
        """Modules have their classes' forwards again."""
        for module in self._given:
            module.__dict__.pop("forward", None)
        self._given.clear()

    def _forward(self, module: nn.Module, slot: GradientSlot) -> Callable[[torch.Tensor], torch.Tensor]:
        if isinstance(module, nn.Embedding):
            return _embedding(module, slot, self._gradients)
        assert isinstance(module, nn.Linear)
        return _linear(module, slot, self._gradients)


def _linear(module: nn.Linear, slot: GradientSlot, flow: GradientFlow) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if not _plain(input, weight) or not weight.requires_grad or not input.is_contiguous() or input.dim() < 2:
            return nn.Linear.forward(module, input)
        return _apply(_Linear, input, weight, module.bias, slot, flow)

    return forward


def _embedding(
    module: nn.Embedding, slot: GradientSlot, flow: GradientFlow
) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        weight = module.weight
        if type(input) is not torch.Tensor or not torch.is_grad_enabled() or not weight.requires_grad:
            return nn.Embedding.forward(module, input)
        return _apply(_Embedding, weight, input, module, slot, flow)

    return forward


def _plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether an operator computes what the class would."""
    return (
        type(x) is torch.Tensor
        and torch.is_grad_enabled()
        and x.dtype == weight.dtype
        and x.numel() > 0
        and x.device == weight.device
        and not torch.is_autocast_enabled(x.device.type)
    )


def _apply(function: Any, *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


class _Linear(torch.autograd.Function):
    """`F.linear` whose weight gradient is made where it belongs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        slot: GradientSlot,
        flow: GradientFlow,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.slot, ctx.flow = slot, flow
        return linear_forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph
            return _differentiably(x, weight, dy, ctx.needs_input_grad)
        dx = linear_input_gradient(dy, weight, x=x) if for_x else None
        dw = ctx.flow.offer(ctx.slot, LinearWeight(dy, x)) if for_weight else None
        db = None
        if for_bias:
            db = dy.new_empty(dy.shape[-1])
            bias_gradient(dy, db)
        return dx, dw, db, None, None


def _differentiably(
    x: torch.Tensor, weight: torch.Tensor | None, dy: torch.Tensor, needed: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    rows, inputs = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    dx = None if weight is None else (rows @ weight).view_as(x)
    return dx, rows.t() @ inputs if needed[1] else None, rows.sum(0) if needed[2] else None, None, None


class _Embedding(torch.autograd.Function):
    """`F.embedding` whose gradient is made where it belongs."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        ids: torch.Tensor,
        module: nn.Embedding,
        slot: GradientSlot,
        flow: GradientFlow,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.module, ctx.slot, ctx.flow = module, slot, flow
        return nn.Embedding.forward(module, ids)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,) = gradients
        (ids,) = ctx.saved_tensors
        module = ctx.module
        made = EmbeddingRows(ids, dy, module.num_embeddings, module.padding_idx, module.scale_grad_by_freq)
        return ctx.flow.offer(ctx.slot, made), None, None, None, None
