"""The same training twice: in plain PyTorch, and offloaded.  Every exactness test compares the two."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import memferry_rt
from memferry_allocator import EmulatedOptions, MemFerryError

Between = Callable[[nn.Module, int], None]


@dataclass(frozen=True)
class Job:
    """A training run: how the model is built, what a micro-batch's loss is, and the settings."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    steps: int = 6
    accumulate: int = 1
    max_grad_norm: float | None = 1.0
    lr: float = 1e-2
    dtype: torch.dtype = torch.float32
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    groups: Callable[[nn.Module], Any] | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    before_step: Between | None = None
    between: Between | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def _build(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    how = {"fused": True} if issubclass(job.optimizer, torch.optim.Adam) else {}
    return job.optimizer(_parameters(job, model), lr=job.lr, **how, **job.settings)  # type: ignore[call-arg]


def _parameters(job: Job, model: nn.Module) -> Any:
    return job.groups(model) if job.groups else [p for p in model.parameters() if p.requires_grad]


def _iterate(job: Job, model: nn.Module, optimizer: Any, step: Callable[[], float], scheduler: Any) -> Result:
    losses, norms = [], []
    torch.manual_seed(7)
    for number in range(job.steps):
        for micro in range(job.accumulate):
            loss = job.loss(model, number * job.accumulate + micro)
            (loss / job.accumulate).backward()
            losses.append(loss.item())
        if job.before_step:
            job.before_step(model, number)
        norms.append(step())
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()
        if job.between:
            job.between(model, number)
    return Result(losses, norms, {})


def plain(job: Job) -> Result:
    """Plain PyTorch: autograd, fp32 masters, clipping by the fp64 norm, fused AdamW or another optimizer."""
    torch.manual_seed(0)
    model = job.build().to(job.dtype)
    real = _build(job, model)
    masters = {p: nn.Parameter(p.detach().float()) for group in real.param_groups for p in group["params"]}
    groups = [{**group, "params": [masters[p] for p in group["params"]]} for group in real.param_groups]
    optimizer = job.optimizer(groups, lr=job.lr, **job.settings)  # type: ignore[call-arg]
    scheduler = job.schedule(optimizer) if job.schedule else None

    def step() -> float:
        total = 0.0
        for parameter in model.parameters():
            if parameter.grad is not None:
                norm = float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))
                total += norm * norm
        norm = math.sqrt(total)
        if not math.isfinite(norm):
            return norm
        scale = 1.0 if job.max_grad_norm is None else min(1.0, job.max_grad_norm / (norm + 1e-6))
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float().clone()
            if master.grad is not None and scale != 1.0:
                master.grad.mul_(scale)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
        return norm

    class Both:
        def zero_grad(self) -> None:
            real.zero_grad()
            optimizer.zero_grad()

    result = _iterate(job, model, Both(), step, scheduler)
    names = {p: name for name, p in model.named_parameters()}
    return Result(result.losses, result.norms, {names[p]: m.detach() for p, m in masters.items()})


def offloaded(job: Job, *, share: float = 1 / 3, seed: int = 0, **options: Any) -> Result:
    """The same through `memferry_rt.offload` on the emulated device, with a share of the weights as budget."""
    torch.manual_seed(0)
    model = job.build().to(job.dtype)
    optimizer = _build(job, model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    options.setdefault("device_memory", int(weights * share))
    options.setdefault("emulated", EmulatedOptions(seed=seed))
    memferry_rt.offload(model, optimizer, device="emulated", max_grad_norm=job.max_grad_norm, **options)
    runtime = memferry_rt.runtime_of(model)
    scheduler = job.schedule(optimizer) if job.schedule else None
    try:

        def step() -> float:
            optimizer.step()
            assert runtime.grad_norm is not None
            return runtime.grad_norm

        result = _iterate(job, model, optimizer, step, scheduler)
        report = runtime.report()
        assert report.device_peak <= report.device_memory
        parameters = {name: value.clone() for name, value in runtime.master_parameters().items()}
    except BaseException:
        with contextlib.suppress(MemFerryError):  # the first error is the one to see
            runtime.close()
        raise
    runtime.close()
    assert runtime.driver.registered == 0
    return Result(result.losses, result.norms, parameters)


def assert_same(one: Result, other: Result) -> None:
    """Equal to the bit: losses, norms, and every parameter."""
    assert _bits(one.losses) == _bits(other.losses)
    assert _bits(one.norms) == _bits(other.norms)
    assert one.parameters.keys() == other.parameters.keys()
    for name, value in one.parameters.items():
        assert torch.equal(value.view(torch.int32), other.parameters[name].contiguous().view(torch.int32)), name


def _bits(values: list[float]) -> list[int]:
    return torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()
