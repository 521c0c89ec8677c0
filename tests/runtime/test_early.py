"""Updates made during backward: taken only if nothing that they were made from has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memferry_rt
from memferry_allocator import InvalidRequestError, RaceError
from memferry_rt import BudgetError, UnsupportedError
from memferry_rt.adapters.torch.early import EarlyUpdates
from memferry_rt.speculation import PATIENCE, RETURN, Speculation

from .harness import Job, assert_same, offloaded, plain
from .models import Decoder, checkpointed, next_token_loss, plainly, skipping
from .trained import Trained

LAYERS = 3


def small(**options: Any) -> Decoder:
    return Decoder(layers=LAYERS, **options)


@pytest.fixture
def trained() -> Any:
    both = Trained(spare_slabs=4, optimizer_split="cpu")
    yield both
    both.runtime.close()


def early_of(both: Trained) -> EarlyUpdates:
    early = both.runtime.step_updates.early
    assert early is not None
    return early


@pytest.mark.parametrize("slabs", [1, 3, 9])
@pytest.mark.parametrize("max_grad_norm", [None, 1e-3, 3.0])
@pytest.mark.parametrize("split", ["cpu", 0.5])
def test_early_updates(slabs: int, max_grad_norm: float | None, split: Any) -> None:
    job = Job(small, next_token_loss, max_grad_norm=max_grad_norm, steps=6)
    assert_same(plain(job), offloaded(job, share=0.6, spare_slabs=slabs, optimizer_split=split))


@pytest.mark.parametrize("run", [plainly, skipping, checkpointed(False), checkpointed(True)])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_ways_of_running_the_blocks(run: Any, accumulate: int) -> None:
    job = Job(
        lambda: small(run=run, tied=True), next_token_loss, max_grad_norm=None, steps=5, accumulate=accumulate
    )
    assert_same(plain(job), offloaded(job, share=0.6, spare_slabs=4, async_step=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.8, 12.0])
def test_half_precision(dtype: torch.dtype, share: float) -> None:
    job = Job(small, next_token_loss, dtype=dtype, max_grad_norm=None, steps=4, lr=1e-3)
    assert_same(plain(job), offloaded(job, share=share, spare_slabs=4, optimizer_split=0.4))


@settings(max_examples=12, deadline=None)
@given(
    pattern=st.lists(st.sampled_from(["plain", "clipped", "inf", "nan"]), min_size=3, max_size=9),
    slabs=st.integers(0, 5),
    split=st.sampled_from(["cpu", 0.5]),
    seed=st.integers(0, 5),
)
def test_any_pattern_of_steps(pattern: list[str], slabs: int, split: Any, seed: int) -> None:
    factors = {"plain": 1e-3, "clipped": 50.0, "inf": float("inf"), "nan": float("nan")}

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return next_token_loss(model, number) * factors[pattern[number]]

    job = Job(lambda: Decoder(layers=2), loss, steps=len(pattern))
    expected = plain(job)
    got = offloaded(job, share=0.8, seed=seed, spare_slabs=slabs, optimizer_split=split)
    for name, value in expected.parameters.items():
        assert torch.equal(value, got.parameters[name]), name


def test_they_are_taken_and_nothing_live_changes_before_the_step(trained: Trained) -> None:
    trained.steps(2)
    early = early_of(trained)
    assert early.published > 0
    held = [trained.optimizer.state[p] for p in trained.model.parameters()]
    before = copy.deepcopy(held)
    weights = [p.detach().clone() for p in trained.model.parameters()]
    published = early.published
    for model in (trained.plain, trained.model):
        next_token_loss(model, 9).backward()
    for one, other in zip(held, before, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    for one, other in zip(trained.model.parameters(), weights, strict=True):
        assert torch.equal(one, other)
    for optimizer in (trained.plain_optimizer, trained.optimizer):
        optimizer.step()
        optimizer.zero_grad()
    assert early.published > published
    assert trained.same()
    expected = [trained.plain_optimizer.state[p] for p in trained.plain.parameters()]
    for one, other in zip(held, expected, strict=True):  # the user's own references show what is new
        assert all(torch.equal(one[key], other[key]) for key in one)


def _change_settings(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.param_groups[0]["betas"] = (0.7, 0.9)


def _change_a_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.head.weight.grad.mul_(2.0)
    model.norm.weight.grad = torch.ones_like(model.norm.weight)
    model.blocks[4].up.weight.grad = None


def _clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _change_a_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.head.weight.add_(0.5)


def _change_a_moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.head.weight]["exp_avg"].mul_(0.5)


def _change_a_count(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.head.weight]["step"].add_(5.0)


def _replace_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg_sq"] = torch.full_like(parameter, 0.5)


def _swap_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    one, other = (optimizer.state[model.blocks[number].up.weight] for number in (0, 1))
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def _clear_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _remove_an_entry(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[model.head.weight]


def _load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg_sq"] *= 0.25
    optimizer.load_state_dict(state)


def _another_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next_token_loss(model, 77).backward()


CHANGES = [
    _change_settings, _clip, _change_a_gradient, _change_a_weight, _change_a_moment, _change_a_count, _load,
    _another_backward, _replace_moments, _swap_moments, _clear_state, _remove_an_entry,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_backward_and_step_counts(change: Any, trained: Trained) -> None:
    trained.steps(2)
    for number in range(2, 5):
        for model, optimizer in (
            (trained.plain, trained.plain_optimizer),
            (trained.model, trained.optimizer),
        ):
            next_token_loss(model, number).backward()
            change(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert trained.same()


def test_restored_between_backward_and_step(trained: Trained) -> None:
    trained.steps(2)
    for model in (trained.plain, trained.model):
        next_token_loss(model, 2).backward()
    memferry_rt.restore(trained.model)
    trained.optimizer.param_groups[0]["fused"] = True
    for optimizer in (trained.plain_optimizer, trained.optimizer):
        optimizer.step()
        optimizer.zero_grad()
    assert trained.same()


def test_a_failure_is_told_in_step_which_changes_nothing(trained: Trained, monkeypatch: Any) -> None:
    trained.steps(2)
    queue = trained.runtime.updates
    run = queue.run_early

    def fail(*_: Any) -> Any:
        raise ArithmeticError("in backward's shadow")

    monkeypatch.setattr(queue, "run_early", fail)
    for model in (trained.plain, trained.model):
        next_token_loss(model, 2).backward()
    monkeypatch.setattr(queue, "run_early", run)
    with pytest.raises(ArithmeticError, match="in backward's shadow"):
        trained.optimizer.step()
    trained.optimizer.step()
    trained.plain_optimizer.step()
    for optimizer in (trained.plain_optimizer, trained.optimizer):
        optimizer.zero_grad()
    trained.steps(2, first=3)
    assert trained.same()


def test_a_failure_of_what_was_thrown_away_is_not_told(trained: Trained, monkeypatch: Any) -> None:
    trained.steps(2)

    def fail(*_: Any) -> Any:
        raise ArithmeticError("in backward's shadow")

    with monkeypatch.context() as patched:
        patched.setattr(trained.runtime.updates, "run_early", fail)
        next_token_loss(trained.model, 2).backward()
    trained.optimizer.zero_grad()
    next_token_loss(trained.model, 3).mul(float("inf")).backward()
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    trained.steps(2, first=4)
    assert trained.same()


def test_settings_that_are_wrong_during_backward_cost_no_slab(trained: Trained) -> None:
    trained.steps(2)
    group = trained.optimizer.param_groups[0]
    group["amsgrad"] = True
    for model in (trained.plain, trained.model):
        next_token_loss(model, 2).backward()
    with pytest.raises(UnsupportedError, match="amsgrad"):
        trained.optimizer.step()
    group["amsgrad"] = False
    for optimizer in (trained.plain_optimizer, trained.optimizer):
        optimizer.step()
        optimizer.zero_grad()
    assert len(early_of(trained)._spares) == 4
    trained.steps(1, first=3)
    assert trained.same()


def test_parameters_without_elements() -> None:
    def build() -> nn.Module:
        model = small()
        for block in model.blocks:  # its gradient comes last
            block.up.nothing = nn.Parameter(torch.zeros(0))
            block.up.register_forward_pre_hook(lambda up, x: (x[0] + up.nothing.sum(),))
        return model

    job = Job(build, next_token_loss, max_grad_norm=None, steps=3)
    assert_same(plain(job), offloaded(job, share=0.6, spare_slabs=4, optimizer_split="cpu"))


def test_the_gradients_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tester: reading gradients at home too early is a race."""
    begin = EarlyUpdates._begin
    monkeypatch.setattr(
        EarlyUpdates, "_begin", lambda self, layer, slab, home, s: begin(self, layer, slab, None, s)
    )
    with pytest.raises(RaceError):
        offloaded(Job(small, next_token_loss, max_grad_norm=None, steps=2), share=0.6, spare_slabs=4)


