"""What a case has found: a labelled matrix of numbers, with every sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Samples = tuple[float, ...]


@dataclass
class Matrix:
    """Values by row and column; a cell without samples is one that cannot be measured on this machine.

    Attributes
    ----------
    row, column : str
        What the labels name.
    rows, columns : list of str
    samples : mapping of (str, str) to tuple of float
        In the unit of the case.
    """

    row: str
    column: str
    rows: list[str]
    columns: list[str]
    samples: dict[tuple[str, str], Samples] = field(default_factory=dict)

    @classmethod
    def of(cls, row: str, rows: Sequence[object], column: str, columns: Sequence[object]) -> Matrix:
        return cls(row, column, [str(label) for label in rows], [str(label) for label in columns])

    def put(self, row: object, column: object, samples: Sequence[float]) -> None:
        self.samples[str(row), str(column)] = tuple(samples)

    def value(self, row: object, column: object) -> float | None:
        """The median of a cell's samples; None without any."""
        found = self.samples.get((str(row), str(column)))
        return median(found) if found else None

    def values(self) -> list[list[float | None]]:
        """All cells, row by row."""
        return [[self.value(row, column) for column in self.columns] for row in self.rows]


@dataclass(frozen=True)
class CaseResult:
    """One case, run or not.

    Attributes
    ----------
    name, what, unit : str
    higher_is_better : bool
    status : {"passed", "not run", "failed"}
    reason : str, optional
        Why it was not run, or what failed.
    matrix : Matrix, optional
        What was measured.
    seconds : float
        How long the case took.
    """

    name: str
    what: str
    unit: str
    higher_is_better: bool
    status: str
    reason: str | None
    matrix: Matrix | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Numbers and nulls; the samples in the shape of the values."""
        matrix = self.matrix
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "higher_is_better": self.higher_is_better,
            "status": self.status,
            "reason": self.reason,
            "seconds": self.seconds,
            "row": None if matrix is None else matrix.row,
            "column": None if matrix is None else matrix.column,
            "rows": None if matrix is None else matrix.rows,
            "columns": None if matrix is None else matrix.columns,
            "values": None if matrix is None else matrix.values(),
            "samples": None
            if matrix is None
            else [
                [
                    list(matrix.samples[row, column]) if (row, column) in matrix.samples else None
                    for column in matrix.columns
                ]
                for row in matrix.rows
            ],
        }
