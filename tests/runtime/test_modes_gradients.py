"""Gradients in place, and everything else that looks at gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn
from torch.utils.checkpoint import checkpoint

import memferry_rt
from memferry_allocator import EmulatedOptions
from memferry_rt.adapters.torch import norm

from .harness import Job, assert_same, offloaded, plain
from .models import VOCABULARY, Decoder, checkpointed, next_token_loss, plainly, tokens, twice

INPLACE = {"embedding": "dha+inplace", "blocks.*": "dha+inplace"}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix has several pieces."""
    monkeypatch.setattr(norm, "PIECE", 512)
    monkeypatch.setattr(norm, "ROWS", 4)


def both(act: Callable[[nn.Module], Any], *, plan: Any = None) -> tuple[Any, Any]:
    """What `act` gives for a plain model, and for the same with its gradients in place."""
    torch.manual_seed(0)
    model = Decoder(layers=2)
    expected = act(model)
    torch.manual_seed(0)
    model = Decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.offload(
        model,
        optimizer,
        device="emulated",
        device_memory="200KiB",
        emulated=EmulatedOptions(seed=4),
        plan=plan or INPLACE,
    )
    try:
        return expected, act(model)
    finally:
        memferry_rt.restore(model)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return len(one) == len(other) and all(map(equal, one, other))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_autograd_grad_of_a_weight() -> None:
    def act(model: Any) -> Any:
        weights = [model.embedding.weight, model.blocks[0].up.weight]
        found = torch.autograd.grad(next_token_loss(model, 0), weights)
        assert all(weight.grad is None for weight in weights)
        return [gradient.clone() for gradient in found]

    assert equal(*both(act))


def test_autograd_grad_of_an_activation_leaves_weights_alone() -> None:
    def act(model: Any) -> Any:
        x = torch.ones(2, 3, 32, requires_grad=True)
        (found,) = torch.autograd.grad(model.blocks[0](x).square().sum(), x)
        assert model.blocks[0].up.weight.grad is None
        return found

    assert equal(*both(act))


def test_backward_for_some_inputs_alone() -> None:
    def act(model: Any) -> Any:
        next_token_loss(model, 0).backward(inputs=[model.blocks[1].up.weight])
        assert model.embedding.weight.grad is None
        return gradients(model)

    assert equal(*both(act))


def test_retained_graph() -> None:
    def act(model: Any) -> Any:
        loss = next_token_loss(model, 0)
        loss.backward(retain_graph=True)
        first = gradients(model)
        loss.backward()
        return [*first, *gradients(model)]

    assert equal(*both(act))


def test_gradient_of_a_gradient_of_an_activation() -> None:
    def act(model: Any) -> Any:
        x = torch.linspace(-1, 1, 2 * 3 * 32).view(2, 3, 32).requires_grad_()
        (found,) = torch.autograd.grad(model.blocks[0].up(x).square().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad(found.square().sum(), x)
        return [found.detach(), again]

    one, other = both(act)
    assert equal(one, other)


def test_hooks_on_a_parameter_see_its_gradient() -> None:
    def act(model: Any) -> Any:
        seen = []
        weight, other = model.blocks[0].up.weight, model.blocks[1].down.weight
        handles = [
            weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient),
            other.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
            model.embedding.weight.register_hook(lambda gradient: seen.append(gradient.clone())),
        ]
        next_token_loss(model, 0).backward()
        for handle in handles:
            handle.remove()
        return [*seen, *gradients(model)]

    assert equal(*both(act))


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_weights_that_several_use(micro_steps: int) -> None:
    """By a module called twice, and by a module and somebody else."""

    def act(model: Any) -> Any:
        for micro in range(micro_steps):
            twice_used = model.blocks[0].up(torch.ones(2, 32)) + model.blocks[0].up(torch.full((2, 32), 0.3))
            other = F.linear(torch.full((4, 32), 0.7 + micro), model.blocks[1].up.weight)
            (next_token_loss(model, micro) + twice_used.square().sum() + other.sum()).backward()
        return gradients(model)

    assert equal(*both(act))


@pytest.mark.parametrize("mode", ["stream+inplace", "dha+inplace", "ring+inplace"])
@pytest.mark.parametrize("around", [False, True])
def test_gradients_that_arrive_twice_in_one_backward(mode: str, around: bool) -> None:
    """As of a block that a re-entrant checkpoint runs, and the model itself once more."""
    run = _around_a_checkpoint if around else _twice_checkpointed
    job = Job(lambda: Decoder(run, layers=2), next_token_loss, steps=3, lr=1e-3)
    for share in (1.7, 20.0):
        assert_same(plain(job), offloaded(job, share=share, plan={"blocks.*": mode}, spare_slabs=3))


