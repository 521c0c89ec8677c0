"""The norm of all gradients, and what a step scales them by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .gradient_slot import GradientSlot
from .optimizer import AmpScaling


@dataclass(frozen=True)
class GradientScale:
    """The norm of all gradients, and the factor that unscales and clips them; None if the step must be skipped."""

    norm: float
    factor: float | None


def gradient_scale(
    present: Sequence[GradientSlot], scaling: AmpScaling | None, max_grad_norm: float | None
) -> GradientScale:
    """What a step does with its gradients.

    Parameters
    ----------
    present : sequence of GradientSlot
        The parameters that have a gradient, in the order of the norm.
    scaling : AmpScaling or None
        What a `torch.amp.GradScaler` says of them.
    max_grad_norm : float or None
        Where to clip.
    """
    norms = [slot.norm for slot in present if slot.norm is not None]
    total = 0.0
    for value in torch.cat(norms).tolist() if norms else ():
        total += value * value
    unscale = 1.0 if scaling is None or scaling.inverse is None else scaling.inverse
    norm = math.sqrt(total) * unscale if total >= 0 else math.nan
    if not math.isfinite(norm) or (scaling is not None and not scaling.finite):
        return GradientScale(norm, None)
    if max_grad_norm is None:
        return GradientScale(norm, unscale)
    return GradientScale(norm, unscale * min(1.0, max_grad_norm / (norm + 1e-6)))
