"""The objects stay what they were, and state goes in and out of them."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_rt import UnsupportedError

from .models import Decoder, next_token_loss, tokens
from .trained import Trained


def test_the_same_objects_come_back() -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = list(model.parameters())
    result = memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB")
    assert result[0] is model
    assert result[1] is optimizer
    assert type(model) is Decoder
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(p.is_leaf and isinstance(p, nn.Parameter) for p in parameters)
    memferry_rt.restore(model)


def test_restore_gives_ordinary_objects_back_that_train_on_alike(trained: Trained) -> None:
    trained.steps(3)
    memferry_rt.restore(trained.model)
    assert trained.runtime.driver.registered == 0
    assert "step" not in trained.optimizer.__dict__
    assert not trained.model._forward_pre_hooks
    for group in trained.optimizer.param_groups:
        group["fused"] = True
    trained.steps(3, first=3)
    assert trained.same()
    memferry_rt.offload(trained.model, trained.optimizer, device="emulated", device_memory="1MiB")
    trained.steps(3, first=6)
    assert trained.same()
    memferry_rt.restore(trained.model)


def test_an_offloaded_model_that_is_dropped_takes_everything_with_it() -> None:
    both = Trained()
    both.steps(1)
    driver, model = both.runtime.driver, weakref.ref(both.model)
    del both
    gc.collect()
    assert model() is None
    assert driver.registered == 0


def test_parameters_outside_of_forward_are_whole_tensors(trained: Trained) -> None:
    trained.steps(2)
    assert torch.equal(trained.model.head.weight @ torch.ones(32), trained.plain.head.weight @ torch.ones(32))
    assert trained.model.blocks[2].up.weight.norm() == trained.plain.blocks[2].up.weight.norm()


def test_a_penalty_on_weights_outside_of_forward(trained: Trained) -> None:
    for number in range(3):
        for model, optimizer in (
            (trained.plain, trained.plain_optimizer),
            (trained.model, trained.optimizer),
        ):
            loss = next_token_loss(model, number)
            penalty = sum((p @ p.t()).sum() for p in model.parameters() if p.dim() > 1)
            (loss + 1e-4 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert trained.same()


def test_state_dict_is_plain_and_small(trained: Trained) -> None:
    trained.steps(2)
    state = trained.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in trained.plain.state_dict().items())
    buffer = io.BytesIO()
    torch.save({"weight": state["blocks.1.up.weight"]}, buffer)
    assert buffer.tell() < 3 * state["blocks.1.up.weight"].nbytes
    buffer.seek(0)
    assert torch.equal(torch.load(buffer)["weight"], trained.plain.blocks[1].up.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_loaded_later_reach_device_and_master(dtype: torch.dtype) -> None:
    both = Trained(dtype, share=0.6)
    next_token_loss(both.model, 0).backward()  # layers are resident now
    both.optimizer.zero_grad()
    torch.manual_seed(5)
    other = Decoder().to(dtype).state_dict()
    both.model.load_state_dict(other)
    masters = both.runtime.master_parameters()
    for name, value in other.items():
        assert torch.equal(both.model.state_dict()[name], value)
        assert torch.equal(masters[name], value.float())
    fresh = Decoder().to(dtype)
    fresh.load_state_dict(other)
    assert torch.equal(both.model(tokens(0)[:, :-1]), fresh(tokens(0)[:, :-1]))
    both.model.blocks[0].load_state_dict(fresh.blocks[1].state_dict())
    assert torch.equal(both.model.blocks[0].up.weight, fresh.blocks[1].up.weight)
    both.runtime.close()


def test_loading_with_assign_is_refused(trained: Trained) -> None:
    with pytest.raises(UnsupportedError, match="assign"):
        trained.model.load_state_dict(trained.plain.state_dict(), assign=True)
    trained.steps(1)
    assert trained.same()


def test_optimizer_state_goes_to_plain_pytorch_and_back(trained: Trained) -> None:
    trained.steps(3)
    state = copy.deepcopy(trained.optimizer.state_dict())
    expected = trained.plain_optimizer.state_dict()
    for key, value in expected["state"].items():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state["state"][key][name], value[name])
    fresh = torch.optim.AdamW(trained.plain.parameters(), lr=1e-2, fused=True)
    fresh.load_state_dict(state)
    for group in fresh.param_groups:
        group["fused"] = True
    trained.plain_optimizer = fresh
    trained.steps(2, first=3)
    assert trained.same()
    later = copy.deepcopy(trained.plain_optimizer.state_dict())
    trained.optimizer.load_state_dict(later)
    trained.steps(2, first=5)
    assert trained.same()


def test_moments_of_half_precision_weights_stay_fp32_through_a_load() -> None:
    both = Trained(torch.bfloat16, share=0.6)
    next_token_loss(both.model, 0).backward()
    both.optimizer.step()
    before = copy.deepcopy(both.optimizer.state_dict())
    both.optimizer.load_state_dict(before)
    after = both.optimizer.state_dict()
    for key, value in before["state"].items():
        assert after["state"][key]["exp_avg"].dtype == torch.float32
        assert torch.equal(after["state"][key]["exp_avg"], value["exp_avg"])
    both.runtime.close()


def test_a_state_dict_of_another_model_changes_nothing(trained: Trained) -> None:
    trained.steps(2)
    other = Decoder(width=16)
    optimizer = torch.optim.AdamW(other.parameters())
    next_token_loss(other, 0).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="nothing was changed"):
        trained.optimizer.load_state_dict(optimizer.state_dict())
    small = torch.optim.AdamW(list(other.parameters())[:2])
    with pytest.raises(ValueError, match="groups"):
        trained.optimizer.load_state_dict(small.state_dict())
    trained.steps(1, first=2)
    assert trained.same()


def test_state_that_the_optimizer_has_already_is_taken_over() -> None:
    torch.manual_seed(0)
    plain = Decoder()
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (plain, model)]
    for number in range(5):
        if number == 2:
            memferry_rt.offload(model, optimizers[1], device="emulated", device_memory="120KiB")
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            next_token_loss(m, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    memferry_rt.restore(model)


@pytest.mark.parametrize("share", [0.6, 8.0], ids=["cpu", "resident"])
def test_a_gradient_kept_over_restore_is_an_ordinary_tensor(share: float) -> None:
    both = Trained(share=share)
    both.steps(2)
    for model in (both.plain, both.model):
        next_token_loss(model, 2).backward()
    kept = [parameter.grad for parameter in both.model.parameters()]
    memferry_rt.restore(both.model)
    for gradient, mine, plain in zip(kept, both.model.parameters(), both.plain.parameters(), strict=True):
        assert torch.equal(gradient, plain.grad)
        assert mine.grad is gradient
