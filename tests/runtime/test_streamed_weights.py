"""Layers streamed through the device leave their new weights there, where a copy is; the rest is as ever."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_allocator import RaceError
from memferry_rt.adapters.torch.step import StepUpdates
from memferry_rt.streaming import StateStream

from .harness import Job, Result, assert_same, offloaded, plain
from .models import Block, Decoder, next_token_loss, skipping, tokens
from .test_split import Both

WIDTH, WHOLE = 64, 1.6  # a budget that holds all weights, and no state

# Device budgets by share of the weights: where some stay, all stay, and some layers' state beside them.
SHARES = {"some weights": 0.9, "all weights": WHOLE, "some state": 4.0}


class Stack(nn.Module):
    """Nothing in it is read in place: all its weights go through device memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack_loss(model: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(3, WIDTH, generator=generator).to(model.blocks[0].up.weight.dtype)
    return model(x).float().square().mean()


def stack(**options: Any) -> Job:
    return Job(**{"build": Stack, "loss": stack_loss, "steps": 6, "dtype": torch.bfloat16, "lr": 1e-3, **options})


class Changing:
    """Another split in every step; and what each step has moved, in bytes."""

    def __init__(self, splits: Sequence[float]) -> None:
        self._splits = splits
        self._before = (0, 0)
        self.moved: list[tuple[int, int]] = []
        self.streamed: list[int] = []

    def __call__(self, model: nn.Module, number: int) -> None:
        if "_memferry_runtime" not in model.__dict__:
            return
        runtime = memferry_rt.runtime_of(model)
        report = runtime.report()
        now = (report.host_to_device_nbytes, report.device_to_host_nbytes)
        self.moved.append((now[0] - self._before[0], now[1] - self._before[1]))
        self._before = now
        self.streamed.append(report.streamed_parameters)
        runtime.step_updates._split = self._splits[(number + 1) % len(self._splits)]


def _both(job: Job, **options: Any) -> Result:
    result = offloaded(job, **options)
    assert_same(plain(job), result)
    return result


@pytest.mark.parametrize("split", [0.5, 1.0])
def test_weights_of_streamed_layers_do_not_move(split: float) -> None:
    changing = Changing([split])
    result = _both(stack(between=changing), share=WHOLE, optimizer_split=split, async_step=True)
    parameters = sum(value.numel() for value in result.parameters.values())
    for (inward, outward), streamed in list(zip(changing.moved, changing.streamed, strict=True))[1:]:
        assert streamed == (parameters if split == 1.0 else pytest.approx(parameters / 2, rel=0.01))
        # State and gradients come in, and the weights that the CPU has made; state and all gradients go home.
        assert inward == pytest.approx(14 * streamed + 2 * (parameters - streamed), rel=1e-3)  # slabs have gaps
        assert outward == 12 * streamed + 2 * parameters


@pytest.mark.parametrize("async_step", [True, False])
@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_layers_change_hands_from_step_to_step(share: float, async_step: bool) -> None:
    changing = Changing([1.0, 0.0, 0.5, 1.0, 0.3, 0.0])
    job = Job(
        lambda: Decoder(layers=3, width=WIDTH), next_token_loss, dtype=torch.bfloat16, lr=1e-3, steps=8,
        accumulate=1 + async_step, between=changing,
    )  # fmt: skip
    _both(job, share=share, optimizer_split=1.0, async_step=async_step)
    assert len(set(changing.streamed)) > 2


class Mixed(Stack):
    """Every layer has fp32 parameters too, which are their own masters."""

    def to(self, dtype: torch.dtype) -> Mixed:  # type: ignore[override]
        super().to(dtype)
        for block in self.blocks:
            block.norm.float()
        return self


def test_layers_that_have_fp32_parameters_too() -> None:
    def before_step(model: nn.Module, number: int) -> None:
        for block in model.blocks if number % 3 == 1 else ():
            block.norm.weight.grad = block.norm.bias.grad = None

    changing = Changing([1.0, 0.0, 0.5, 1.0])
    job = stack(build=Mixed, between=changing, before_step=before_step, steps=8, max_grad_norm=None)
    _both(job, share=WHOLE, optimizer_split=1.0, async_step=True, spare_slabs=2)
    assert len(set(changing.streamed)) > 2


def test_what_the_cpu_replaces_does_not_come_home_first() -> None:
    changing = Changing([1.0, 0.0])
    result = _both(stack(between=changing), share=WHOLE, optimizer_split=1.0, async_step=True)
    parameters = sum(value.numel() for value in result.parameters.values())
    assert changing.streamed == [parameters, 0] * 3
    assert [outward for _, outward in changing.moved] == [14 * parameters, 2 * parameters] * 3


@pytest.mark.parametrize("frozen", [False, True])
def test_what_the_cpu_does_not_replace_comes_home_first(frozen: bool) -> None:
    def build() -> nn.Module:
        model = Stack()
        model.blocks[1].up.weight.requires_grad_(not frozen)
        return model

    def before_step(model: nn.Module, number: int) -> None:
        if number % 2:
            model.blocks[2].down.weight.grad = None

    changing = Changing([1.0, 0.0])
    _both(
        stack(build=build, between=changing, before_step=before_step),
        share=WHOLE, optimizer_split=1.0, async_step=True,
    )  # fmt: skip


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_skipped_steps_and_layers(share: float) -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return next_token_loss(model, number) * (float("inf") if number == 2 else 1.0)

    job = Job(lambda: Decoder(skipping, layers=4, width=WIDTH), loss, dtype=torch.bfloat16, lr=1e-3, steps=6)
    expected = plain(job)
    got = offloaded(job, share=share, optimizer_split=1.0, async_step=True)
    for name, value in expected.parameters.items():
        assert torch.equal(value, got.parameters[name]), name


def test_early_updates_of_layers_that_were_streamed() -> None:
    def before_step(model: nn.Module, number: int) -> None:
        if number % 2:  # so that what was made early is of no use
            for parameter in model.parameters():
                parameter.grad.mul_(1.0)

    changing = Changing([1.0])
    _both(
        stack(max_grad_norm=None, before_step=before_step, between=changing, steps=8),
        share=WHOLE, optimizer_split=1.0, async_step=True, spare_slabs=5,
    )  # fmt: skip
    assert 0 in changing.streamed
    assert any(changing.streamed)


def test_an_early_update_waits_for_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepUpdates, "streamed_until", lambda *_: None)
    with pytest.raises(RaceError):
        test_early_updates_of_layers_that_were_streamed()


