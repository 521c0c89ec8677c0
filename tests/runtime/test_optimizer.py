"""The optimizer object: what users and trainers do with it works, or is refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_rt import UnsupportedError

from .harness import Job, assert_same, offloaded, plain
from .models import Decoder, next_token_loss
from .trained import Trained

Schedule = Callable[[torch.optim.Optimizer], Any]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


class Changing:
    """Changes every setting of either group after each step, as a scheduler does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._number = 0

    def step(self) -> None:
        self._number += 1
        first, second = self._optimizer.param_groups
        first.update(
            lr=1e-2 / self._number, betas=(0.9 - 0.1 * self._number, 0.95), weight_decay=0.1 * self._number
        )
        second.update(eps=10.0 ** (-2 - self._number), betas=(0.5, 0.9 + 0.01 * self._number))


@pytest.mark.parametrize("async_step", [False, True])
def test_settings_of_every_group_are_those_of_their_step(async_step: bool) -> None:
    job = Job(Decoder, next_token_loss, steps=6, groups=two_groups, schedule=Changing)
    assert_same(plain(job), offloaded(job, async_step=async_step))


SCHEDULES: dict[str, Schedule] = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "one-cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.01], total_steps=8),
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 2e-2, step_size_up=2),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 0.5**n]),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
        ],
        [3],
    ),
}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_built_before_and_after_offload(schedule: str, before: bool) -> None:
    models, rates = [], []
    for offload in (False, True):
        torch.manual_seed(0)
        model = Decoder(layers=2)
        optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)
        scheduler = SCHEDULES[schedule](optimizer) if before else None
        if offload:
            memferry_rt.offload(model, optimizer, device="emulated", device_memory="80KiB")
        scheduler = scheduler or SCHEDULES[schedule](optimizer)
        for number in range(6):
            next_token_loss(model, number).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append([group["lr"] for group in optimizer.param_groups])
        models.append(model)
    assert rates[:6] == rates[6:]
    assert len({rate for rate, _ in rates}) > 2
    assert all(torch.equal(one, other) for one, other in zip(*(m.parameters() for m in models), strict=True))
    memferry_rt.restore(models[1])


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_grad_norm_is_right(trained: Trained, accumulate: int, norm_type: float) -> None:
    for number in range(3):
        totals = []
        for model, optimizer in ((trained.plain, trained.plain_optimizer), (trained.model, trained.optimizer)):
            for micro in range(accumulate):
                next_token_loss(model, accumulate * number + micro).backward()
            totals.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type))
            optimizer.step()
            optimizer.zero_grad()
        assert totals[0] == totals[1] > 0.05
    assert trained.same()
    if norm_type == 2.0:
        assert trained.optimizer.grad_norm == pytest.approx(0.05, rel=1e-4)


def test_what_steps_found_is_there_before_the_first_and_after_each() -> None:
    both = Trained(max_grad_norm=0.5)
    optimizer = both.optimizer
    assert (optimizer.grad_norm, optimizer.skipped_steps) == (None, 0)
    next_token_loss(both.model, 0).backward()
    exact = sum(p.grad.double().square().sum().item() for p in both.model.parameters()) ** 0.5
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(exact, rel=1e-12)  # before clipping
    both.model.head.weight.grad.fill_(float("inf"))
    optimizer.step()
    assert (optimizer.grad_norm, optimizer.skipped_steps) == (float("inf"), 1)
    optimizer.zero_grad()
    optimizer.step()
    assert (optimizer.grad_norm, optimizer.skipped_steps) == (0.0, 1)
    both.runtime.close()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("async_step", [True, False])
def test_zero_grad(set_to_none: bool, async_step: bool) -> None:
    both = Trained(async_step=async_step)
    for number in range(3):
        for model, optimizer in ((both.plain, both.plain_optimizer), (both.model, both.optimizer)):
            next_token_loss(model, number).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            assert all((p.grad is None) if set_to_none else not p.grad.any() for p in model.parameters())
    assert both.same()
    both.runtime.close()