def _twice_checkpointed(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(checkpoint(block, x, use_reentrant=True))
    return x


def _around_a_checkpoint(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """A backward within a backward, while the outer one has half of a gradient."""
    for block in blocks:
        x = block(checkpoint(block, block(x), use_reentrant=True))
    return x


@pytest.mark.parametrize("odd", ["column by column", "a vector"])
def test_calls_that_an_operator_cannot_join_are_added_in_their_turn(odd: str) -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64, bias=False)
            self.norm = nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.linear(x))
            x = self.linear(x.t()) if odd == "column by column" else x + self.linear(x[0])
            return self.linear(self.norm(x))

    def after(plan: str | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = Thrice()
        if plan is not None:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            memferry_rt.offload(model, optimizer, device="emulated", device_memory="200KiB", plan=plan)
        model(torch.randn(64, 64)).square().sum().backward()
        assert model.linear.weight.grad is not None
        found = model.linear.weight.grad.clone()
        if plan is not None:
            memferry_rt.restore(model)
        return found

    assert torch.equal(after("linear=inplace"), after(None))


def test_kept_gradients_keep_their_values() -> None:
    def act(model: Any) -> Any:
        next_token_loss(model, 0).backward()
        kept = [p.grad for p in model.parameters()]
        values = [gradient.clone() for gradient in kept]
        model.zero_grad()
        next_token_loss(model, 1).backward()
        assert all(map(torch.equal, kept, values))
        return [*values, *gradients(model)]

    assert equal(*both(act))


def test_gradients_of_the_user_are_added_to() -> None:
    def act(model: Any) -> Any:
        model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
        model.blocks[0].up.weight.grad = torch.full_like(model.blocks[0].up.weight, 0.1)
        next_token_loss(model, 0).backward()
        model.blocks[0].up.weight.grad.mul_(0.5)
        model.embedding.weight.grad.add_(0.25)  # rows that nobody named, too
        next_token_loss(model, 1).backward()
        return gradients(model)

    assert equal(*both(act))


def test_rows_that_the_user_wrote_do_not_stay() -> None:
    def act(model: Any) -> Any:
        for number in range(3):
            next_token_loss(model, number).backward()
            model.embedding.weight.grad.add_(0.25)
            model.zero_grad()
        next_token_loss(model, 3).backward()
        return gradients(model)

    assert equal(*both(act))


def test_backward_that_failed_leaves_nothing_behind() -> None:
    def act(model: Any) -> Any:
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("here")

        x = model.embedding(tokens(0))
        with pytest.raises(RuntimeError, match="here"):
            model.blocks[0](Fails.apply(x)).sum().backward()
        model.zero_grad()
        next_token_loss(model, 1).backward()
        return gradients(model)

    assert equal(*both(act))


def test_embedding_with_padding_and_frequencies() -> None:
    for how in ({"padding_idx": 3}, {"padding_idx": -1}, {"scale_grad_by_freq": True}):
        results = []
        for offload in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(20, 16, **how), nn.Linear(16, 4))
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            if offload:
                plan = {"0": "dha+inplace"}
                memferry_rt.offload(model, optimizer, device="emulated", device_memory="9KiB", plan=plan)
            for ids in ([1, 3, 3, 19, 1], [19, 19, 0], []):
                model(torch.tensor(ids, dtype=torch.long)).square().sum().backward()
            results.append(gradients(model))
            if offload:
                memferry_rt.restore(model)
        assert equal(*results)


@pytest.mark.parametrize("plan", [INPLACE, {"blocks.*": "ring"}, {"blocks.*": "ring+inplace"}])
def test_frozen_weights(plan: dict[str, str]) -> None:
    def build() -> nn.Module:
        model = Decoder(layers=2)
        model.embedding.weight.requires_grad_(False)
        model.blocks[0].up.weight.requires_grad_(False)
        return model

    job = Job(build, next_token_loss, steps=3)
    assert_same(plain(job), offloaded(job, share=3.0, plan=plan))


def test_weights_that_lie_column_by_column() -> None:
    def build() -> nn.Module:
        model = Decoder(layers=2)
        for block in model.blocks:
            block.up.weight = nn.Parameter(block.up.weight.detach().t().contiguous().t())
        return model

    job = Job(build, next_token_loss, steps=3)
    streamed = offloaded(job, share=3.0)
    for mode in ("ring+inplace", "dha+inplace", "dha_then_load"):
        assert_same(streamed, offloaded(job, share=3.0, plan={"blocks.*": mode}))


