"""Two runs beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ToolError
from ..screen import Screen
from .document import read_document


@dataclass(frozen=True)
class Change:
    """One value in two runs.

    Attributes
    ----------
    case, row, column, unit : str
    before, after : float
    gain : float
        How many times better it got: above 1 is better, whatever the unit.
    """

    case: str
    row: str
    column: str
    unit: str
    before: float
    after: float
    gain: float


def compare(first: Path, second: Path, tolerance: float, screen: Screen) -> int:
    """Show what got better and worse from one run to another.

    Returns
    -------
    int
        1 if anything got worse by more than `tolerance`, a share of what it was; else 0.

    Raises
    ------
    ToolError
        A file is none of ours, or the two have no value in common.
    """
    before, after = read_document(first), read_document(second)
    try:
        found = list(changes(before, after))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ToolError(f"--compare: {first} or {second} is damaged ({type(error).__name__}: {error})") from None
    if not found:
        raise ToolError(f"--compare: {first} and {second} have no value in common; run the same cases")
    screen.title(f"{first} to {second}")
    if before["machine"].get("make") != after["machine"].get("make"):
        screen.rows(
            [("note", f"of two machines: {before['machine'].get('make')}, {after['machine'].get('make')}")]
        )
    head = ("case", "row", "column", "before", "after", "ratio")
    screen.table(head, [_row(change, tolerance) for change in found], words=3)
    worse = [change for change in found if change.gain < 1 - tolerance]
    screen.rows([("compared", f"{len(found)} values, {len(worse)} worse by more than {tolerance:.0%}")])
    return 1 if worse else 0


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
    """The values that two documents have in common."""
    earlier = {case["name"]: case for case in before["cases"]}
    for case in after["cases"]:
        known = _values(earlier.get(case["name"]))
        for (row, column), value in _values(case).items():
            old = known.get((row, column))
            if old is not None and value is not None and old > 0 and value > 0:
                gain = value / old if case["higher_is_better"] else old / value
                yield Change(case["name"], row, column, case["unit"], old, value, gain)


def _values(case: dict[str, Any] | None) -> dict[tuple[str, str], float | None]:
    if case is None or case["values"] is None:
        return {}
    return {
        (row, column): value
        for row, line in zip(case["rows"], case["values"], strict=True)
        for column, value in zip(case["columns"], line, strict=True)
    }


def _row(change: Change, tolerance: float) -> tuple[str, ...]:
    mark = " worse" if change.gain < 1 - tolerance else ""
    before, after = f"{change.before:.4g} {change.unit}", f"{change.after:.4g} {change.unit}"
    return (change.case, change.row, change.column, before, after, f"{change.gain:.3f}{mark}")
