"""Whatever the model does and however it is run: losses and parameters are plain PyTorch's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .harness import Job, assert_same, offloaded, plain
from .models import (
    Decoder,
    checkpointed,
    checkpointed_in_groups,
    next_token_loss,
    plainly,
    shuffled,
    skipping,
    tokens,
    twice,
)

RUNS = {
    "plain": plainly,
    "checkpoint": checkpointed(False),
    "reentrant": checkpointed(True),
    "groups": checkpointed_in_groups(False),
    "groups-reentrant": checkpointed_in_groups(True),
    "skipping": skipping,
    "twice": twice,
    "shuffled": shuffled,
}


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("run", RUNS)
def test_ways_of_running_the_blocks(run: str, accumulate: int) -> None:
    steps = 20 if (run, accumulate) == ("plain", 1) else 6
    job = Job(lambda: Decoder(RUNS[run]), next_token_loss, accumulate=accumulate, steps=steps)
    assert_same(plain(job), offloaded(job, seed=accumulate))


def test_torch_may_compute_with_several_threads() -> None:
    job = Job(Decoder, next_token_loss, steps=3)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same(plain(job), offloaded(job))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("run", ["plain", "checkpoint", "groups-reentrant"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_tied_weights_and_dropout(run: str, tied: bool, dropout: float) -> None:
    job = Job(lambda: Decoder(RUNS[run], tied=tied, dropout=dropout), next_token_loss)
    assert_same(plain(job), offloaded(job, async_step=tied))


@pytest.mark.parametrize("seed", range(20))
def test_seeds_of_the_emulated_device(seed: int) -> None:
    """Queued work runs in every order that the program allows, and the result is always the same."""
    job = Job(lambda: Decoder(dropout=0.1), next_token_loss, accumulate=1 + seed % 2)
    assert_same(plain(job), offloaded(job, seed=seed, async_step=seed % 4 > 1))


@pytest.mark.parametrize("share", [0.32, 0.4, 0.6, 1.0, 1.6])
@pytest.mark.parametrize("run", ["plain", "checkpoint"])
def test_budgets(share: float, run: str) -> None:
    job = Job(lambda: Decoder(RUNS[run]), next_token_loss, steps=8)
    assert_same(plain(job), offloaded(job, share=share))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("options", [{"share": 0.5}, {"share": 1.6, "optimizer_split": 0.7, "async_step": True}])
def test_half_precision_with_fp32_masters(options: dict[str, Any], dtype: torch.dtype, accumulate: int) -> None:
    job = Job(lambda: Decoder(layers=4), next_token_loss, dtype=dtype, accumulate=accumulate, steps=6, lr=1e-3)
    assert_same(plain(job), offloaded(job, **options))


def test_frozen_parameters() -> None:
    """Frozen layers, and layers that are partly frozen, as with adapters."""

    def build() -> nn.Module:
        model = Decoder()
        model.embedding.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        for block in model.blocks:
            block.up.requires_grad_(False)
        return model

    job = Job(build, next_token_loss)
    assert_same(plain(job), offloaded(job))


def test_parameters_outside_of_the_optimizer() -> None:
    job = Job(Decoder, next_token_loss, groups=lambda model: list(model.blocks.parameters()))
    assert_same(plain(job), offloaded(job))


def test_evaluation_between_steps() -> None:
    def between(model: nn.Module, number: int) -> None:
        model.eval()
        with torch.no_grad():
            seen.append(model(tokens(500 + number)[:, :-1]).sum().item())
        with torch.inference_mode():
            seen.append(model(tokens(600 + number)[:, :-1]).sum().item())
        model.train()

    seen: list[float] = []
    job = Job(lambda: Decoder(dropout=0.1), next_token_loss, between=between)
    expected = plain(job)
    mine, seen = seen, []
    assert_same(expected, offloaded(job))
    assert mine == seen


def test_evaluation_between_backward_and_step() -> None:
    def before_step(model: nn.Module, number: int) -> None:
        with torch.no_grad():
            model(tokens(700 + number)[:, :-1])

    job = Job(Decoder, next_token_loss, before_step=before_step, accumulate=2)
    assert_same(plain(job), offloaded(job))


class Failing(Decoder):
    """Fails in the middle of a forward when told to."""

    fail = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        for number, block in enumerate(self.blocks):
            if self.fail and number == 3:
                raise KeyError("in the middle of a forward")
            x = block(x)
        return self.head(self.norm(x))


def test_an_exception_in_the_middle_of_a_forward() -> None:
    def between(model: nn.Module, number: int) -> None:
        model.fail = True
        with pytest.raises(KeyError):
            model(tokens(number)[:, :-1])
        model.fail = False

    job = Job(Failing, next_token_loss, between=between)
    assert_same(plain(job), offloaded(job))


class Interrupted(Decoder):
    fail = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class InterruptedBlock(nn.Module):
    """Raises what no forward hook sees."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(32))
        self.interrupt = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.interrupt:
            raise KeyboardInterrupt
        return self.inner(x) * self.scale