def test_state_dicts_go_both_ways_with_groups_and_schedule() -> None:
    torch.manual_seed(0)
    model = Decoder(layers=2)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2, fused=True)
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="80KiB", async_step=True)
    theirs = torch.optim.AdamW(two_groups(twin), lr=0.5, betas=(0.1, 0.2), fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def steps(pairs: list[tuple[nn.Module, torch.optim.Optimizer]], numbers: range) -> None:
        for number in numbers:
            for m, o in pairs:
                next_token_loss(m, number).backward()
                o.step()
                o.zero_grad()

    steps([(model, optimizer)], range(2))
    scheduler.step()
    state = optimizer.state_dict()
    assert list(state) == list(theirs.state_dict())
    assert [list(entry) for entry in state["state"].values()] == [["step", "exp_avg", "exp_avg_sq"]] * len(
        list(model.parameters())
    )
    theirs.load_state_dict(copy.deepcopy(state))
    twin.load_state_dict(model.state_dict())
    steps([(model, optimizer), (twin, theirs)], range(2, 4))
    assert theirs.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 5e-3
    memferry_rt.synchronize(model)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))
    steps([(twin, theirs)], range(4, 5))
    theirs.param_groups[1]["lr"] = 7e-3
    saved = copy.deepcopy(theirs.state_dict())
    optimizer.load_state_dict(saved)
    model.load_state_dict(twin.state_dict())
    saved["param_groups"][1]["betas"] = "a state dict that was loaded is the caller's own again"
    steps([(model, optimizer), (twin, theirs)], range(5, 7))
    assert optimizer.param_groups[1]["lr"] == 7e-3
    memferry_rt.restore(model)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


def test_hooks_of_state_dicts_are_called(trained: Trained) -> None:
    calls: list[str] = []
    optimizer = trained.optimizer
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))

    def without_a_note(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("loading")
        return {key: value for key, value in state.items() if key != "note"}

    optimizer.register_load_state_dict_pre_hook(without_a_note)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    trained.steps(1)
    state = {**copy.deepcopy(optimizer.state_dict()), "note": 1}
    optimizer.load_state_dict(state)
    assert calls == ["saved", "loading", "loaded"]
    assert "note" in state
    trained.steps(1, first=1)
    assert trained.same()


@pytest.mark.parametrize("frozen", [True, False])
def test_groups_that_cannot_be_added_are_refused_with_the_reason_and_can_be_after_restore(frozen: bool) -> None:
    torch.manual_seed(0)
    twin = Decoder(layers=2)
    model = copy.deepcopy(twin)
    pairs = []
    for m in (twin, model):
        m.head.requires_grad_(not frozen)
        chosen = [p for name, p in m.named_parameters() if "head" not in name]
        pairs.append((m, torch.optim.AdamW(chosen, lr=1e-2, fused=True)))
    _, optimizer = memferry_rt.offload(*pairs[1], device="emulated", device_memory="80KiB")

    def steps(numbers: range) -> None:
        for number in numbers:
            for m, o in pairs:
                next_token_loss(m, number).backward()
                o.step()
                m.zero_grad()

    steps(range(2))
    model.head.requires_grad_(True)
    for group in (
        {"params": model.head.weight},
        {"params": [model.head.weight], "lr": 1e-3},
        {"params": model.head.named_parameters()},
    ):
        with pytest.raises(UnsupportedError, match=r"no place in host memory.*restore"):
            optimizer.add_param_group(group)
    with pytest.raises(UnsupportedError, match="not of the offloaded model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(optimizer.param_groups) == 1
    memferry_rt.restore(model)
    for m, o in pairs:
        m.head.requires_grad_(True)
        o.add_param_group({"params": m.head.parameters(), "lr": 1e-3})
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="80KiB")
    steps(range(2, 4))
    memferry_rt.restore(model)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: groups[0]["params"].pop(),
        lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(2))),
        lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
        lambda groups: groups.pop(),
    ],
)
def test_members_that_change_groups_are_refused_and_nothing_is_updated(change: Callable[[list[Any]], Any]) -> None:
    model = Decoder(layers=2)
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="80KiB")
    before = [p.detach().clone() for p in model.parameters()]
    next_token_loss(model, 0).backward()
    change(optimizer.param_groups)
    with pytest.raises(UnsupportedError, match="other members"):
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    memferry_rt.restore(model)


def test_a_setting_without_a_counterpart_is_refused_at_the_step(trained: Trained) -> None:
    next_token_loss(trained.model, 0).backward()
    trained.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(UnsupportedError, match="amsgrad"):
        trained.optimizer.step()
    trained.optimizer.param_groups[0]["amsgrad"] = False
    trained.optimizer.zero_grad()
    trained.steps(2)
    assert trained.same()