def test_the_cpu_waits_for_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepUpdates, "settle", lambda *_: None)
    with pytest.raises(RaceError):
        test_what_the_cpu_replaces_does_not_come_home_first()


def test_gradients_that_no_forward_made_wait_for_the_last_ones() -> None:
    def before_step(model: nn.Module, number: int) -> None:
        step = memferry_rt.runtime_of(model).step if "_memferry_runtime" in model.__dict__ else None
        if step is not None:
            step()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.125)

    offloaded(stack(before_step=before_step, steps=3), share=WHOLE, optimizer_split=1.0, async_step=True)


def _twins(**options: Any) -> Both:
    """A model whose update the CPU makes, and one that is streamed."""
    return Both(WHOLE / 2, compute_dtype="bfloat16", async_step=True, **options)


def test_state_seen_saved_loaded_and_written_by_the_user(tmp_path: Path) -> None:
    both = _twins()
    both.steps(2)
    assert memferry_rt.runtime_of(both.models[1]).report().streamed_parameters > 0
    assert both.same()
    both.steps(1, first=2)
    states = [copy.deepcopy(model.state_dict()) for model in both.models]
    assert all(torch.equal(one, other) for one, other in zip(*(s.values() for s in states), strict=True))
    both.steps(1, first=3)
    for name, (model, optimizer) in zip("ab", both.pairs(), strict=True):
        memferry_rt.save(tmp_path / name, model, optimizer)
    both.steps(1, first=4)
    for (model, optimizer), state in zip(both.pairs(), states, strict=True):
        memferry_rt.synchronize(model)
        model.load_state_dict(state)
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(0.5)
        optimizer.load_state_dict(optimizer.state_dict())
    both.steps(2, first=5)
    assert both.same()
    for name, (model, optimizer) in zip("ba", both.pairs(), strict=True):
        memferry_rt.load(tmp_path / name, model, optimizer)
    both.steps(1, first=4)
    assert both.same()
    for model in both.models:
        memferry_rt.restore(model)
    assert both.same()


def test_evaluation_between_steps() -> None:
    both = _twins()
    for number in range(3):
        both.steps(1, first=number)
        with torch.no_grad():
            one, other = (model(tokens(100 + number)[:, :-1]) for model in both.models)
        assert torch.equal(one, other)
    both.close()


def test_a_failure_before_anything_is_written_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("in the feeder")

    both = _twins()
    both.steps(2)
    assert both.same()  # and at home
    both.steps(1, first=2)
    both.backward(3)
    with monkeypatch.context() as patched:
        patched.setattr(StateStream, "run", fail)
        both.optimizers[1].step()
        with pytest.raises(ArithmeticError, match="in the feeder"):
            memferry_rt.synchronize(both.models[1])
    for model in both.models:
        memferry_rt.synchronize(model)
    one, other = (list(model.parameters()) for model in both.models)
    assert all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))
    both.close()
