"""What the ranks of a test do: the same training as one process, each on its own micro-batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import memferry_rt
from memferry_allocator import EmulatedOptions
from tests.runtime.models import (
    Decoder,
    checkpointed,
    next_token_loss,
    plainly,
    shuffled,
    skipping,
    twice,
)


class Narrow(nn.Module):
    """Layers with fewer elements than there are ranks, one that is never used, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.scale = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
        self.unused = nn.Linear(5, 5)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(self.frozen(block(x)))
        for scale in self.scale:
            x = scale(x[..., :1]) + x
        return x


def _narrow_loss(model: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return model(torch.randn(4, 3, generator=generator)).square().mean()


def _seeded(model: nn.Module, number: int) -> torch.Tensor:
    """With choices of its own in every micro-batch."""
    torch.manual_seed(number)
    return next_token_loss(model, number)


def _twice_recomputed(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return checkpointed(True)(blocks, checkpointed(True)(blocks, x))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "plain SGD": torch.optim.SGD,
    "Adagrad": partial(torch.optim.Adagrad, fused=True),
    "Lion": memferry_rt.Lion,
}
Loss = Callable[[nn.Module, int], torch.Tensor]
_decoder = partial(Decoder, layers=3)
MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "plain": (_decoder, next_token_loss),
    "tied": (partial(_decoder, tied=True), next_token_loss),
    "twice": (partial(_decoder, twice), next_token_loss),
    "recomputed": (partial(_decoder, checkpointed(False)), next_token_loss),
    "reentrant": (partial(_decoder, checkpointed(True)), next_token_loss),
    "reentrant twice": (partial(_decoder, _twice_recomputed), next_token_loss),
    "skipping": (partial(_decoder, skipping), _seeded),
    "shuffled": (partial(_decoder, shuffled), _seeded),
    "narrow": (Narrow, _narrow_loss),
}
assert plainly is Decoder().run


@dataclass(frozen=True)
class Job:
    """A training that every rank takes part in.

    Attributes
    ----------
    share : float
        Of the weights, what the device has room for.
    absent : frozenset of (int, int)
        Steps and ranks that have no data in them.
    spoilt : frozenset of int
        Steps whose gradient is made infinite on the last rank.
    """

    model: str = "plain"
    steps: int = 4
    accumulate: int = 1
    max_grad_norm: float | None = 1.0
    dtype: torch.dtype = torch.float32
    share: float = 0.8
    seed: int = 0
    absent: frozenset[tuple[int, int]] = frozenset()
    spoilt: frozenset[int] = frozenset()
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    losses: list[float]
    norms: list[float]
    skipped: int
    streamed: int  # parameters whose state the device has updated in the last step
    parameters: dict[str, torch.Tensor]


def build(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[job.model][0]().to(job.dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, OPTIMIZERS[job.optimizer](parameters, lr=1e-2)


def offloaded(group: Any, job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build(job)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    memferry_rt.offload(
        model,
        optimizer,
        device="emulated",
        device_memory=max(int(weights * job.share), 64 << 10),
        max_grad_norm=job.max_grad_norm,
        process_group=group,
        emulated=EmulatedOptions(seed=job.seed),
        **job.options,
    )
    return model, optimizer


def losses_of(job: Job, model: nn.Module, step: int, rank: int, size: int) -> Any:
    """A step's micro-batches of one rank."""
    if (step, rank) in job.absent:
        return
    for micro in range(job.accumulate):
        loss = MODELS[job.model][1](model, (step * job.accumulate + micro) * size + rank)
        yield loss * math.inf if step in job.spoilt and rank == size - 1 else loss


def train(group: Any, job: Job) -> Result:
    """One rank's training."""
    model, optimizer = offloaded(group, job)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    runtime = memferry_rt.runtime_of(model)
    losses, norms = [], []
    for step in range(job.steps):
        for loss in losses_of(job, model, step, rank, size):
            (loss / job.accumulate).backward()
            losses.append(loss.item())
        optimizer.step()
        norms.append(runtime.grad_norm)
        optimizer.zero_grad()
    parameters = {name: value.clone() for name, value in runtime.master_parameters().items()}
    skipped, streamed = runtime.skipped_steps, runtime.report().streamed_parameters
    memferry_rt.restore(model)
    assert runtime.driver.registered == 0
    return Result(losses, norms, skipped, streamed, parameters)


def alone(job: Job, size: int, hosts: int = 1) -> Result:
    """The same in one process of plain PyTorch: every rank's gradient, then their mean as it is defined."""
    model, optimizer = build(job)
    masters = {p: nn.Parameter(p.detach().float().clone()) for p in optimizer.param_groups[0]["params"]}
    update = OPTIMIZERS[job.optimizer](masters.values(), lr=1e-2)
    norms, skipped = [], 0
    for step in range(job.steps):
        for p, master in masters.items():
            p.grad = master.grad = None
        for p, gradient in _mean(job, model, step, size, hosts).items():
            masters[p].grad = gradient.float()
        gradients = [master.grad.double() for master in masters.values() if master.grad is not None]
        norm = math.sqrt(sum(float(torch.linalg.vector_norm(gradient)) ** 2 for gradient in gradients))
        norms.append(norm)
        if not math.isfinite(norm):
            skipped += 1
            continue
        if job.max_grad_norm is not None:
            for master in masters.values():
                if master.grad is not None:
                    master.grad.mul_(min(1.0, job.max_grad_norm / (norm + 1e-6)))
        update.step()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
    names = {p: name for name, p in model.named_parameters()}
    return Result([], norms, skipped, 0, {names[p]: master.detach() for p, master in masters.items()})


def _mean(job: Job, model: nn.Module, step: int, size: int, hosts: int) -> dict[nn.Parameter, torch.Tensor]:
    """Of the ranks' gradients, for each micro-step, summed over these in the gradient's dtype."""
    micro: list[list[dict[nn.Parameter, torch.Tensor]]] = []
    for rank in range(size):
        made = []
        for loss in losses_of(job, model, step, rank, size):
            model.zero_grad()
            (loss / job.accumulate).backward()
            made.append({p: p.grad.clone() for p in model.parameters() if p.grad is not None})
        micro.append(made)
    total: dict[nn.Parameter, torch.Tensor] = {}
    summed = getattr(torch, job.options.get("accumulate_dtype", ""), None)
    for number in range(job.accumulate):
        ranks = [made[number] if number < len(made) else {} for made in micro]
        for p in model.parameters():
            given = [gradients[p] for gradients in ranks if p in gradients]
            if not given:
                continue
            each = [gradients.get(p, torch.zeros_like(p)).float() for gradients in ranks]
            sums = [sum(each[first : first + size // hosts]) for first in range(0, size, size // hosts)]
            mean = (sum(sums) / size).to(summed or p.dtype)
            total[p] = mean + total[p] if p in total else mean
    return total


def together(group: Any, jobs: list[Job]) -> list[Result]:
    """Several trainings one after the other."""
    return [train(group, job) for job in jobs]


@contextlib.contextmanager
def closing(model: nn.Module) -> Any:
    try:
        yield memferry_rt.runtime_of(model)
    finally:
        memferry_rt.restore(model)
