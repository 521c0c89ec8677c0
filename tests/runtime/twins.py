"""One training twice, step by step: what a test does to the offloaded one in between changes no bit."""

from __future__ import annotations

from typing import Any

import torch

import memferry_rt
from memferry_allocator import EmulatedOptions

from .models import Decoder, next_token_loss


class Twins:
    """The same training in plain PyTorch and offloaded, step by step; gradients stay until the next one."""

    def __init__(self, **options: Any) -> None:
        self.plain, self._reference = self._make()
        self.model, self.optimizer = self._make()
        self.steps = 0
        options = {"device_memory": 4 << 20, "emulated": EmulatedOptions(), **options}
        memferry_rt.offload(self.model, self.optimizer, device="emulated", **options)
        self.runtime = memferry_rt.runtime_of(self.model)

    @staticmethod
    def _make() -> tuple[Decoder, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Decoder(layers=3)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(self) -> None:
        for model, optimizer in ((self.plain, self._reference), (self.model, self.optimizer)):
            optimizer.zero_grad()
            next_token_loss(model, self.steps).backward()
            optimizer.step()
        self.steps += 1

    def assert_same(self, what: object) -> None:
        memferry_rt.synchronize(self.model)
        for (name, one), other in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            assert torch.equal(one, other), (what, name)
            assert torch.equal(one.grad, other.grad), (what, name)
