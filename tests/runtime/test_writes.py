"""Writing to weights and gradients, and keeping tensors that alias them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_allocator import OutOfMemory
from memferry_rt import OffloadError

from .models import next_token_loss, tokens
from .trained import Trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_written_in_place(dtype: torch.dtype) -> None:
    both = Trained(dtype, share=0.6)
    for model in (both.plain, both.model):
        model(tokens(0)[:, :-1])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.05, 0.05)
    assert torch.equal(both.plain(tokens(1)[:, :-1]), both.model(tokens(1)[:, :-1]))
    masters = both.runtime.master_parameters()
    assert all(torch.equal(masters[name], p.float()) for name, p in both.plain.named_parameters())
    both.runtime.close()


class SelfClamping(nn.Module):
    """Writes to its own weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return x @ self.weight.t()


def test_a_module_that_writes_to_its_own_weight() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(SelfClamping(), SelfClamping(), SelfClamping())
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (plain, model)]
    memferry_rt.offload(model, optimizers[1], device="emulated", device_memory=1800, layers=["0", "1", "2"])
    for number in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(number))
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    memferry_rt.restore(model)


def test_gradients_after_backward_are_real(trained: Trained) -> None:
    for model in (trained.plain, trained.model):
        next_token_loss(model, 0).backward()
    for one, other in zip(trained.plain.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_gradients_changed_by_the_user_count(trained: Trained) -> None:
    for number in range(3):
        for model, optimizer in (
            (trained.plain, trained.plain_optimizer),
            (trained.model, trained.optimizer),
        ):
            next_token_loss(model, number).backward()
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert total > 0
            model.head.weight.grad.add_(0.01)
            model.norm.weight.grad = torch.full_like(model.norm.weight, 0.5)
            model.blocks[1].up.bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
    assert trained.same()


def test_clearing_gradients_in_place(trained: Trained) -> None:
    for number in range(4):
        for model, optimizer in (
            (trained.plain, trained.plain_optimizer),
            (trained.model, trained.optimizer),
        ):
            next_token_loss(model, number).backward()
            optimizer.step()
            if number % 2:
                model.zero_grad(set_to_none=False)
            else:
                optimizer.zero_grad(set_to_none=False)
    assert trained.same()


def test_a_parameter_without_a_gradient_is_not_updated_and_does_not_stop_others(trained: Trained) -> None:
    """Stale gradients are never applied again."""
    trained.steps(1)
    for model, optimizer in ((trained.plain, trained.plain_optimizer), (trained.model, trained.optimizer)):
        x = model.blocks[0](model.embedding(tokens(1)[:, :-1]))
        model.head(model.norm(x)).square().sum().backward()
        before = model.blocks[3].up.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(before, model.blocks[3].up.weight)
    assert trained.same()


def test_two_backwards_through_one_graph(trained: Trained) -> None:
    for model, optimizer in ((trained.plain, trained.plain_optimizer), (trained.model, trained.optimizer)):
        loss = next_token_loss(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    assert trained.same()


def test_gradients_asked_for_by_name(trained: Trained) -> None:
    for model in (trained.plain, trained.model):
        loss = next_token_loss(model, 0)
        found = torch.autograd.grad(loss, [model.head.weight, model.blocks[0].up.weight])
        if model is trained.plain:
            expected = found
        assert model.head.weight.grad is None
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    trained.steps(1)
    assert trained.same()


def test_hooks_of_the_user_see_gradients(trained: Trained) -> None:
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for model in (trained.plain, trained.model):
        weight = model.blocks[2].down.weight
        keep = seen[model is trained.model]
        weight.register_post_accumulate_grad_hook(lambda p, keep=keep: keep.append(p.grad.clone()))
        weight.register_hook(lambda g: g * 2)
        next_token_loss(model, 0).backward()
    assert len(seen[True]) == 1
    assert torch.equal(seen[True][0], seen[False][0])


def test_nothing_live_changes_before_the_step(trained: Trained) -> None:
    trained.steps(2)
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    moments = copy.deepcopy(trained.optimizer.state_dict()["state"])
    next_token_loss(trained.model, 9).backward()
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, before[name])
    for key, state in trained.optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], moments[key]["exp_avg"])


def test_backward_after_a_step_that_changed_its_weights_fails_as_in_pytorch(trained: Trained) -> None:
    slow = torch.optim.AdamW(trained.plain.parameters(), fused=False)  # the fused one forgets to tell autograd
    for model, optimizer in ((trained.plain, slow), (trained.model, trained.optimizer)):
        early = next_token_loss(model, 0)
        next_token_loss(model, 1).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            early.backward()


