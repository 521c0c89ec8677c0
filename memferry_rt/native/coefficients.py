"""What a step of Adam needs beside its tensors, as docs/numerics.md defines it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class AdamSettings:
    """Settings of Adam or AdamW, captured when a step is made."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


@dataclass(frozen=True)
class AdamCoefficients:
    """What all elements of a step share: computed in double, then rounded to fp32.

    Attributes
    ----------
    keep : float
        ``1 - lr * weight_decay`` where the decay is decoupled, else 1.
    l2_decay : float
        ``weight_decay`` where it is not decoupled, else 0.
    mean_weight : float
        ``1 - beta1`` in fp32, and 1 less where `lerp_from_gradient`.
    tail_mean_weight : float
        The same for a tensor's tail, where PyTorch has it as ``-(1 - (1 - beta1))``: -0 for a 0.
    lerp_from_gradient : bool
        ``1 - beta1`` is 0.5 or more.
    square_weight, square_keep : float
        ``1 - beta2`` and ``beta2``.
    square_correction : float
        ``sqrt(1 - beta2 ** step)``.
    minus_step : float
        ``-lr / (1 - beta1 ** step)``.
    eps : float
    gradient_factor : float
        Multiplied into every gradient: the unscaling and clipping factor, negative to maximize.
    """

    keep: float
    l2_decay: float
    mean_weight: float
    tail_mean_weight: float
    lerp_from_gradient: bool
    square_weight: float
    square_keep: float
    square_correction: float
    minus_step: float
    eps: float
    gradient_factor: float


def adam_coefficients(settings: AdamSettings, step: float, scale: float) -> AdamCoefficients:
    """The coefficients of one step.

    Parameters
    ----------
    step : float
        The number of the step, from 1.
    scale : float
        Multiplied into every gradient.
    """
    mean_weight = rounded(1.0 - settings.beta1)
    from_gradient = not mean_weight < 0.5
    return AdamCoefficients(
        keep=rounded(1.0 - settings.lr * settings.weight_decay) if settings.decoupled else 1.0,
        l2_decay=0.0 if settings.decoupled else rounded(settings.weight_decay),
        mean_weight=rounded(mean_weight - 1.0) if from_gradient else mean_weight,
        tail_mean_weight=rounded(-(1.0 - mean_weight)) if from_gradient else mean_weight,
        lerp_from_gradient=from_gradient,
        square_weight=rounded(1.0 - settings.beta2),
        square_keep=rounded(settings.beta2),
        square_correction=rounded(math.sqrt(1.0 - settings.beta2**step)),
        minus_step=rounded(-(settings.lr / (1.0 - settings.beta1**step))),
        eps=rounded(settings.eps),
        gradient_factor=rounded(-scale if settings.maximize else scale),
    )


def rounded(value: float) -> float:
    """To fp32; infinite beyond its range."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))
