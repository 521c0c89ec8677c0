"""Low-rank adapters on the attention projections of a frozen model (Hu et al., "LoRA", 2021)."""

from __future__ import annotations

import torch
from torch import nn

from .model import Attention, Decoder

BASE = ".base."  # in the names of parameters that the model has without adapters, too
LAST = ".adapter.up.weight"  # begins as zeros, so that the model begins as its base


class Adapter(nn.Module):
    """A product of two thin matrices, ``up @ down``, of one rank.

    Parameters
    ----------
    base : nn.Linear
        Whose inputs and outputs it has, on whose device.
    rank : int
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        device = base.weight.device
        self.down = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(self.down(x))
        return y


class AdaptedLinear(nn.Module):
    """A linear layer that stays as it is, and an adapter that is added to it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.adapter = Adapter(base, rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.adapter(x)
        return y


def add_adapters(model: Decoder, rank: int) -> None:
    """Freeze a model, and give its attention projections adapters, which alone train."""
    model.requires_grad_(False)
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        for name in ("qkv", "out"):
            setattr(attention, name, AdaptedLinear(getattr(attention, name), rank))


def name_in_base(name: str) -> str:
    """What a parameter is called in a model without adapters."""
    return name.replace(BASE, ".")
