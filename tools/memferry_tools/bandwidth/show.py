"""Results on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memferry_allocator import format_size
from memferry_transport.measure import CaseResult, Matrix

from ..screen import Screen

_MOST_COLUMNS = 8
_LABEL = 28


def show_result(screen: Screen, result: CaseResult) -> None:
    """A case: what it is, and its values."""
    screen.title(f"{result.name} ({result.unit})")
    screen.rows([("what", result.what)])
    if result.matrix is None:
        screen.rows([(result.status, result.reason or "")])
    else:
        screen.table(*_table(result.matrix))


def result_line(result: CaseResult) -> str:
    """A case in one line."""
    if result.matrix is None:
        return f"{result.name}: {result.status}: {result.reason}"
    known = [value for row in result.matrix.values() for value in row if value is not None]
    low, high = f"{min(known):.4g}", f"{max(known):.4g}"
    return f"{result.name}: {low if low == high else f'{low} to {high}'} {result.unit}"


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary, as far as it was measured."""
    lines = []
    for name, value in summary.items():
        parts = value if isinstance(value, dict) else {"": value}
        known = [f"{_label(key)} {_number(part)}".strip() for key, part in parts.items() if part is not None]
        if known:
            lines.append(f"{name:<{_LABEL}} {', '.join(known)}")
    return lines


def _table(matrix: Matrix) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and lines; turned on its side where it is too wide."""
    values = {(row, column): matrix.value(row, column) for row in matrix.rows for column in matrix.columns}
    if len(matrix.columns) <= _MOST_COLUMNS:
        head = (f"{matrix.row} \\ {matrix.column}", *map(_label, matrix.columns))
        lines = [(_label(row), *(_cell(values[row, column]) for column in matrix.columns)) for row in matrix.rows]
        return head, lines
    head = (f"{matrix.column} \\ {matrix.row}", *map(_label, matrix.rows))
    return head, [
        (_label(column), *(_cell(values[row, column]) for row in matrix.rows)) for column in matrix.columns
    ]


def _label(text: str) -> str:
    """Labels that are sizes in bytes, as people read them."""
    return format_size(int(text)).replace(".00", "") if text.isdigit() and int(text) >= 1024 else text


def _cell(value: float | None) -> str:
    return "N/A" if value is None else f"{value:.2f}" if round(value, 4) >= 1 else f"{value:.4f}"


def _number(value: float) -> str:
    return format_size(value) if isinstance(value, int) else f"{value:.4g}"
