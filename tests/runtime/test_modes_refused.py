"""Plans that cannot be: said before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_allocator import InvalidRequestError
from memferry_rt import BudgetError, OffloadError, PlanError, UnknownLayerError, UnsupportedError

from .models import Decoder, next_token_loss


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, max_norm=1.0)
        self.first = nn.Linear(8, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.convolution(self.first(self.table(ids)).transpose(1, 2))
        result: torch.Tensor = self.last[1](self.last[0](x.transpose(1, 2)).transpose(1, 2))
        return result


LAYERS = ("table", "first", "convolution", "last")

BAD: list[tuple[Any, type[Exception], str]] = [
    ({"nobody": "dha"}, UnknownLayerError, "no layer is called 'nobody'"),
    ({"first": "fast"}, PlanError, "'fast'"),
    ({"first": "dha+ring"}, PlanError, "two modes of one kind"),
    ("first", PlanError, "layer=mode"),
    (17, PlanError, "neither text nor a mapping"),
    ({1: "dha"}, PlanError, "modes: 1 is no name of a layer"),
    ({"first": "state:resident"}, UnsupportedError, "optimizer_split"),
    (
        {"table": "dha"},
        UnsupportedError,
        "'table' cannot do 'dha': Embedding with max_norm can do resident, stream",
    ),
    ({"convolution": "dha"}, UnsupportedError, "'convolution' cannot do 'dha': Conv1d can do resident, stream"),
    ({"convolution": "ring"}, UnsupportedError, "'convolution' cannot do 'ring'"),
    ({"*": "dha_then_load"}, UnsupportedError, "'table' cannot do 'dha_then_load'"),
    ({"first": "resident", "last": "resident"}, BudgetError, "first, last must be in it at once"),
]


def _offload(plan: Any, **options: Any) -> tuple[Odd, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"device": "emulated", "device_memory": "6KiB", "layers": LAYERS, **options}
    memferry_rt.offload(model, optimizer, plan=plan, **options)
    return model, optimizer


@pytest.mark.parametrize(("plan", "error", "says"), BAD)
def test_refused_by_offload(plan: Any, error: type[Exception], says: str) -> None:
    memory = 1600 if error is BudgetError else 6 << 10
    with pytest.raises(error) as caught:
        _offload(plan, device_memory=memory)
    assert says in str(caught.value)


@pytest.mark.parametrize(("plan", "error", "says"), BAD)
def test_refused_by_set_plan(plan: Any, error: type[Exception], says: str) -> None:
    memory = 3 << 10 if error is BudgetError else 6 << 10
    model, optimizer = _offload({"first": "dha+inplace"}, device_memory=memory)
    runtime = memferry_rt.runtime_of(model)
    before = [layer.plan for layer in runtime.layers]
    with pytest.raises(error) as caught:
        memferry_rt.set_plan(model, plan)
    assert says in str(caught.value)
    assert [layer.plan for layer in runtime.layers] == before
    model(torch.arange(6).view(2, 3)).sum().backward()
    optimizer.step()
    memferry_rt.restore(model)


def test_set_plan_needs_an_offloaded_model() -> None:
    with pytest.raises(OffloadError, match="not offloaded"):
        memferry_rt.set_plan(Odd(), {})


def test_set_plan_refuses_a_held_weight() -> None:
    model, _ = _offload(None)
    kept: list[torch.Tensor] = []
    model.first.register_forward_hook(
        lambda module, args, output: kept.append(module.weight.detach()), prepend=True
    )
    model(torch.arange(6).view(2, 3))
    with pytest.raises(OffloadError, match="still aliases"):
        memferry_rt.set_plan(model, "first=dha")
    kept.clear()
    memferry_rt.set_plan(model, "first=dha")
    memferry_rt.restore(model)


def test_wrong_numerics() -> None:
    with pytest.raises(InvalidRequestError, match="numerics"):
        _offload(None, numerics="sloppy")


@pytest.mark.parametrize("mode", ["dha", "ring", "dha_then_load"])
def test_what_a_mode_has_nothing_for_is_loaded(mode: str) -> None:
    """And the report says so."""

    def train(act: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        act(model, optimizer)
        for _ in range(3):
            model(torch.arange(6).view(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    def offload(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        memferry_rt.offload(
            model,
            optimizer,
            device="emulated",
            device_memory="6KiB",
            layers=LAYERS,
            plan={"last": f"{mode}+inplace"},
        )
        layer = memferry_rt.runtime_of(model).report().per_layer[-1]
        assert layer.loaded_modules == ("last.1",)

    assert all(map(torch.equal, train(lambda *_: None), train(offload)))


def test_budget_is_smaller_for_what_needs_none() -> None:
    """An embedding that is read in place can be larger than all of the device memory."""
    model = Decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options: Any = {"device": "emulated", "device_memory": "24KiB"}
    with pytest.raises(BudgetError):
        memferry_rt.offload(model, optimizer, **options)
    memferry_rt.offload(model, optimizer, plan="*=dha+inplace", **options)
    next_token_loss(model, 0).backward()
    optimizer.step()
    assert memferry_rt.runtime_of(model).report().device_peak <= 24 << 10
    memferry_rt.restore(model)
