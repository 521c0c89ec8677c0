"""Whether two runs gave the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .loop import Run


@dataclass(frozen=True)
class Comparison:
    """What was compared, and what differs.

    Attributes
    ----------
    identical : bool
        Every bit of every loss and of every final parameter.
    steps, losses, parameters, values : int
        How much was compared: steps, losses in them, parameter tensors, and numbers in those.
    max_abs_difference : float
        Over losses and parameters; NaN where only one of two numbers is one.
    first_difference : str or None
        Where the bits part first: a step, or else a parameter.
    """

    identical: bool
    steps: int
    losses: int
    parameters: int
    values: int
    max_abs_difference: float
    first_difference: str | None


def compare(run: Run, reference: Run) -> Comparison:
    """Compare the bits of two runs of one recipe; 0.0 and -0.0 differ, and a NaN equals itself."""
    found = [*_differing_losses(run, reference), *_differing_parameters(run, reference)]
    return Comparison(
        identical=not found,
        steps=len(reference.samples),
        losses=len(reference.losses),
        parameters=len(reference.parameters),
        values=sum(value.numel() for value in reference.parameters.values()),
        max_abs_difference=float(np.max([difference for _, difference in found], initial=0.0)),
        first_difference=found[0][0] if found else None,
    )


def _differing_losses(run: Run, reference: Run) -> Iterator[tuple[str, float]]:
    if len(run.losses) != len(reference.losses):
        yield f"{len(run.losses)} losses where the reference has {len(reference.losses)}", float("nan")
        return
    micro_batches = len(reference.losses) // max(1, len(reference.samples))
    for number, (mine, other) in enumerate(zip(run.losses, reference.losses, strict=True)):
        if np.float64(mine).tobytes() != np.float64(other).tobytes():
            yield f"loss of step {number // micro_batches + 1}", abs(mine - other)


def _differing_parameters(run: Run, reference: Run) -> Iterator[tuple[str, float]]:
    if run.parameters.keys() != reference.parameters.keys():
        odd = sorted(run.parameters.keys() ^ reference.parameters.keys())
        yield f"parameter {odd[0]}, which only one of the runs has", float("nan")
        return
    for name, other in reference.parameters.items():
        mine = run.parameters[name]
        if not torch.equal(mine.view(torch.int32), other.view(torch.int32)):
            yield f"parameter {name}", float((mine.double() - other.double()).abs().max())
