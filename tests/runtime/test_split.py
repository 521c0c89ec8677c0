"""Whoever makes the update: CPU, device with streamed or with resident state, in any share: the same bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_allocator import EmulatedOptions, InvalidRequestError
from memferry_rt.split import UpdateRates

from .harness import Job, Result, assert_same, offloaded, plain
from .models import VOCABULARY, Decoder, checkpointed, next_token_loss, plainly, skipping, tokens

WIDTH = 64  # every parameter is whole vectors, so that its state may be resident

# Device budgets by share of the weights: for streaming alone, for some layers resident, for all of them.
PLACES = {"streamed": 0.6, "some resident": 4.0, "all resident": 8.0}
SPLITS: list[Any] = ["cpu", 0.5, 1.0, "auto"]


def wide(**options: Any) -> Decoder:
    return Decoder(width=WIDTH, layers=4, **options)


def _both(job: Job, **options: Any) -> Result:
    result = offloaded(job, **options)
    assert_same(plain(job), result)
    return result


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("split", SPLITS)
def test_splits(split: Any, place: str) -> None:
    job = Job(wide, next_token_loss, steps=6, accumulate=1 + (split == 0.5))
    _both(job, share=PLACES[place], optimizer_split=split, async_step=split != 1.0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, place: str) -> None:
    job = Job(lambda: wide(), next_token_loss, dtype=dtype, steps=4, lr=1e-3, accumulate=2)
    _both(job, share=2 * PLACES[place], optimizer_split=1.0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("run", [checkpointed(False), skipping], ids=["checkpoint", "skipping"])
def test_ways_of_running_the_blocks(run: Any, place: str) -> None:
    job = Job(lambda: wide(run=run, tied=True, dropout=0.1), next_token_loss, steps=6)
    _both(job, share=PLACES[place], optimizer_split=1.0, async_step=True)


@pytest.mark.parametrize("split", [0.5, 1.0])
def test_parameters_that_end_within_a_vector_are_streamed_but_for_their_ends(split: float) -> None:
    job = Job(lambda: Decoder(width=36, layers=4), next_token_loss, steps=6)
    _both(job, share=8.0, optimizer_split=split)


@pytest.mark.parametrize("place", PLACES)
def test_frozen_parameters_and_some_outside_of_the_optimizer(place: str) -> None:
    def build() -> nn.Module:
        model = wide()
        model.embedding.requires_grad_(False)
        for block in model.blocks:
            block.up.requires_grad_(False)
        return model

    def groups(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad and p is not model.blocks[1].down.weight]

    _both(Job(build, next_token_loss, groups=groups, steps=6), share=PLACES[place], optimizer_split=1.0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("max_grad_norm", [None, 1e-2])
def test_steps_that_are_not_finite_and_clipping(place: str, max_grad_norm: float | None) -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        factor = {2: float("inf"), 4: float("nan")}.get(number, 1.0)
        return next_token_loss(model, number) * factor

    job = Job(wide, loss, steps=7, max_grad_norm=max_grad_norm)
    expected, got = plain(job), offloaded(job, share=PLACES[place], optimizer_split=1.0)
    for name, value in expected.parameters.items():
        assert torch.equal(value, got.parameters[name]), name
        assert torch.isfinite(value).all()


class Both:
    """An offloaded model with a device share, and the same on the CPU alone, treated alike."""

    def __init__(self, share: float, split: Any = 1.0, **options: Any) -> None:
        self.models, self.optimizers = [], []
        for chosen in ("cpu", split):
            torch.manual_seed(0)
            model = wide()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            weights = sum(p.numel() * p.element_size() for p in model.parameters())
            budget = int(weights * share)
            memferry_rt.offload(
                model, optimizer, device="emulated", device_memory=budget, optimizer_split=chosen, **options
            )
            self.models.append(model)
            self.optimizers.append(optimizer)

    def pairs(self) -> Any:
        return zip(self.models, self.optimizers, strict=True)

    def backward(self, number: int) -> None:
        for model in self.models:
            next_token_loss(model, number).backward()

    def steps(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            self.backward(number)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def same(self) -> bool:
        for model in self.models:
            if "_memferry_runtime" in model.__dict__:
                memferry_rt.synchronize(model)
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        moments = all(
            torch.equal(one[key], other[key])
            for one, other in zip(*(state.values() for state in states), strict=True)
            for key in ("exp_avg", "exp_avg_sq", "step")
        )
        weights = zip(*(model.parameters() for model in self.models), strict=True)
        return moments and all(torch.equal(one, other) for one, other in weights)

    def close(self) -> None:
        for model in self.models:
            memferry_rt.runtime_of(model).close()


@pytest.mark.parametrize("place", PLACES)
def test_state_seen_loaded_and_written_by_the_user(place: str) -> None:
    both = Both(PLACES[place])
    both.steps(2)
    kept = [both.optimizers[1].state[p]["exp_avg"] for p in both.models[1].parameters()]
    both.steps(1, first=2)
    assert both.same()
    now = [both.optimizers[0].state[p]["exp_avg"] for p in both.models[0].parameters()]
    assert all(torch.equal(one, other) for one, other in zip(now, kept, strict=True))
    saved = [{**o.state_dict(), "state": {k: {n: t.clone() for n, t in s.items()}
             for k, s in o.state_dict()["state"].items()}} for o in both.optimizers]  # fmt: skip
    both.steps(1, first=3)
    for (model, optimizer), state in zip(both.pairs(), saved, strict=True):
        optimizer.load_state_dict(state)
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(0.5)
            model.head.weight.grad = torch.full((VOCABULARY, WIDTH), 0.25)
    both.steps(2, first=4)
    assert both.same()
    both.close()


@pytest.mark.parametrize("place", PLACES)
def test_gradients_assigned_while_the_last_ones_are_read(place: str) -> None:
    both = Both(PLACES[place], async_step=True)
    for number in range(3):
        both.backward(number)
        for model, optimizer in both.pairs():
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * number)
            optimizer.step()
            optimizer.zero_grad()
    for model in both.models:
        memferry_rt.synchronize(model)
    assert both.same()
    both.close()


@pytest.mark.parametrize("place", PLACES)
def test_what_is_kept_over_a_load_stays_whole(place: str) -> None:
    both = Both(PLACES[place])
    both.steps(2)
    for model, optimizer in both.pairs():
        kept = optimizer.state_dict()["state"]
        before = copy.deepcopy(kept)
        other = copy.deepcopy(optimizer.state_dict())
        for entry in other["state"].values():
            entry["exp_avg"].zero_()
        optimizer.load_state_dict(other)
        next_token_loss(model, 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        memferry_rt.restore(model)
        for number, entry in before.items():
            assert all(torch.equal(entry[key], kept[number][key]) for key in entry)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_every_home_can_be_read_changed_and_summed(place: str) -> None:
    both = Both(PLACES[place], max_grad_norm=0.5)
    for number in range(3):
        both.backward(2 * number)
        both.backward(2 * number + 1)
        grads = [[p.grad.clone() for p in model.parameters()] for model in both.models]
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
        for model, optimizer in both.pairs():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            model.blocks[0].up.bias.grad.add_(0.1)
            model.blocks[2].up.bias.grad = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    assert both.same()
    both.close()


@pytest.mark.parametrize("place", PLACES)
def test_what_is_given_back_is_whole_and_trains_on_alike(place: str) -> None:
    both = Both(PLACES[place], async_step=True)
    both.steps(3)
    both.backward(3)
    for model in both.models:
        memferry_rt.restore(model)
    grads = [[p.grad for p in model.parameters()] for model in both.models]
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert both.same()
    for optimizer in both.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    both.steps(2, first=4)
    assert both.same()


@pytest.mark.parametrize("place", PLACES)
def test_evaluation_between_asynchronous_steps(place: str) -> None:
    def between(model: nn.Module, number: int) -> None:
        model.eval()
        with torch.no_grad():
            seen.append(model(tokens(500 + number)[:, :-1]).sum().item())
        model.train()

    seen: list[float] = []
    job = Job(wide, next_token_loss, between=between, steps=5)
    expected = plain(job)
    mine, seen = seen, []
    assert_same(expected, offloaded(job, share=PLACES[place], optimizer_split=1.0, async_step=True))
    assert mine == seen


@pytest.mark.parametrize("seed", range(8))
def test_orders_of_queued_work(seed: int) -> None:
    job = Job(lambda: wide(run=plainly), next_token_loss, steps=4, accumulate=1 + seed % 2)
    place = list(PLACES)[seed % 3]
    _both(job, seed=seed, share=PLACES[place], optimizer_split=1.0 if seed % 4 else 0.6, async_step=seed % 2 == 0)


@pytest.mark.parametrize("split", ["cpu", 1.0])
@pytest.mark.parametrize("place", PLACES)
def test_who_updates_what_is_reported(place: str, split: Any) -> None:
    both = Both(PLACES[place])
    both.steps(3)
    report = memferry_rt.runtime_of(both.models[split == 1.0]).report()
    assert report.updated_parameters == report.parameters
    on_device = report.resident_parameters + report.streamed_parameters
    if split == "cpu":
        assert on_device == 0
        assert report.dram_nbytes >= 3 * 28 * report.parameters
    elif place == "all resident":
        assert report.resident_parameters == report.parameters
    else:
        assert on_device == report.parameters
        assert (report.resident_parameters > 0) == (place == "some resident")
    times = report.times
    assert times.total > 0
    assert min(times.busy, times.update, times.copy, times.step) >= -1e-9
    assert times.busy + times.update + times.copy + times.step == pytest.approx(times.total)
    assert 0 <= times.busy_share <= 1
    both.close()


@pytest.mark.parametrize("split", ["gpu", -0.1, 1.5, float("nan")])
def test_a_split_that_makes_no_sense_is_refused(split: Any) -> None:
    model = wide()
    with pytest.raises(InvalidRequestError, match="optimizer_split"):
        memferry_rt.offload(
            model, torch.optim.AdamW(model.parameters()), device_memory="1MiB", optimizer_split=split,
            device="emulated", emulated=EmulatedOptions(),
        )  # fmt: skip


def test_the_balance_by_measured_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memferry_rt.adapters.torch.update.WORTHWHILE_STREAM", 0)
    both = Both(PLACES["streamed"], split="auto")
    updates = memferry_rt.runtime_of(both.models[1]).step_updates
    both.steps(2)
    half = updates.numel(updates.streamed)
    updates.rates = UpdateRates(cpu=9e9, device=1e9)
    both.steps(1, first=2)
    assert updates.numel(updates.streamed) < half < updates.numel(updates.updated)
    assert both.same()
    both.close()
