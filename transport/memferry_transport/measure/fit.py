"""Fitting a way's cost to what was measured of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cost import LinearCost

_ROUNDS = 20
_TOLERATED = 1.345  # Huber's constant: of residuals in units of their spread, those beyond count less


def fit_cost(samples: Mapping[int, Sequence[float]]) -> LinearCost:
    """``alpha_s + nbytes / bytes_per_second`` for the medians of `samples`, which are seconds by size in bytes.

    Least squares of the relative errors, so that small transfers count as much as large ones, with Huber's
    weights, so that a size at which something else was going on does not bend the line.

    Raises
    ------
    ValueError
        There is no sample, or larger transfers take no longer.
    """
    if not samples:
        raise ValueError("no samples to fit a cost to")
    sizes = np.array(sorted(samples), dtype=np.float64)
    times = np.array([median(samples[int(size)]) for size in sizes])
    alpha, slope = _robust_line(sizes, times)
    if len(sizes) == 1 or alpha < 0:
        alpha, slope = 0.0, float(np.median(times / sizes))
    if slope <= 0:
        raise ValueError(f"transfers of {int(sizes[-1])} bytes take no longer than smaller ones; measure again")
    return LinearCost(float(alpha), float(1 / slope))


def _robust_line(sizes: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Intercept and slope."""
    # Both columns are scaled to about 1: bytes and seconds are many powers of ten apart.
    scale = sizes[-1]
    columns = np.stack([np.ones_like(sizes), sizes / scale], axis=1) / times[:, None]
    weights = np.ones_like(sizes)
    found: npt.NDArray[np.floating[Any]] = np.zeros(2)
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(columns * root[:, None], root, rcond=None)[0]
        errors = np.abs(1 - columns @ found)
        spread = float(np.median(errors)) / 0.6745
        if spread < 1e-9:
            break
        weights = np.minimum(1.0, _TOLERATED * spread / np.maximum(errors, 1e-12))
    return float(found[0]), float(found[1] / scale)