@pytest.mark.parametrize("kind", ["linear", "embedding", "tied"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.usefixtures("small_pieces")
def test_norm_by_pieces_is_that_of_the_whole_gradient(kind: str, accumulate: int) -> None:
    """Whoever makes the gradient, and wherever."""
    plans = {"linear": {"blocks.*": "dha+inplace"}, "embedding": {"embedding": "dha+inplace"}, "tied": INPLACE}
    job = Job(
        lambda: Decoder(layers=2, tied=kind == "tied"), next_token_loss, steps=3, accumulate=accumulate, lr=1e-3
    )
    streamed = offloaded(job, share=3.0, accumulate=accumulate)
    in_place = offloaded(job, share=3.0, accumulate=accumulate, plan=plans[kind])
    assert_same(streamed, in_place)


@pytest.mark.usefixtures("small_pieces")
def test_norm_by_pieces_follows_its_definition() -> None:
    gradient = torch.randn(VOCABULARY, 32)
    step = norm.piece_rows(VOCABULARY, 32)
    assert step == 16
    expected = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in gradient.split(step)]
    assert torch.equal(norm.norm_of(gradient), torch.stack(expected))


@pytest.mark.parametrize("run", [plainly, twice, checkpointed(True), checkpointed(False)])
@pytest.mark.parametrize("options", [{"accumulate_dtype": "float32"}, {"spare_slabs": 5}, {"async_step": True}])
def test_in_place_in_half_precision(run: Any, options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "accumulate_dtype" not in options else torch.float32
    job = Job(lambda: Decoder(run, layers=2), next_token_loss, steps=3, accumulate=2, dtype=dtype, lr=1e-3)
    assert_same(plain(job), offloaded(job, share=3.0, accumulate=2, plan=INPLACE, **options))


def test_a_gradient_that_wants_a_gradient_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="200KiB", plan="*=inplace")
    with pytest.raises(memferry_rt.UnsupportedError, match="create_graph=True"):
        model(tokens(0)).pow(3).sum().backward(create_graph=True)
    memferry_rt.restore(model)


def test_autocast_in_place() -> None:
    def act(model: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token_loss(model, 0)
        loss.backward()
        return gradients(model)

    assert equal(*both(act))


@pytest.mark.parametrize("mode", ["dha", "dha_then_load", "ring", "resident"])
@pytest.mark.parametrize("gradient", ["buffer", "inplace"])
def test_backward_after_a_step_fails_as_in_pytorch(mode: str, gradient: str) -> None:
    torch.manual_seed(0)
    model = Decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.offload(
        model, optimizer, device="emulated", device_memory="300KiB", plan={"blocks.*": f"{mode}+{gradient}"}
    )
    loss, late = next_token_loss(model, 0), next_token_loss(model, 1)
    loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    memferry_rt.restore(model)


def test_restored_modules_have_their_own_forward() -> None:
    torch.manual_seed(0)
    model = Decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="300KiB", plan=INPLACE)
    assert "forward" in model.blocks[0].up.__dict__
    memferry_rt.set_plan(model, {})
    assert "forward" not in model.blocks[0].up.__dict__
    memferry_rt.set_plan(model, "blocks.*=ring")
    memferry_rt.restore(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    next_token_loss(model, 0).backward()


def test_forward_of_somebody_else_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    theirs = model[0].forward = lambda x: 2 * nn.Linear.forward(model[0], x)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    options: Any = {"device": "emulated", "device_memory": "9KiB"}
    with pytest.raises(memferry_rt.UnsupportedError, match=r"'0' cannot do 'ring'.*can do .*dha"):
        memferry_rt.offload(model, optimizer, plan={"0": "ring"}, **options)
    expected = model(torch.ones(2, 8))
    expected.sum().backward()
    gradient = model[0].weight.grad
    memferry_rt.offload(model, optimizer, plan={"*": "dha+inplace"}, **options)
    model(torch.ones(2, 8)).sum().backward()
    assert torch.equal(gradient, model[0].weight.grad)
    memferry_rt.restore(model)
    assert model[0].forward is theirs


def test_rows_written_in_another_mode_do_not_stay() -> None:
    def act(model: Any) -> Any:
        for ids, mode in (([1, 2], "inplace"), ([3, 4], "buffer"), ([5], "inplace")):
            if hasattr(model, "_memferry_runtime"):
                memferry_rt.set_plan(model, {"embedding": f"dha+{mode}"})
            model.zero_grad()
            model.embedding(torch.tensor(ids)).square().sum().backward()
        return gradients(model)

    assert equal(*both(act))


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own
@pytest.mark.parametrize("plan", ["blocks.*=ring+inplace", "blocks.*=dha_then_load+inplace", "blocks.*=dha"])
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_compiled_blocks_and_forwards_without_gradients(plan: str, without: Any) -> None:
    def act(model: Any) -> Any:
        for block in model.blocks:
            block.compile(backend="eager")
        with without():
            first = model(tokens(5)[:, :-1]).clone()
        next_token_loss(model, 0).backward()
        with without():
            second = model(tokens(6)[:, :-1]).clone()
        return [first, second, *gradients(model)]

    assert equal(*both(act, plan=plan))


@pytest.mark.parametrize("plan", ["*=stream", "0=dha+inplace, 1=ring+inplace"])
@pytest.mark.parametrize("changed", ["ids", "activation"])
def test_what_backward_needs_must_not_be_changed_in_place(plan: str, changed: str) -> None:
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="200KiB", plan=plan)
    ids = tokens(0)
    x = model[0](ids)
    loss = model[1](x).square().sum()
    (ids if changed == "ids" else x.detach()).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    memferry_rt.restore(model)