def test_host_memory_bounds_the_spare_slabs() -> None:
    model = Decoder()
    with pytest.raises(BudgetError) as caught:
        memferry_rt.offload(
            model, torch.optim.AdamW(model.parameters()), device="emulated", device_memory="1MiB",
            host_memory=1 << 10,
        )  # fmt: skip
    base = caught.value.smallest
    with pytest.raises(BudgetError) as caught:
        memferry_rt.offload(
            model, torch.optim.AdamW(model.parameters()), device="emulated", device_memory="1MiB",
            host_memory=base, spare_slabs=2,
        )  # fmt: skip
    two = caught.value.smallest
    assert two > base
    for memory, spares in ((base, 0), (two - 1, 1), (two, 2)):
        optimizer = torch.optim.AdamW(model.parameters())
        memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB", host_memory=memory)
        runtime = memferry_rt.runtime_of(model)
        early = runtime.step_updates.early
        assert (0 if early is None else len(early._spares)) == spares
        assert runtime.report().host_nbytes <= memory + 4096
        memferry_rt.restore(model)
    with pytest.raises(InvalidRequestError, match="spare_slabs"):
        memferry_rt.offload(
            model, torch.optim.AdamW(model.parameters()), device="emulated", device_memory="1MiB", spare_slabs=-1
        )


def test_speculation_stops_while_clipping_bites_and_resumes() -> None:
    speculation = Speculation()
    for _ in range(PATIENCE):
        assert speculation.active
        speculation.learn(False)
    assert not speculation.active
    speculation.learn(True)
    speculation.learn(False)
    for _ in range(RETURN):
        assert not speculation.active
        speculation.learn(True)
    assert speculation.active