def test_a_keyboard_interrupt_in_the_middle_of_a_forward() -> None:
    def build() -> nn.Module:
        model = Decoder()
        model.blocks[3] = InterruptedBlock(model.blocks[3])
        return model

    def between(model: nn.Module, number: int) -> None:
        model.blocks[3].interrupt = True
        with pytest.raises(KeyboardInterrupt):
            model(tokens(number)[:, :-1])
        model.blocks[3].interrupt = False

    job = Job(build, next_token_loss, between=between, steps=6)
    assert_same(plain(job), offloaded(job))


def test_groups_and_schedules() -> None:
    def groups(model: nn.Module) -> list[dict]:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        other = [p for p in model.parameters() if p.dim() <= 1]
        return [{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0, "lr": 3e-3}]

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 3e-3], total_steps=30)

    job = Job(Decoder, next_token_loss, groups=groups, schedule=schedule, settings={"betas": (0.8, 0.95)})
    assert_same(plain(job), offloaded(job))


@pytest.mark.parametrize("settings", [{"weight_decay": 0.05}, {"maximize": True}, {"eps": 1e-3}])
def test_adam_and_its_settings(settings: dict) -> None:
    job = Job(Decoder, next_token_loss, optimizer=torch.optim.Adam, settings=settings, steps=6)
    assert_same(plain(job), offloaded(job))


@pytest.mark.parametrize("max_grad_norm", [None, 1e-3, 1e3])
def test_clipping(max_grad_norm: float | None) -> None:
    job = Job(Decoder, next_token_loss, max_grad_norm=max_grad_norm)
    assert_same(plain(job), offloaded(job))


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        factor = {3: float("inf"), 5: float("nan")}.get(number, 1.0)
        return next_token_loss(model, number) * factor

    job = Job(Decoder, loss, steps=8)
    expected, got = plain(job), offloaded(job)
    assert not all(map(torch.isfinite, map(torch.tensor, got.norms)))
    for name, value in expected.parameters.items():
        assert torch.equal(value, got.parameters[name]), name
        assert torch.isfinite(value).all()


class Odd(nn.Module):
    """Parameters of every shape: scalars, empty ones, odd sizes, a transposed one, a list, a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.odd = nn.Parameter(torch.randn(7, 13))
        self.transposed = nn.Parameter(torch.randn(13, 7).t())
        self.several = nn.ParameterList([torch.randn(5), torch.randn(1, 5)])
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.shared = nn.Linear(5, 5)
        self.again = self.shared
        self.gru = nn.GRU(5, 3, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.convolution(x[None, None, :7, :7].expand(2, 3, 7, 7)).sum()
        y = ((x @ self.odd) @ self.transposed.t()) * self.scalar + self.empty.sum()
        z = y[:, :5] @ self.shared.weight.t() + self.again(y[:, :5]) + sum(s.sum() for s in self.several)
        w = self.gru(z[None])[0].sum() + self.attention(y[None, :, :4], y[None, :, :4], y[None, :, :4])[0].sum()
        return z.tanh().mean() + 0.01 * image.tanh() + 0.01 * w


def test_odd_parameters() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return model(torch.randn(9, 7, generator=torch.Generator().manual_seed(number)))

    job = Job(Odd, loss)
    assert_same(plain(job), offloaded(job, share=1.0, device_memory=1 << 20))
    assert_same(plain(job), offloaded(job, layers=[], device_memory=100_000))
