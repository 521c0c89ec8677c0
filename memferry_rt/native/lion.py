"""What a step of Lion needs beside its tensors, as docs/numerics.md defines it."""

from __future__ import annotations

from dataclasses import dataclass

from .coefficients import rounded


@dataclass(frozen=True)
class LionSettings:
    """Settings of Lion, captured when a step is made."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool


@dataclass(frozen=True)
class LionCoefficients:
    """What all elements of a step share.

    Attributes
    ----------
    gradient_factor : float
        Multiplied into every gradient: the unscaling and clipping factor, negative to maximize.
    decay : float
        ``weight_decay``.
    minus_step : float
        ``-lr``.
    update_keep, update_weight : float
        ``beta1`` and ``1 - beta1``.
    mean_keep, mean_weight : float
        ``beta2`` and ``1 - beta2``.
    """

    gradient_factor: float
    decay: float
    minus_step: float
    update_keep: float
    update_weight: float
    mean_keep: float
    mean_weight: float


def lion_coefficients(settings: LionSettings, scale: float) -> LionCoefficients:
    """The coefficients of one step: computed in double, then rounded to fp32."""
    return LionCoefficients(
        gradient_factor=rounded(-scale if settings.maximize else scale),
        decay=rounded(settings.weight_decay),
        minus_step=rounded(-settings.lr),
        update_keep=rounded(settings.beta1),
        update_weight=rounded(1.0 - settings.beta1),
        mean_keep=rounded(settings.beta2),
        mean_weight=rounded(1.0 - settings.beta2),
    )