def test_a_view_of_a_weight_that_leaves_its_module() -> None:
    """A learned position table returns a slice of its weight: it must stay what it is while it is used."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(64, 32))

        def forward(self, length: int) -> torch.Tensor:
            return self.table[:length]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Positions()
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            position = self.positions(x.shape[0])
            for block in self.blocks:
                x = (block(x) * position).tanh()
            return x

    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (plain, model)]
    memferry_rt.offload(model, optimizers[1], device="emulated", device_memory="32KiB")
    for number in range(3):
        x = torch.randn(9, 32, generator=torch.Generator().manual_seed(number))
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    memferry_rt.restore(model)


def test_an_alias_of_a_weight_kept_over_a_step_is_refused() -> None:
    class Leaky(nn.Linear):
        kept: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = self.weight.detach()
            return super().forward(x)

    model = nn.Sequential(Leaky(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="64KiB")
    model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(OffloadError, match="aliases"):
        optimizer.step()
    model[0].kept = None
    optimizer.step()
    memferry_rt.restore(model)


def test_aliases_that_fill_the_pool_are_named() -> None:
    class Leaky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if leak:
                kept.append(self.weight.detach())
            return super().forward(x)

    leak = True
    kept: list[torch.Tensor] = []
    model = nn.Sequential(*(Leaky(32, 32) for _ in range(4)))
    memferry_rt.offload(model, torch.optim.AdamW(model.parameters()), device="emulated", device_memory="16KiB")
    with pytest.raises(OutOfMemory, match="alias"):
        model(torch.ones(2, 32))
    kept.clear()
    leak = False
    model(torch.ones(2, 32))
    memferry_rt.restore(model)


def test_gradients_asked_for_by_name_leave_those_of_backward_alone(trained: Trained) -> None:
    for model, optimizer in ((trained.plain, trained.plain_optimizer), (trained.model, trained.optimizer)):
        next_token_loss(model, 0).backward()
        torch.autograd.grad(next_token_loss(model, 1), list(model.parameters()))
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    trained.steps(1, first=2)
    assert trained.same()


def test_backward_into_some_parameters(trained: Trained) -> None:
    for model, optimizer in ((trained.plain, trained.plain_optimizer), (trained.model, trained.optimizer)):
        next_token_loss(model, 0).backward()
        next_token_loss(model, 1).backward(inputs=[model.head.weight, model.blocks[0].up.weight])
        optimizer.step()
        optimizer.zero_grad()
    assert trained.same()


def test_a_hook_that_raises_loses_no_gradient(trained: Trained) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    for clear in (False, True):
        for model, optimizer in (
            (trained.plain, trained.plain_optimizer),
            (trained.model, trained.optimizer),
        ):
            next_token_loss(model, 0).backward()
            handle = model.blocks[0].up.weight.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                next_token_loss(model, 1).backward()
            handle.remove()
            assert model.blocks[0].up.weight.grad is not None
            if clear:
                optimizer.zero_grad()
            next_token_loss(model, 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert trained.same()


def _swapped(one: nn.Parameter, other: nn.Parameter) -> None:
    one.grad, other.grad = other.grad, one.grad


def _crossed_views(one: nn.Parameter, other: nn.Parameter) -> None:
    one.grad, other.grad = other.grad.view_as(one), one.grad.view_as(other)


def _moved_on(one: nn.Parameter, other: nn.Parameter) -> None:
    other.grad, one.grad = one.grad, torch.ones_like(one)


@pytest.mark.parametrize("move", [_swapped, _crossed_views, _moved_on])
@pytest.mark.parametrize("options", [{"share": 0.6}, {"share": 8.0}], ids=["cpu", "resident"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_moved_between_parameters(move: Any, options: dict[str, Any], accumulate: bool) -> None:
    both = Trained(**options)
    for number in range(3):
        for model, optimizer in ((both.plain, both.plain_optimizer), (both.model, both.optimizer)):
            next_token_loss(model, number).backward()
            move(model.blocks[0].up.weight, model.blocks[1].up.weight)
            if accumulate and move is not _crossed_views:
                next_token_loss(model, number + 10).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert both.same()
    both.runtime.close()


@pytest.mark.parametrize("options", [{"share": 0.6}, {"share": 8.0}], ids=["cpu", "resident"])
def test_a_transposed_gradient(options: dict[str, Any]) -> None:
    """The fused AdamW of PyTorch takes every gradient for contiguous: the plain one gets such a one."""
    both = Trained(**options)
    for model, optimizer in ((both.plain, both.plain_optimizer), (both.model, both.optimizer)):
        next_token_loss(model, 0).backward()
        weight = model.blocks[0].up.weight
        turned = weight.grad.view(weight.shape[::-1]).t()
        weight.grad = turned.contiguous() if model is both.plain else turned
        expected = weight.grad.clone()
        optimizer.step()
        assert torch.equal(weight.grad, expected)
    assert both.same()
    both.runtime.close()


@pytest.mark.parametrize(
    "options",
    [{"share": 0.6}, {"share": 0.6, "spare_slabs": 4}, {"share": 8.0}],
    ids=["cpu", "early", "resident"],
)
def test_gradients_kept_by_reference_stay_what_they_were(options: dict[str, Any]) -> None:
    both = Trained(**options)
    old: dict[nn.Module, list[torch.Tensor]] = {}
    for number in range(4):
        for model, optimizer in ((both.plain, both.plain_optimizer), (both.model, both.optimizer)):
            next_token_loss(model, number).backward()
            for parameter, gradient in zip(model.parameters(), old.get(model, ()), strict=False):
                parameter.grad.add_(gradient, alpha=0.5)
            old[model] = [parameter.grad for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(*old.values(), strict=True):
            assert torch.equal(one, other)
    assert both.same()
    both.runtime.close()


def test_gradients_nobody_keeps_are_not_copied(trained: Trained) -> None:
    trained.steps(2)
    homes = [slot.home for slot in trained.runtime.gradients.slots]
    del homes[1:]  # one is kept, here
    trained.steps(2)
    now = [slot.home for slot in trained.runtime.gradients.slots]
    assert now[0] is not homes[0]
    del now
    addresses = [id(slot.home) for slot in trained.runtime.gradients.slots]
    trained.steps(2)
    assert addresses == [id(slot.home) for slot in trained.runtime.gradients.slots]
