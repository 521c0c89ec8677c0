"""An offloaded model beside a plain one: what users do is done to both."""

from __future__ import annotations

import copy
from typing import Any

import torch

import memferry_rt

from .models import Decoder, next_token_loss


class Trained:
    """An offloaded model beside a plain one that gets the same treatment."""

    def __init__(self, dtype: torch.dtype = torch.float32, share: float = 0.4, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain = Decoder().to(dtype)
        self.model = copy.deepcopy(self.plain)
        self.plain_optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-2, fused=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        memferry_rt.offload(
            self.model, self.optimizer, device="emulated", device_memory=int(weights * share), **options
        )
        self.runtime = memferry_rt.runtime_of(self.model)

    def steps(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            for model, optimizer in ((self.plain, self.plain_optimizer), (self.model, self.optimizer)):
                next_token_loss(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()

    def same(self) -> bool:
        if "_memferry_runtime" in self.model.__dict__:
            memferry_rt.synchronize(self.model)
        pairs = zip(self.plain.parameters(), self.model.parameters(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)
