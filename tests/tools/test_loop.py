"""The steps of a run: what is in their times."""

from __future__ import annotations

import pytest
import torch

from memferry_tools.train import loop
from memferry_tools.train.recipe import Recipe


class Slow:
    """Its steps take a second, and leave an update that takes two, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.left = 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, number: int) -> loop.StepResult:
        self.finish()
        self.now += 1
        self.left = 2.0
        return loop.StepResult([1.0], None, None)

    def finish(self) -> None:
        self.now += self.left
        self.left = 0.0

    def parameters(self) -> dict[str, torch.Tensor]:
        return {}


def test_saving_hides_no_update(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(step: int) -> None:
        training.finish()
        training.now += 10

    training = Slow()
    monkeypatch.setattr(loop, "time", training)
    run = loop.run_steps(
        training, recipe, lambda _: None, keep_parameters=False, save=save, due=lambda step: step < 3
    )
    assert [sample.seconds for sample in run.samples] == pytest.approx([3, 3, 1])
