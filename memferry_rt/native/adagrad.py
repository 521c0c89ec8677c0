"""What a step of Adagrad needs beside its tensors, as docs/numerics.md defines it."""

from __future__ import annotations

from dataclasses import dataclass

from .coefficients import rounded


@dataclass(frozen=True)
class AdagradSettings:
    """Settings of Adagrad, captured when a step is made."""

    lr: float
    lr_decay: float
    weight_decay: float
    eps: float
    maximize: bool


@dataclass(frozen=True)
class AdagradCoefficients:
    """What all elements of a step share.

    Attributes
    ----------
    gradient_factor : float
        Multiplied into every gradient: the unscaling and clipping factor, negative to maximize.
    l2_decay : float
        ``weight_decay``.
    minus_step : float
        ``-lr / (1 + (step - 1) * lr_decay)``.
    eps : float
    """

    gradient_factor: float
    l2_decay: float
    minus_step: float
    eps: float


def adagrad_coefficients(settings: AdagradSettings, step: float, scale: float) -> AdagradCoefficients:
    """The coefficients of step number `step`, from 1: computed in double, then rounded to fp32."""
    return AdagradCoefficients(
        gradient_factor=rounded(-scale if settings.maximize else scale),
        l2_decay=rounded(settings.weight_decay),
        minus_step=rounded(-(settings.lr / (1 + (step - 1) * settings.lr_decay))),
        eps=rounded(settings.eps),
    )
