"""What a step of SGD needs beside its tensors, as docs/numerics.md defines it."""

from __future__ import annotations

from dataclasses import dataclass

from .coefficients import rounded


@dataclass(frozen=True)
class SgdSettings:
    """Settings of SGD, captured when a step is made."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


@dataclass(frozen=True)
class SgdCoefficients:
    """What all elements of a step share.

    Attributes
    ----------
    gradient_factor : float
        Multiplied into every gradient: the unscaling and clipping factor, negative to maximize.
    l2_decay : float
        ``weight_decay``.
    momentum : float
    gradient_weight : float
        ``1 - dampening``.
    minus_step : float
        ``-lr``.
    first : bool
        The momentum buffer is made in this step.
    nesterov : bool
    bare : bool
        There is no momentum, and no buffer.
    """

    gradient_factor: float
    l2_decay: float
    momentum: float
    gradient_weight: float
    minus_step: float
    first: bool
    nesterov: bool
    bare: bool


def sgd_coefficients(settings: SgdSettings, scale: float, *, first: bool) -> SgdCoefficients:
    """The coefficients of one step: computed in double, then rounded to fp32."""
    return SgdCoefficients(
        gradient_factor=rounded(-scale if settings.maximize else scale),
        l2_decay=rounded(settings.weight_decay),
        momentum=rounded(settings.momentum),
        gradient_weight=rounded(1.0 - settings.dampening),
        minus_step=rounded(-settings.lr),
        first=first,
        nesterov=settings.nesterov,
        bare=settings.momentum == 0,
    )
