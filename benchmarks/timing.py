"""Seconds of short calls: medians of many repeats, with every sample."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

REPEATS = 30


def per_call(call: Callable[[], object], *, calls: int = 2000, settle: Callable[[], object] | None = None) -> Any:
    """Seconds a call, over `REPEATS` runs of `calls` calls each; `settle` runs between them, untimed."""
    call()
    samples = []
    for _ in range(REPEATS):
        if settle is not None:
            settle()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls)
    return summary(samples)


def summary(samples: list[float]) -> dict[str, Any]:
    """Median and extremes beside the samples."""
    return {
        "median_s": statistics.median(samples),
        "min_s": min(samples),
        "max_s": max(samples),
        "samples_s": samples,
    }
