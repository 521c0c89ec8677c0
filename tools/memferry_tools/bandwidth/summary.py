"""The few figures that most questions are about, from what the cases have found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from memferry_allocator import Direction
from memferry_transport import Calibration
from memferry_transport.measure import NEVER, CaseResult, Matrix

SIZES = (16 << 20, 64 << 20, 256 << 20, 1 << 30)
WITHIN = 0.1


def summarise(results: Sequence[CaseResult], calibration: Calibration | None) -> dict[str, Any]:
    """Figures by name; null where the cases they come from were not run.

    ``multipath_*_ratio``, by size in bytes: the engine's rate over that of a direct copy of the same run.
    ``direct_over_plain``: the engine without helpers over the driver's own copy, in the worse direction.
    ``submission_overhead_us``: host time that the engine adds to submitting a small copy.
    ``cpu_share``: processor time over wall time during transfers over several ways.
    ``both_pulling_ratio``: all devices pulling at once through engines, over their direct copies at once.
    ``predicted_within_10_percent``: of the sizes and directions measured, the share predicted that well.
    ``break_even_bytes``, by direction: from where on several ways pay, on the first device.
    """
    found = {result.name: result.matrix for result in results if result.matrix is not None}
    return {
        "multipath_h2d_ratio": _by_size(found.get("engine_h2d")),
        "multipath_d2h_ratio": _by_size(found.get("engine_d2h")),
        "direct_over_plain": _direct_over_plain(found.get("engine_direct")),
        "submission_overhead_us": _overhead(found.get("submission")),
        "cpu_share": _worst(found.get("cpu_share")),
        "both_pulling_ratio": _both_pulling(found.get("both_pulling")),
        "predicted_within_10_percent": _predicted(found.get("predicted_over_measured")),
        "break_even_bytes": _break_even(calibration),
    }


def _ratio(matrix: Matrix, above: str, below: str, column: str) -> float | None:
    first, second = matrix.value(above, column), matrix.value(below, column)
    return None if first is None or not second else first / second


def _by_size(matrix: Matrix | None) -> Mapping[str, float | None]:
    return {str(size): None if matrix is None else _ratio(matrix, "engine", "direct", str(size)) for size in SIZES}


def _direct_over_plain(matrix: Matrix | None) -> float | None:
    if matrix is None:
        return None
    ratios = [_ratio(matrix, "engine.copy", "driver.copy", column) for column in matrix.columns]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _overhead(matrix: Matrix | None) -> float | None:
    if matrix is None:
        return None
    pairs = [
        (matrix.value("engine.copy", column), matrix.value("driver.copy", column)) for column in matrix.columns
    ]
    return median(several - plain for several, plain in pairs if several is not None and plain is not None)


def _worst(matrix: Matrix | None) -> float | None:
    if matrix is None:
        return None
    return max((value for row in matrix.values() for value in row if value is not None), default=None)


def _both_pulling(matrix: Matrix | None) -> float | None:
    return None if matrix is None else _ratio(matrix, "engine", "direct", matrix.columns[0])


def _predicted(matrix: Matrix | None) -> float | None:
    if matrix is None:
        return None
    ratios = [value for row in matrix.values() for value in row if value is not None]
    return sum(abs(ratio - 1) <= WITHIN for ratio in ratios) / len(ratios) if ratios else None


def _break_even(calibration: Calibration | None) -> Mapping[str, int | None]:
    known = {} if calibration is None else calibration.break_even_bytes
    first = min((device for device, _ in known), default=0)
    sizes = {direction.value: known.get((first, direction)) for direction in Direction}
    return {name: None if size is None or size >= NEVER else size for name, size in sizes.items()}
