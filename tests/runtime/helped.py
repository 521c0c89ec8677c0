"""Emulated machines on which the host links are what training waits for, and models that train on them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import memferry_rt
from memferry_allocator import Driver, EmulatedOptions
from memferry_allocator.driver import LinkModel
from memferry_rt.adapters.torch.runtime import Runtime
from memferry_rt.helpers import costs

from .models import Decoder, next_token_loss

offload_module = importlib.import_module("memferry_rt.adapters.torch.offload")
LINK, FAST = LinkModel(0.0, 1e9), LinkModel(0.0, 1e18)


def machine(devices: int = 2, **others: Any) -> EmulatedOptions:
    """Host links that are slow, for everything else takes no time."""
    settings: dict[str, Any] = {"seed": 1, "host_to_device": LINK, "device_to_host": LINK, "peer": FAST}
    return EmulatedOptions(**{**settings, "on_device": FAST, "device_count": devices, **others})


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices as small as the models are."""
    monkeypatch.setattr(costs, "EMULATED_SLICE", 1024)


def put_in(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Let every model train on the same driver."""
    monkeypatch.setattr(
        offload_module, "open_device", lambda text, emulated: (driver, int(text.partition(":")[2] or 0))
    )


def offloaded(
    *, share: float = 0.5, freeze: Callable[[str], bool] = lambda name: False, **options: Any
) -> tuple[Decoder, torch.optim.Optimizer, Runtime]:
    """A small decoder on the emulated device; parameters that `freeze` names do not train."""
    torch.manual_seed(0)
    model = Decoder(layers=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze(name))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    memferry_rt.offload(
        model, optimizer, **{"device": "emulated", "device_memory": int(weights * share), **options}
    )
    return model, optimizer, memferry_rt.runtime_of(model)


def step(model: Decoder, optimizer: torch.optim.Optimizer, number: int) -> None:
    next_token_loss(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def some_slow(cases: Mapping[str, Any], *slow: str) -> list[Any]:
    """Parameters by name, of which some are only tried where there is time."""
    assert set(slow) <= set(cases)
    return [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in slow)) for name, case in cases.items()]
