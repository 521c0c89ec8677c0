"""What users do to models: it is right, or it is refused with a reason."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import memferry_rt
from memferry_allocator import InvalidRequestError, OutOfMemory
from memferry_rt import OffloadError, UnsupportedError

from .models import SEQUENCE, VOCABULARY, Decoder, next_token_loss, tokens


class Trained:
    """An offloaded model beside a plain one that gets the same treatment."""

    def __init__(self, dtype: torch.dtype = torch.float32, share: float = 0.4, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain = Decoder().to(dtype)
        self.model = copy.deepcopy(self.plain)
        self.plain_optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-2, fused=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        memferry_rt.offload(
            self.model, self.optimizer, device="emulated", device_memory=int(weights * share), **options
        )
        self.runtime = memferry_rt.runtime_of(self.model)

    def steps(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            for model, optimizer in ((self.plain, self.plain_optimizer), (self.model, self.optimizer)):
                next_token_loss(model, number).backward()
                optimizer.step()
                optimizer.zero_grad()

    def same(self) -> bool:
        if "_memferry_runtime" in self.model.__dict__:
            memferry_rt.synchronize(self.model)
        pairs = zip(self.plain.parameters(), self.model.parameters(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture
def trained() -> Iterator[Trained]:
    both = Trained()
    yield both
    both.runtime.close()


# -- the objects stay what they were ------------------------------------------------------------------------
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


# -- saving and loading ---------------------------------------------------------------------------------------
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


# -- writing to weights and gradients ---------------------------------------------------------------------------
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


# -- refused --------------------------------------------------------------------------------------------------
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
    with pytest.raises(UnsupportedError, match="create_graph"), pytest.warns(UserWarning, match="create_graph"):
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
        torch.optim.SGD(parameters, lr=0.1),
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


# -- working with the rest of PyTorch -----------------------------------------------------------------------------
def test_saved_tensor_hooks_of_the_user_go_on_seeing_the_rest(trained: Trained) -> None:
    packed = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packed
        packed += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = next_token_loss(trained.model, 0)
    assert packed > 10
    loss.backward()
    trained.optimizer.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        next_token_loss(trained.model, 0).backward()
    next_token_loss(trained.plain, 0).backward()
    for one, other in zip(trained.plain.parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own
@pytest.mark.parametrize("after", [False, True])
def test_compiled_blocks(after: bool) -> None:
    torch.manual_seed(0)
    plain = Decoder()
    model = copy.deepcopy(plain)
    if not after:
        for block in model.blocks:
            block.compile(backend="eager")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (plain, model)]
    memferry_rt.offload(model, optimizers[1], device="emulated", device_memory="120KiB")
    if after:
        for block in model.blocks:
            block.compile(backend="eager")
    for number in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            next_token_loss(m, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    memferry_rt.restore(model)
    torch._dynamo.reset()


def test_a_compiled_model_is_refused() -> None:
    model = torch.compile(Decoder(), backend="eager")
    with pytest.raises(UnsupportedError, match="compile"):
        memferry_rt.offload(model, torch.optim.AdamW(model.parameters()), device="emulated", device_memory="1MiB")


def test_schedulers_built_before_and_after() -> None:
    for before in (True, False):
        both = Trained.__new__(Trained)
        torch.manual_seed(0)
        both.plain = Decoder()
        both.model = copy.deepcopy(both.plain)
        both.plain_optimizer = torch.optim.AdamW(both.plain.parameters(), lr=1e-2, fused=True)
        both.optimizer = torch.optim.AdamW(both.model.parameters(), lr=1e-2)
        schedulers = [torch.optim.lr_scheduler.StepLR(both.plain_optimizer, 1, 0.5)]
        if before:
            schedulers.append(torch.optim.lr_scheduler.StepLR(both.optimizer, 1, 0.5))
        memferry_rt.offload(both.model, both.optimizer, device="emulated", device_memory="120KiB")
        if not before:
            schedulers.append(torch.optim.lr_scheduler.StepLR(both.optimizer, 1, 0.5))
        for number in range(4):
            both.steps(1, first=number)
            for scheduler in schedulers:
                scheduler.step()
        assert both.optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**4
        assert both.same()
        memferry_rt.restore(both.model)


def test_step_hooks_and_closures(trained: Trained) -> None:
    calls = []
    trained.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    trained.optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> torch.Tensor:
        trained.optimizer.zero_grad()
        loss = next_token_loss(trained.model, 0)
        loss.backward()
        return loss

    loss = trained.optimizer.step(closure)
    assert loss.item() == next_token_loss(trained.plain, 0).item()
    assert calls == ["pre", "post"]


def test_settings_changed_between_backward_and_step_take_effect(trained: Trained) -> None:
    for model, optimizer in ((trained.plain, trained.plain_optimizer), (trained.model, trained.optimizer)):
        next_token_loss(model, 0).backward()
        for group in optimizer.param_groups:
            group.update(lr=0.05, betas=(0.5, 0.7), weight_decay=0.3, eps=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    assert trained.same()


def test_what_the_last_step_found_is_on_the_optimizer(trained: Trained) -> None:
    trained.steps(1)
    assert trained.optimizer.grad_norm == trained.runtime.grad_norm > 0
    next_token_loss(trained.model, 0).mul(float("nan")).backward()
    trained.optimizer.step()
    assert trained.optimizer.skipped_steps == 1


def test_grad_scaler_without_amp_support_unscales_what_is_at_home() -> None:
    both = Trained(share=0.6)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(3):
        for model, optimizer, scale in (
            (both.plain, both.plain_optimizer, plain_scaler),
            (both.model, both.optimizer, scaler),
        ):
            optimizer._step_supports_amp_scaling = False
            scale.scale(next_token_loss(model, number)).backward()
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
    assert both.same()
    both.runtime.close()


@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scaler_and_clipping(unscale_first: bool) -> None:
    """The norm is that of the unscaled gradients, whoever unscales them; a step that overflowed is skipped."""
    norms = []
    models = []
    for scale in (None, 1024.0):
        both = Trained(share=0.6, max_grad_norm=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for number in range(4):
            loss = next_token_loss(both.model, number)
            if number == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if unscale_first:
                scaler.unscale_(both.optimizer)
            scaler.step(both.optimizer)
            scaler.update()
            both.optimizer.zero_grad()
            norms.append(both.runtime.grad_norm)
        assert both.runtime.skipped_steps == 1
        memferry_rt.restore(both.model)
        models.append(both.model)
        if scale:
            assert scaler.get_scale() == scale / 2
    assert norms[:2] == norms[4:6]
    assert 0.5 < norms[0] < 100
    assert norms[3] == norms[7]
    assert all(torch.equal(one, other) for one, other in zip(*(m.parameters() for m in models), strict=True))


def test_autocast(trained: Trained) -> None:
    for number in range(2):
        for model, optimizer in (
            (trained.plain, trained.plain_optimizer),
            (trained.model, trained.optimizer),
        ):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = next_token_loss(model, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert trained.same()


def test_models_on_the_meta_device_keep_their_parameters_identity() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.manual_seed(3)
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="32KiB")
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), parameters, strict=True))
    fused = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for number in range(3):
        x = torch.randn(2, 24, generator=torch.Generator().manual_seed(number))
        for m, o in ((plain, fused), (model, optimizer)):
            m(x).square().sum().backward()
            o.step()
            o.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), parameters, strict=True))
    memferry_rt.restore(model)


def test_a_meta_model_without_an_initialiser_is_refused_and_one_with_it_is_not() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = Decoder()
            model.position = nn.Parameter(torch.empty(SEQUENCE, 32))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    with pytest.raises(UnsupportedError, match="param_init_fn"):
        memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB")
    assert all(p.is_meta for p in model.parameters())

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB", param_init_fn=init)
    assert torch.equal(model.position, torch.full((SEQUENCE, 32), 0.5))
    assert model(tokens(0)[:, :-1]).shape == (3, SEQUENCE, VOCABULARY)
    memferry_rt.restore(model)


def test_compute_dtype_keeps_the_fp32_values_as_masters() -> None:
    torch.manual_seed(0)
    model = Decoder()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB", compute_dtype=torch.bfloat16)
    runtime = memferry_rt.runtime_of(model)
    masters = runtime.master_parameters()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(masters[name], values[name])
        assert torch.equal(parameter, values[name].bfloat16())
    per_parameter = runtime.report().host_nbytes / runtime.report().parameters
    assert 16 <= per_parameter < 17
    F.cross_entropy(model(tokens(0)[:, :-1]).float().flatten(0, 1), tokens(0)[:, 1:].flatten()).backward()
    optimizer.step()
    memferry_rt.restore(model)


# -- two offloaded models -----------------------------------------------------------------------------------
def test_one_offloaded_model_inside_the_forward_of_another() -> None:
    """Saved-tensor hooks nest: each model brings back its own weights, whoever's hooks lie on top."""

    class Wrapping(nn.Linear):
        """A layer of one model that runs the other one while its own weights are in use."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__(VOCABULARY, 48)
            self.borrowed = [inner]  # called, not owned

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(self.borrowed[0](ids))

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first = Wrapping(inner)
            self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
            self.last = nn.Linear(48, VOCABULARY)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.first(ids)
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.last(x) + self.first.borrowed[0](ids)

    def models() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        inner = Decoder()
        return inner, Outer(inner)

    results = []
    for offload in (False, True):
        inner, outer = models()
        pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)) for m in (inner, outer)]
        if offload:
            for model, optimizer in pairs:
                weights = sum(p.numel() * 4 for p in model.parameters())
                memferry_rt.offload(model, optimizer, device="emulated", device_memory=int(weights * 0.6))
        for number in range(4):
            next_token_loss(outer, number).backward()
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
        if offload:
            memferry_rt.restore(inner)
            memferry_rt.restore(outer)
        results.append([p.detach().clone() for model, _ in pairs for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
