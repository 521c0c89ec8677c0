"""The steps of a run, timed; the same for whoever trains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .data import Batches
from .model import Decoder
from .recipe import Recipe

WARM_UP = 3


@dataclass(frozen=True)
class StepResult:
    """What one step gave: the loss of every micro-batch, the norm before clipping, device bytes at most so far.

    And the bytes that helpers have carried since the step before.
    """

    losses: list[float]
    grad_norm: float | None
    device_peak_bytes: int | None
    helper_bytes: int = 0


@dataclass(frozen=True)
class Sample:
    """One step as it is shown and kept: `loss` is the mean over the micro-batches."""

    step: int
    loss: float
    grad_norm: float | None
    seconds: float
    tokens_per_second: float
    device_peak_bytes: int | None
    helper_bytes: int = 0


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    samples : list of Sample
    losses : list of float
        Of every micro-batch.
    parameters : mapping of name to Tensor
        fp32, on the CPU, copies; empty if nobody wanted them.
    """

    samples: list[Sample]
    losses: list[float]
    parameters: dict[str, torch.Tensor]

    def since(self, first: int) -> Run:
        """The same without its first `first` steps."""
        per_step = len(self.losses) // max(1, len(self.samples))
        return Run(self.samples[first:], self.losses[first * per_step :], self.parameters)

    @property
    def iteration_s(self) -> float:
        """Median seconds of a step, the warm-up left out."""
        return statistics.median(sample.seconds for sample in self.samples[self.warm_up :])

    @property
    def warm_up(self) -> int:
        """How many of the first steps the median leaves out: 3, or what leaves at least one."""
        return min(WARM_UP, len(self.samples) - 1)


class Training(Protocol):
    """Somebody who trains."""

    def step(self, number: int) -> StepResult:
        """Make a step and wait for its losses; what is left of its update shows in the time of the next."""

    def finish(self) -> None:
        """Wait for what is left of the last step's update."""

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies of the fp32 parameters by name, on the CPU."""


def run_steps(
    training: Training,
    recipe: Recipe,
    show: Callable[[Sample], None],
    *,
    keep_parameters: bool,
    first: int = 0,
    save: Callable[[int], None] = lambda step: None,
    due: Callable[[int], bool] = lambda step: False,
) -> Run:
    """The steps of a recipe.

    Parameters
    ----------
    training : Training
    recipe : Recipe
    show : callable
        Told of every step.
    keep_parameters : bool
        Whether the result has the parameters; they take 4 bytes each.
    first : int
        Steps that have been made before.
    save : callable
        Called between steps, with the number of those made, where it is due; not in the times.
    due : callable
        Whether it is, after so many steps.  Then the step's update is waited for, in the time of the step.
    """
    samples: list[Sample] = []
    losses: list[float] = []
    before = time.perf_counter()
    for number in range(first, recipe.steps):
        result = training.step(number)
        if due(number + 1):
            training.finish()
        now = time.perf_counter()
        seconds, before = now - before, now
        sample = Sample(
            step=number + 1,
            loss=statistics.fmean(result.losses),
            grad_norm=result.grad_norm,
            seconds=seconds,
            tokens_per_second=recipe.tokens_per_step / seconds,
            device_peak_bytes=result.device_peak_bytes,
            helper_bytes=result.helper_bytes,
        )
        losses += result.losses
        samples.append(sample)
        show(sample)
        if due(number + 1):
            save(number + 1)
        before = time.perf_counter()
    return Run(samples, losses, training.parameters() if keep_parameters else {})


def run_micro_batches(
    model: Decoder,
    batches: Batches,
    recipe: Recipe,
    number: int,
    device: torch.device,
    check: Callable[[], None],
) -> torch.Tensor:
    """Forward and backward of every micro-batch of a step; the losses, on the device, without waiting for it.

    Parameters
    ----------
    check : callable
        Called where the step may be broken off.
    """
    losses = []
    for micro_step in range(recipe.accumulate):
        tokens = torch.from_numpy(batches.micro_batch(number, micro_step))
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        check()
        (loss / recipe.accumulate).backward()
        check()
        losses.append(loss.detach())
    return torch.stack(losses)
