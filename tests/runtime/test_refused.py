"""What cannot be honoured is refused with a reason, and changes nothing."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import memferry_rt
from memferry_allocator import InvalidRequestError
from memferry_rt import OffloadError, UnsupportedError

from .models import Decoder, next_token_loss, tokens
from .trained import Trained


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.blocks[0].half(),
        lambda model: model.to("meta"),
        lambda model: model.share_memory(),
        copy.deepcopy,
        lambda model: copy.deepcopy(model.blocks[0]),
        pickle.dumps,
        lambda model: torch.save(model, io.BytesIO()),
        lambda model: model.compile(),
    ],
)
def test_what_would_tear_the_model_apart_is_refused(trained: Trained, convert: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"restore|assign"):
        convert(trained.model)
    trained.steps(2)
    assert trained.same()


def test_a_move_to_where_it_is_already_is_allowed(trained: Trained) -> None:
    assert trained.model.to("cpu") is trained.model
    assert trained.model.float() is trained.model
    trained.steps(1)
    assert trained.same()


def test_create_graph_is_refused(trained: Trained) -> None:
    with warnings.catch_warnings():
        # torch warns of it once a process, so whether it does here depends on the tests before this one.
        warnings.filterwarnings("ignore", message=".*create_graph", category=UserWarning)
        with pytest.raises(UnsupportedError, match="create_graph"):
            next_token_loss(trained.model, 0).backward(create_graph=True)
    trained.optimizer.zero_grad()
    trained.steps(1)
    assert trained.same()


def test_functional_transforms(trained: Trained) -> None:
    weights = {name: p.detach() for name, p in trained.model.named_parameters()}
    with torch.no_grad():
        out = torch.func.functional_call(trained.model, weights, (tokens(0)[:, :-1],))
    assert torch.equal(out, trained.plain(tokens(0)[:, :-1]))

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(trained.model, weights, (tokens(0)[:, :-1],)).sum()

    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(loss)(weights)
    trained.steps(1)
    assert trained.same()


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    memferry_rt.offload(model, torch.optim.AdamW(model.parameters()), device="emulated", device_memory="1MiB")
    with pytest.raises(UnsupportedError, match="sparse"):
        model(torch.tensor([1, 2])).sum().backward()
    memferry_rt.restore(model)


def test_optimizers_that_cannot_be_honoured_are_refused_before_anything_changes() -> None:
    model = Decoder()
    before = [p.data_ptr() for p in model.parameters()]
    parameters = list(model.parameters())
    for optimizer in (
        torch.optim.AdamW(parameters, amsgrad=True),
        torch.optim.AdamW(parameters, differentiable=True),
        torch.optim.AdamW([*parameters, nn.Parameter(torch.ones(2))]),
    ):
        with pytest.raises(UnsupportedError):
            memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB")
    assert before == [p.data_ptr() for p in model.parameters()]
    assert not model._forward_pre_hooks


def test_offloading_twice_and_using_what_is_not_offloaded() -> None:
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OffloadError, match="not offloaded"):
        memferry_rt.restore(model)
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB")
    with pytest.raises(OffloadError, match="already"):
        memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB")
    with pytest.raises(UnsupportedError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    memferry_rt.restore(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_a_parameter_unfrozen_after_offload_is_refused() -> None:
    model = Decoder()
    model.head.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB")
    model.head.requires_grad_(True)
    next_token_loss(model, 0).backward()
    with pytest.raises(UnsupportedError, match="frozen"):
        optimizer.step()
    memferry_rt.restore(model)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), float("inf")])
def test_a_norm_that_makes_no_sense(norm: float) -> None:
    model = Decoder()
    with pytest.raises(InvalidRequestError, match="max_grad_norm"):
        memferry_rt.offload(
            model,
            torch.optim.AdamW(model.parameters()),
            device="emulated",
            device_memory="1MiB",
            max_grad_norm=norm,
        )


def test_a_torch_that_does_not_tell_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    model = Decoder()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(UnsupportedError, match=r"install torch 2\.8 or newer"):
        memferry_rt.offload(model, torch.optim.AdamW(model.parameters()), device="emulated", device_memory="1MiB")
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
