"""Results for other programs: CSV, and the JSON of nvbandwidth."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from memferry_transport.measure import CASES, CaseResult

from ..version import version

_STATUS = {"passed": "Passed", "not run": "Waived", "failed": "Error"}


def to_csv(results: Sequence[CaseResult]) -> str:
    """A line for each value, with its samples; a case that was not run is one line without any."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["case", "status", "unit", "row", "column", "median", "samples"])
    for result in results:
        matrix = result.matrix
        if matrix is None:
            lines.writerow([result.name, result.status, result.unit, "", "", "", ""])
            continue
        for row in matrix.rows:
            for column in matrix.columns:
                value = matrix.value(row, column)
                samples = " ".join(map(repr, matrix.samples.get((row, column), ())))
                shown = "" if value is None else repr(value)
                lines.writerow([result.name, result.status, result.unit, row, column, shown, samples])
    return text.getvalue()


def to_nvbandwidth(
    results: Sequence[CaseResult], devices: Sequence[str], *, driver: str | None, cuda: int | None
) -> dict[str, Any]:
    """The cases that nvbandwidth has, as its own ``--json`` has them: numbers are text, or ``N/A``.

    Parameters
    ----------
    results : sequence of CaseResult
    devices : sequence of str
        Their names.
    driver : str, optional
        Its version.
    cuda : int, optional
        As for `cuda_version`.
    """
    return {
        "nvbandwidth": {
            "CUDA Runtime Version": cuda,
            "Driver Version": driver or "N/A",
            "GPU Device list": [f"{number}: {name}" for number, name in enumerate(devices)],
            "git_version": "",
            "testcases": [_testcase(result) for result in results if CASES[result.name].form is not None],
            "version": f"memferry {version()}",
        }
    }


def _testcase(result: CaseResult) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": result.name, "status": _STATUS[result.status]}
    if result.status == "failed":
        entry["error"] = result.reason
    if result.matrix is None:
        return entry
    rows = result.matrix.values()
    known = [value for row in rows for value in row if value is not None]
    return entry | {
        "bandwidth_description": CASES[result.name].form,
        "bandwidth_matrix": [["N/A" if value is None else f"{value:g}" for value in row] for row in rows],
        "sum": sum(known),
        "min": min(known),
        "max": max(known),
        "average": sum(known) / len(known),
    }
