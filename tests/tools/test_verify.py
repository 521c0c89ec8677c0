"""The comparison of two runs: it must be able to fail."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from memferry_tools.train.loop import Run, Sample
from memferry_tools.train.verify import compare


def run(losses: tuple[float, ...] = (2.0, 1.0), **parameters: torch.Tensor) -> Run:
    samples = [Sample(step + 1, loss, 1.0, 0.5, 10.0, None) for step, loss in enumerate(losses)]
    return Run(samples, list(losses), parameters or {"w": torch.tensor([1.0, 0.0, -3.0])})


def test_equal_runs_are_identical_and_counted() -> None:
    comparison = compare(run(), run())
    assert comparison.identical
    assert (comparison.steps, comparison.losses, comparison.parameters, comparison.values) == (2, 2, 1, 3)
    assert (comparison.max_abs_difference, comparison.first_difference) == (0.0, None)


def test_a_nan_equals_itself() -> None:
    broken = torch.tensor([math.nan])
    assert compare(run((math.nan,), w=broken), run((math.nan,), w=broken.clone())).identical


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda w: w.__setitem__(2, torch.nextafter(w[2], torch.tensor(0.0))), 2**-22),
        (lambda w: w.__setitem__(1, -0.0), 0.0),
    ],
    ids=["the last bit", "the sign of zero"],
)
def test_one_bit_of_a_parameter_is_found(change: Callable[[torch.Tensor], None], difference: float) -> None:
    changed = torch.tensor([1.0, 0.0, -3.0])
    change(changed)
    comparison = compare(run(w=changed), run())
    assert not comparison.identical
    assert comparison.first_difference == "parameter w"
    assert comparison.max_abs_difference == difference


def test_the_first_differing_step_is_named() -> None:
    comparison = compare(run((2.0, 1.0, 0.5)), run((2.0, 1.25, 0.25)))
    assert comparison.first_difference == "loss of step 2"
    assert comparison.max_abs_difference == 0.25


def test_a_micro_batch_belongs_to_its_step() -> None:
    one, other = run((2.0, 1.0)), run((2.0, 1.0))
    one.losses[:] = [2.0, 2.0, 1.0, 1.5]
    other.losses[:] = [2.0, 2.0, 1.0, 1.0]
    assert compare(one, other).first_difference == "loss of step 2"


def test_a_nan_on_one_side_is_found() -> None:
    comparison = compare(run(w=torch.tensor([math.nan, 0.0, -3.0])), run())
    assert not comparison.identical
    assert math.isnan(comparison.max_abs_difference)


def test_other_parameters_or_fewer_losses_are_a_difference() -> None:
    assert compare(run(v=torch.ones(3)), run()).first_difference == "parameter v, which only one of the runs has"
    assert not compare(run((2.0,)), run()).identical
